#!/bin/bash
# PID 1 of a private machine (see machine.rs). Called in fresh mount, PID, network and cgroup namespaces with the name of
# its cgroup; makes the file systems private, says where it is, and lives until its stdin ends. That happens when the
# test process ends in whatever way, and the kernel then kills everything else in here.
#
# Bash reaps children it never started, which PID 1 has to do: libvirt waits for QEMU's process to be gone altogether.
set -euo pipefail
cgroup=$1

# /proc is still the outer one: this is our pid out there.
read -r outer _ </proc/self/stat
mount -t proc proc /proc

# The cgroup made for us is the root of all we see. Controllers that play no part are out of sight, else libvirt would
# make directories in the real machine's trees.
for tree in /sys/fs/cgroup/*; do
    mountpoint -q "$tree" || continue
    case $tree in
    */cpuset | */unified) mount --bind "$tree/$cgroup" "$tree" ;;
    *) umount "$tree" ;;
    esac
done

# An empty /run hides the machine's daemons (systemd, D-Bus, another libvirtd); it also holds what is written elsewhere.
mount -t tmpfs -o mode=755 tmpfs /run
for tree in etc usr var; do
    mkdir -p "/run/bed/$tree/upper" "/run/bed/$tree/work"
    mount -t overlay -o "lowerdir=/$tree,upperdir=/run/bed/$tree/upper,workdir=/run/bed/$tree/work" overlay "/$tree"
done
for directory in /etc/libvirt /etc/virt-pin /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
    mkdir -p "$directory"
    mount -t tmpfs -o mode=755 tmpfs "$directory"
done

# No /dev/kvm: where it opens but does not work, libvirt probes QEMU anew for every VM, which takes seconds.
dev=/run/bed/dev
mkdir "$dev"
mount -t tmpfs -o mode=755 tmpfs "$dev"
mkdir "$dev/pts" "$dev/shm"
# Terminals of its own: those of a /dev/ptmx that is bound cannot be found.
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$dev/pts"
ln -s pts/ptmx "$dev/ptmx"
mount -t tmpfs tmpfs "$dev/shm"
for node in null zero full random urandom tty; do
    : >"$dev/$node"
    mount --bind "/dev/$node" "$dev/$node"
done
ln -s /proc/self/fd "$dev/fd"
mount --rbind "$dev" /dev

mkdir /etc/libvirt/hooks
cat >/etc/libvirt/qemu.conf <<'END'
# Our /dev is made of bind mounts, which libvirt's own /dev for QEMU cannot take over.
namespaces = []
security_driver = "none"
remember_owner = 0
# No virtlogd.
stdio_handler = "file"
END
cat >/etc/libvirt/libvirtd.conf <<'END'
auth_unix_rw = "none"
log_outputs = "2:file:/var/log/libvirt/libvirtd.log"
# Also says when it reloads.
log_filters = "2:daemon.libvirtd"
END

echo "ready $outer"
while read -r _; do :; done
