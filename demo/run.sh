#!/bin/bash
# A demonstration on this machine: a VM gets a CPU core of its own, and gives it back. Whatever happens, the machine is
# left as it was found, apart from packages that were installed.
#
# VIRT_PIN_BIN names another directory with virt-pin and virt-pin-hook than target/release.
set -euo pipefail
cd "$(dirname "$0")/.."

# Where there is no systemd and no libvirtd yet, all that follows runs in a PID namespace whose PID 1 is this script: it
# reaps at once (a container's PID 1 may take seconds, and libvirt waits for that), and nothing it starts can outlive it.
if [ "$(id -u)" = 0 ] && [ $$ != 1 ] && [ ! -d /run/systemd/system ] &&
    ! virsh --connect qemu:///system uri >/dev/null 2>&1; then
    exec unshare --mount --propagation private --pid --fork --kill-child=TERM --mount-proc demo/run.sh
fi

binaries=$(realpath "${VIRT_PIN_BIN:-target/release}")
vm=virt-pin-demo
config=/etc/virt-pin/virt-pin.toml
hook=/etc/libvirt/hooks/qemu
scratch=$(mktemp --directory)
undo=()

say() { printf '\n== %s\n' "$*"; }
show() { printf '\n$ %s\n' "$*"; "$@"; }
stop() { printf '\nThe demonstration cannot go on: %s\n' "$*" >&2; exit 1; }
virsh() { command virsh --connect qemu:///system "$@"; }
virt-pin() { "$binaries/virt-pin" "$@"; }

# What has been done is undone in reverse; one failure does not keep the rest from being undone.
clean_up() {
    local status=$? step
    trap - EXIT
    say "Cleaning up"
    for ((step = ${#undo[@]} - 1; step >= 0; step--)); do
        echo "${undo[step]}"
        eval "${undo[step]}" >>"$scratch/undo.log" 2>&1 || { echo "  failed:"; tail -n 3 "$scratch/undo.log"; }
    done
    rm -rf "$scratch"
    [ $status = 0 ] || echo "The demonstration did not come to its end (status $status)."
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Ends a process by its pid file and waits until it is gone.
end() {
    local pid
    pid=$(cat "$1")
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

# Directories libvirt makes for its first VM and leaves behind; only empty ones can go.
remove_partition() {
    local tree
    for tree in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [ ! -d "$tree/machine" ] || rmdir "$tree/machine"
    done
}

# What is not there now, and will be, goes again.
forget() {
    local path
    for path; do
        [ -e "$path" ] || undo+=("rm -rf $path")
    done
}

start_libvirtd() {
    if virsh uri >/dev/null 2>&1; then
        echo "libvirtd runs already; it will look for hooks anew."
        undo+=("reload_libvirtd")
        return
    fi
    if [ -d /run/systemd/system ]; then
        systemctl start libvirtd
        undo+=("systemctl stop libvirtd.service libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket")
    else
        # The order matters: libvirtd needs virtlogd for the VM's console log.
        for daemon in virtlogd libvirtd; do
            PATH=$PATH:/usr/sbin $daemon --daemon --pid-file "$scratch/$daemon.pid"
            undo+=("end $scratch/$daemon.pid")
        done
    fi
    for _ in {1..100}; do
        ! virsh uri >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    stop "libvirtd does not answer"
}

# libvirtd looks for hooks when it starts and when it is told to reload.
reload_libvirtd() {
    if [ -d /run/systemd/system ]; then
        systemctl reload libvirtd 2>/dev/null || systemctl reload virtqemud
    else
        kill -HUP "$(cat "$scratch/libvirtd.pid" 2>/dev/null || cat /run/libvirtd.pid)"
    fi
    sleep 0.5
}

destroy_vm() {
    ! virsh domstate $vm | grep --quiet running || virsh destroy $vm
}

# Where the kernel lets each thread of the VM run: its name and CPUs.
threads() {
    local task
    for task in "/proc/$(cat /run/libvirt/qemu/$vm.pid)"/task/*; do
        printf '  %-18s CPUs %s\n' "$(cat "$task/comm")" "$(sed -n 's/^Cpus_allowed_list:\t//p' "$task/status")"
    done
}

[ "$(id -u)" = 0 ] || stop "it has to be run by root"
for program in "$binaries/virt-pin" "$binaries/virt-pin-hook"; do
    [ -x "$program" ] || stop "$program is not there; \`make build\` makes it"
done
[ ! -e $hook ] || stop "$hook exists already, and the demonstration would replace it"

# The last core of the machine, with all its hardware threads; the rest stays with the host.
online=$(cat /sys/devices/system/cpu/online)
last=${online##*[,-]}
core=$(cat "/sys/devices/system/cpu/cpu$last/topology/thread_siblings_list")
policy='policy="dedicated"'
if [ "$last" = 0 ] || [ "$(nproc --all)" -lt 2 ]; then
    stop "this machine has one CPU; one has to stay with the host, so two are needed"
elif [ "$core" = "$online" ]; then
    core=$last
    policy='policy="dedicated" cores="thread"'
fi

say "This machine"
echo "Online CPUs: $online. CPU $core may be handed out; the rest stays with the host."
ls -d /sys/fs/cgroup/machine /sys/fs/cgroup/*/machine >/dev/null 2>&1 || undo+=("remove_partition")
forget /run/libvirt /run/virt-pin /etc/libvirt/secrets /var/log/libvirt/{libvirtd,virtlogd}.log /var/log/libvirt/qemu/$vm.log
start_libvirtd
if virsh dominfo $vm >/dev/null 2>&1; then
    stop "a VM named $vm is left from somewhere: \`virsh destroy $vm; virsh undefine $vm\`"
fi

say "The operator: install the hook, say which CPUs may be handed out"
if [ -e $config ]; then
    echo "$config exists and stays as it is."
else
    [ -d /etc/virt-pin ] || { mkdir /etc/virt-pin; undo+=("rmdir /etc/virt-pin"); }
    # An installed virt-pin needs no `command`: packages put it in /usr/bin.
    printf 'pinnable_cpus = "%s"\ncommand = "%s"\n' "$core" "$binaries/virt-pin" >$config
    undo+=("rm $config")
fi
show cat $config
undo+=("virt-pin uninstall")
show virt-pin install --hook "$binaries/virt-pin-hook"
reload_libvirtd
show virt-pin capacity

say "The owner: a VM whose XML asks for CPUs of its own"
cat >"$scratch/vm.xml" <<END
<domain type="qemu">
  <name>$vm</name>
  <metadata>
    <pin:cpu xmlns:pin="urn:virt-pin:domain:1" $policy/>
  </metadata>
  <memory unit="MiB">32</memory>
  <vcpu>1</vcpu>
  <os><type arch="x86_64" machine="pc">hvm</type></os>
  <devices><controller type="usb" model="none"/><memballoon model="none"/></devices>
</domain>
END
show cat "$scratch/vm.xml"
undo+=("virsh undefine $vm")
echo "(libvirt may take some seconds now to find out what this QEMU can do.)"
show virsh define "$scratch/vm.xml"
undo+=("destroy_vm")
show virsh start $vm

say "The lease"
show virt-pin list
show virt-pin lease $vm

say "What libvirt says: the pins in the live XML"
virsh dumpxml $vm | sed -n '/<cputune>/,/<\/cputune>/p' | grep . || echo "(no <cputune>: nothing has put the lease into the live XML)"

say "What the kernel says: where each thread of the VM may run"
threads
echo "(\"CPU 0/TCG\" is the guest's CPU; the others are QEMU's own threads.)"

say "The VM stops, its CPUs are free again"
show virsh destroy $vm
show virt-pin list
show virt-pin capacity
