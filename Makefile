# make deps      packages for building and testing (Debian)
# make build     the release binaries
# make test      every test, with real libvirtd and QEMU
# make corpus    the domains of libvirt's own test-suite, for `make test`, which fetches them itself
# make test-host   virt-pin on whole emulated hosts; minutes the first time
# make run       a demonstration on this machine, which is left as it was
# make bench-hook   what a start pays for the hook, beside an empty program
# make bench-placement   where VMs land, beside other placement rules (docs/placement.md)
# make bench-scale  what placing a domain costs on hosts of up to 8192 CPUs
# make fuzz SECONDS=60   inputs nobody thought of, for each reader of text (a nightly compiler)
# make crash     killed at every failpoint, every write failing with every error; a few minutes
# make races     64 processes on one root for SECONDS=60
# make soak CYCLES=300   random days on real libvirt; SEED= repeats one
# make man       manuals, completions and the default configuration, into target/generated
# make install   DESTDIR= PREFIX=/usr, from the release binaries or those in BUILD=
# make deb       a Debian package, in target/packages
# make rpm       the same for Fedora and its like

PREFIX  ?= /usr
DESTDIR ?=
SECONDS ?= 60
BUILD   ?= target/release
GENERATED ?= target/generated
ZSHDIR  ?= $(PREFIX)/share/zsh/site-functions
DOCDIR  ?= $(PREFIX)/share/doc/virt-pin
LICENSEDIR ?= $(DOCDIR)
LICENSES ?= LICENSE-APACHE LICENSE-MIT LICENSE-LGPL-2.1

CYCLES  ?= 300
SEED    ?=

.PHONY: deps build test corpus test-host run bench-hook bench-placement bench-scale fuzz crash races soak man install deb rpm

deps:
	scripts/install-deps

# Failpoints are for tests: no program that is installed has them.
build:
	cargo build --locked --release
	! grep -l VIRT_PIN_CRASH_AT target/release/virt-pin target/release/virt-pin-hook

test: deps
	cargo build --locked
	scripts/test

corpus:
	scripts/corpus target/corpus

# What an image of a host is made with, beside what everything needs.
test-host:
	scripts/install-deps mmdebstrap debian-archive-keyring e2fsprogs xz-utils binutils debhelper dpkg-dev lintian
	scripts/test-host

run: deps build
	demo/run.sh

bench-hook:
	cargo bench --locked --bench hook

bench-placement:
	cargo bench --locked --bench placement

bench-scale:
	cargo bench --locked --bench scale

fuzz:
	scripts/fuzz $(SECONDS)

crash:
	VIRT_PIN_CRASH=all cargo test --locked --test crash -- --nocapture
	VIRT_PIN_LIVE=required cargo test --locked --test live killed_at_every_point_of_a_life -- --nocapture

races:
	VIRT_PIN_RACE_SECONDS=$(SECONDS) cargo test --locked --test races -- --nocapture

soak: deps
	VIRT_PIN_LIVE=required VIRT_PIN_SOAK_CYCLES=$(CYCLES) VIRT_PIN_SOAK_SEED=$(SEED) \
	    cargo test --locked --test live soak:: -- --nocapture

man:
	$(BUILD)/virt-pin manuals $(GENERATED)

# The one list of installed files; packages use it too. A configuration that is there already stays.
install: man
	install -D -m 0755 $(BUILD)/virt-pin $(DESTDIR)$(PREFIX)/bin/virt-pin
	install -D -m 0755 $(BUILD)/virt-pin-hook $(DESTDIR)$(PREFIX)/lib/virt-pin/virt-pin-hook
	install -D -m 0644 packaging/systemd/virt-pin-agent.service $(DESTDIR)$(PREFIX)/lib/systemd/system/virt-pin-agent.service
	sed -i 's|/usr/bin/|$(PREFIX)/bin/|' $(DESTDIR)$(PREFIX)/lib/systemd/system/virt-pin-agent.service
	install -D -m 0644 packaging/tmpfiles.d/virt-pin.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/virt-pin.conf
	install -d $(DESTDIR)/etc/virt-pin/virt-pin.toml.d
	[ -e $(DESTDIR)/etc/virt-pin/virt-pin.toml ] || \
	    install -m 0644 $(GENERATED)/virt-pin.toml $(DESTDIR)/etc/virt-pin/virt-pin.toml
	for page in man1/virt-pin.1 man5/virt-pin.toml.5 man7/virt-pin-codes.7 man7/virt-pin-policy.7 man8/virt-pin-hook.8; do \
	    install -D -m 0644 $(GENERATED)/$$page $(DESTDIR)$(PREFIX)/share/man/$$page || exit; done
	install -D -m 0644 $(GENERATED)/bash/virt-pin $(DESTDIR)$(PREFIX)/share/bash-completion/completions/virt-pin
	install -D -m 0644 $(GENERATED)/zsh/_virt-pin $(DESTDIR)$(ZSHDIR)/_virt-pin
	install -D -m 0644 $(GENERATED)/fish/virt-pin.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/virt-pin.fish
	install -d $(DESTDIR)$(DOCDIR)/docs/cookbook $(DESTDIR)$(DOCDIR)/hooks
	install -d $(DESTDIR)$(LICENSEDIR)
	install -m 0644 README.md SECURITY.md NOTICE $(DESTDIR)$(DOCDIR)/
	[ -z "$(LICENSES)" ] || install -m 0644 $(LICENSES) $(DESTDIR)$(LICENSEDIR)/
	install -m 0644 docs/*.* $(DESTDIR)$(DOCDIR)/docs/
	install -m 0644 docs/cookbook/* $(DESTDIR)$(DOCDIR)/docs/cookbook/
	install -m 0644 hooks/* $(DESTDIR)$(DOCDIR)/hooks/

deb: build
	scripts/install-deps debhelper dpkg-dev
	scripts/package deb $(BUILD)

rpm: build
	scripts/install-deps rpm
	scripts/package rpm $(BUILD)
