#!/bin/bash
# What becomes PID 1 of a Lab (lab.py).  Runs in cgroup, pid, mount, uts and ipc namespaces of its own.  usage: lab_init.sh HOME
# HOME has: files/ (laid over the root), keep (lines "SOURCE TARGET": directories that outlive a boot), prepare (bash, given the root).
set -eu
home=$1
mkdir -p "$home/overlay"
mount -t tmpfs -o size=2g lab "$home/overlay" # the upper layer must not lie on the lower file system
cd "$home/overlay"
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work lab root
root=$PWD/root

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755,size=512m lab "$root/run"
mount -t tmpfs -o mode=1777,size=256m lab "$root/tmp"
mount -t tmpfs -o mode=755,size=16m lab "$root/dev"
for name in null zero full random urandom tty; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 lab "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"

# Each boot has an id of its own.  The rest of /proc/sys is read-only: it is the real kernel's.
cat /proc/sys/kernel/random/uuid >"$root/run/lab-boot-id"
mount --bind "$root/run/lab-boot-id" "$root/proc/sys/kernel/random/boot_id"
mount --rbind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"

# Nothing the host has enabled is started, and nothing that belongs to a real kernel or clock.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/*.requires
mkdir -p "$root/etc/systemd/system"
for unit in systemd-sysctl.service systemd-modules-load.service systemd-remount-fs.service systemd-update-utmp.service \
    systemd-timesyncd.service sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount; do
    ln -sfn /dev/null "$root/etc/systemd/system/$unit"
done
: >"$root/etc/machine-id"
: >"$root/etc/fstab"

[ ! -d "$home/files" ] || cp -a --no-preserve=ownership "$home/files/." "$root/"
if [ -f "$home/keep" ]; then
    while read -r source target; do
        mkdir -p "$root$target"
        mount --bind "$source" "$root$target"
    done <"$home/keep"
fi
[ ! -f "$home/prepare" ] || bash -eu "$home/prepare" "$root"

hostname lab
cd "$root"
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
rmdir /.outside
mount --make-rshared / # else LoadCredential= silently yields nothing
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=multi-user.target --show-status=yes
