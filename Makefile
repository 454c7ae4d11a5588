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
# make install   DESTDIR= PREFIX=/usr

PREFIX  ?= /usr
DESTDIR ?=
SECONDS ?= 60

.PHONY: deps build test corpus test-host run bench-hook bench-placement bench-scale fuzz install

deps:
	scripts/install-deps

build:
	cargo build --locked --release

test: deps
	cargo build --locked
	scripts/test

corpus:
	scripts/corpus target/corpus

# What an image of a host is made with, beside what everything needs.
test-host:
	scripts/install-deps mmdebstrap debian-archive-keyring e2fsprogs xz-utils binutils
	VIRT_PIN_HOSTVM=required cargo test --locked --test hostvm

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

# The one list of installed files; packages use it too.
install:
	install -D -m 0755 target/release/virt-pin $(DESTDIR)$(PREFIX)/bin/virt-pin
	install -D -m 0755 target/release/virt-pin-hook $(DESTDIR)$(PREFIX)/lib/virt-pin/virt-pin-hook
	install -D -m 0644 packaging/systemd/virt-pin-agent.service $(DESTDIR)$(PREFIX)/lib/systemd/system/virt-pin-agent.service
