#!/bin/bash
# What is a host VM's disk made of? Packages of a Debian release, from the archive that apt here already uses:
#
#   image.sh RELEASE DIRECTORY
#
# leaves in the (new) directory `disk.img`, `vmlinuz` and `initrd` to boot, and `root/`, the same tree as files: QEMU is run from
# there. Exit status 77: it cannot be made on this machine, and why is on stderr. It never installs anything on the machine itself.
set -euo pipefail
release=$1 out=$2
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C

cannot() { echo "$*" >&2; exit 77; }
[ "$(id -u)" = 0 ] || cannot "only root can install packages into a tree"
for program in mmdebstrap mke2fs apt-get; do
    command -v $program >/dev/null || cannot "$program is not installed"
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || cannot "debian-archive-keyring is not installed"

# Which archive this is, apt knows only once it has read what the archive says of itself.
archive() { apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Label: Debian' | sed --quiet 1p; }
[ -n "$(archive)" ] || apt-get update --quiet=2 || true
archive=$(archive)
[ -n "$archive" ] || cannot "apt here knows no archive of Debian's"
mkdir "$out"
/usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file "${archive}dists/$release/Release" "$out/Release" >/dev/null ||
    cannot "Debian's $release cannot be fetched"
rm "$out/Release"

packages=(
    systemd-sysv systemd-container dbus udev                  # PID 1, machined
    libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients qemu-system-x86
    qemu-guest-agent                                          # how the tests run commands
    kmod procps                                               # modules; sysctl, ps
    apparmor                                                  # enforced where a shape says so
    busybox-static                                            # the initrd
)
root=$out/root
include=$(IFS=,; echo "${packages[*]}")
# The kernel is unpacked, not installed: its installation would make an initrd for any machine, which takes longer than all the
# rest. Its /lib must not replace the link of that name.
mmdebstrap --quiet --mode=root --variant=apt --keyring=$keys --include="$include" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/qemu/edk2*' \
    --skip=cleanup/apt/lists \
    --customize-hook='kernel=$(chroot "$1" apt-cache depends linux-image-cloud-amd64 | sed -n "s/ *Depends: //p")
        chroot "$1" sh -c "cd /tmp && apt-get --quiet=2 download $kernel" &&
        dpkg-deb --fsys-tarfile "$1"/tmp/linux-image-*.deb | tar --extract --keep-directory-symlink --directory "$1" &&
        rm -r "$1"/tmp/linux-image-*.deb "$1"/var/lib/apt/lists/* "$1"/var/cache/apt' \
    "$release" "$root" "deb [signed-by=$keys] $archive $release main"

# A machine with a name and an identity; none of its own disks, networks or users matter.
echo hostvm >"$root/etc/hostname"
echo 127.0.0.1 localhost hostvm >"$root/etc/hosts"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
: >"$root/etc/fstab"
echo 'stdio_handler = "file"' >>"$root/etc/libvirt/qemu.conf"
# Profiles of what is not there would be compiled at each first boot.
find "$root/etc/apparmor.d" -maxdepth 1 -type f ! -name '*libvirt*' ! -name 'virt*' -delete

# What a boot starts is cleared and named anew: under emulation a stock boot takes three times as long, most of it for devices that
# a host VM has not. Whoever needs more starts it.
units=/usr/lib/systemd/system
find "$root/etc/systemd/system" "$root$units" -name '*.wants' -exec rm -r {} +
rm -r "$root"/usr/lib/systemd/system-generators
ln -sf multi-user.target "$root$units/default.target"
wants() {
    local target=$1 unit
    shift
    mkdir -p "$root/etc/systemd/system/$target.wants"
    for unit; do
        [ ! -e "$root$units/$unit" ] || ln -s "$units/$unit" "$root/etc/systemd/system/$target.wants/"
    done
}
wants local-fs.target tmp.mount run-lock.mount
wants sysinit.target apparmor.service
wants sysinit.target systemd-journald.service systemd-tmpfiles-setup.service dev-hugepages.mount sys-kernel-tracing.mount
wants sockets.target systemd-journald.socket systemd-journald-dev-log.socket dbus.socket
wants sockets.target libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket
wants multi-user.target dbus.service libvirtd.service qemu-guest-agent.service
# The packaged unit waits for udev, which does not run. Commands of the tests inherit this environment.
cat >"$root/etc/systemd/system/qemu-guest-agent.service" <<'END'
[Unit]
After=libvirtd.service
[Service]
ExecStart=/bin/sh -c "exec qemu-ga --path /dev/vport*"
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
KillMode=process
Restart=always
END

# What the kernel needs to see the disk, and the agent's port, as far as it is not built in; in the order of their needs.
version=$(basename "$root"/usr/lib/modules/*)
chroot "$root" depmod "$version"
initrd=$out/initrd.d
mkdir -p "$initrd"/{bin,dev,modules,root}
cp "$root/bin/busybox" "$initrd/bin/"
chroot "$root" modprobe --set-version "$version" --show-depends --all virtio_pci virtio_blk virtio_console |
    awk '$1 == "insmod" && !seen[$2]++ { printf "%02d %s\n", ++count, $2 }' | while read -r number module; do
    case $module in
    *.xz) xz --decompress --stdout "$root$module" >"$initrd/modules/$number.ko" ;;
    *) cp "$root$module" "$initrd/modules/$number.ko" ;;
    esac
done
cat >"$initrd/init" <<'END'
#!/bin/busybox sh
for module in /modules/*; do /bin/busybox insmod $module; done
/bin/busybox mount -t devtmpfs devtmpfs /dev
until /bin/busybox mount -t ext4 -o noatime /dev/vda /root 2>/dev/null; do /bin/busybox sleep 0.05; done
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /lib/systemd/systemd
END
chmod +x "$initrd/init"
(cd "$initrd" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null) >"$out/initrd"
rm -r "$initrd"
mv "$root"/boot/vmlinuz-* "$out/vmlinuz"
mke2fs -q -t ext4 -O ^has_journal -E lazy_itable_init=1,nodiscard -m 0 -d "$root" "$out/disk.img" 2G
