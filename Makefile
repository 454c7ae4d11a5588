# make deps      packages for building and testing (Debian)
# make build     the release binaries
# make test      every test, with real libvirtd and QEMU
# make test-host   virt-pin on whole emulated hosts; minutes the first time
# make run       a demonstration on this machine, which is left as it was
# make bench-hook   what a start pays for the hook, beside an empty program
# make bench-placement   where VMs land, beside other placement rules (docs/placement.md)
# make bench-scale  what placing a domain costs on hosts of up to 8192 CPUs
# make fuzz SECONDS=60   inputs nobody thought of, for each reader of text (a nightly compiler)
# make crash     killed at every failpoint, every write failing with every error; a few minutes
# make races     64 processes on one root for SECONDS=60
# make soak CYCLES=300   random days on real libvirt; SEED= repeats one
# make install   DESTDIR= PREFIX=/usr

PREFIX  ?= /usr
DESTDIR ?=
SECONDS ?= 60
CYCLES  ?= 300
SEED    ?=

.PHONY: deps build test test-host run bench-hook bench-placement bench-scale fuzz crash races soak install

deps:
	scripts/install-deps

# Failpoints are for tests: no program that is installed has them.
build:
	cargo build --locked --release
	! grep -l VIRT_PIN_CRASH_AT target/release/virt-pin target/release/virt-pin-hook

test: deps
	cargo build --locked
	scripts/test

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

crash:
	VIRT_PIN_CRASH=all cargo test --locked --test crash -- --nocapture
	VIRT_PIN_LIVE=required cargo test --locked --test live killed_at_every_point_of_a_life -- --nocapture

races:
	VIRT_PIN_RACE_SECONDS=$(SECONDS) cargo test --locked --test races -- --nocapture

soak: deps
	VIRT_PIN_LIVE=required VIRT_PIN_SOAK_CYCLES=$(CYCLES) VIRT_PIN_SOAK_SEED=$(SEED) \
	    cargo test --locked --test live soak:: -- --nocapture

# The one list of installed files; packages use it too.
install:
	install -D -m 0755 target/release/virt-pin $(DESTDIR)$(PREFIX)/bin/virt-pin
	install -D -m 0755 target/release/virt-pin-hook $(DESTDIR)$(PREFIX)/lib/virt-pin/virt-pin-hook
	install -D -m 0644 packaging/systemd/virt-pin-agent.service $(DESTDIR)$(PREFIX)/lib/systemd/system/virt-pin-agent.service
