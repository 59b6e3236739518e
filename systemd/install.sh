#!/bin/sh
# Installs the units of discod. See README.md beside this file.
set -eu

usage() {
    cat <<TEXT
usage: install.sh --scratch DIR [--scratch DIR]... [--discod PATH]
       install.sh --user --scratch DIR [--discod PATH]

  --scratch DIR   Where the daemon writes: a directory on NVMe, which must exist.
                  For the service it is given to the user discod.
  --discod PATH   The program. Default: the discod in PATH
  --user          For this user's own service manager, without root

DESTDIR is put before every path, for packages: then nothing is started or
created beside files. Nothing is enabled; it says how.
TEXT
}

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

here=$(cd "$(dirname "$0")" && pwd)
destination=${DESTDIR:-}
program=$(command -v discod || true)
user=no
scratch=
spaced=

while [ $# -gt 0 ]; do
    case $1 in
        --scratch | --discod)
            [ $# -gt 1 ] || fail "$1 needs a value"
            if [ "$1" = --discod ]; then
                program=$2
            else
                case $2 in
                    *[[:space:]:]*) fail "'$2': a scratch directory without spaces and ':', please" ;;
                    /*) ;;
                    *) fail "$2 is a relative path: a service needs an absolute one" ;;
                esac
                scratch=${scratch:+$scratch:}$2
                spaced=${spaced:+$spaced }$2
            fi
            shift 2
            ;;
        --user) user=yes; shift ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown argument $1" ;;
    esac
done

[ -n "$scratch" ] || { usage >&2; fail "no --scratch"; }
case $program in
    /*) ;;
    *) fail "no discod in PATH: install it where the service can read it, for example with
  python3 -m venv /opt/discod && /opt/discod/bin/pip install discod
and give --discod /opt/discod/bin/discod" ;;
esac
if [ $user = no ]; then
    case $program in
        /home/* | /root/*) fail "$program is in a home directory, which the service cannot read
(ProtectHome=): install discod elsewhere, such as in /opt/discod" ;;
    esac
    [ -n "$destination" ] || [ "$(id -u)" = 0 ] || fail "not root; or use --user"
fi

unit() { # source, destination: with the program's path in it
    mkdir -p "$(dirname "$2")"
    sed "s|^ExecStart=.*|ExecStart=$program|" "$1" >"$2"
    chmod 0644 "$2"
}

if [ $user = yes ]; then
    units=$destination${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
    settings=$destination${XDG_CONFIG_HOME:-$HOME/.config}/discod/discod.env
    unit "$here/user/discod.service" "$units/discod.service"
    unit "$here/user/discod.socket" "$units/discod.socket"
    mkdir -p "$(dirname "$settings")"
    [ -e "$settings" ] || echo "DISCOD_SCRATCH=$scratch" >"$settings"
    echo "installed; start it with: systemctl --user daemon-reload && systemctl --user enable --now discod.socket discod.service"
    exit 0
fi

units=$destination/etc/systemd/system
unit "$here/discod.service" "$units/discod.service"
unit "$here/discod.socket" "$units/discod.socket"
mkdir -p "$units/discod.service.d" "$destination/etc/discod" \
    "$destination/usr/lib/sysusers.d" "$destination/usr/lib/tmpfiles.d"
cat >"$units/discod.service.d/scratch.conf" <<TEXT
[Service]
Environment=DISCOD_SCRATCH=$scratch
ReadWritePaths=$spaced

[Unit]
RequiresMountsFor=$spaced
TEXT
cp "$here/discod.sysusers" "$destination/usr/lib/sysusers.d/discod.conf"
cp "$here/discod.tmpfiles" "$destination/usr/lib/tmpfiles.d/discod.conf"
[ -e "$destination/etc/discod/discod.env" ] ||
    cp "$here/discod.env" "$destination/etc/discod/discod.env"

if [ -z "$destination" ]; then
    systemd-sysusers discod.conf
    systemd-tmpfiles --create discod.conf
    for directory in $spaced; do
        [ -d "$directory" ] || fail "$directory is no directory: make it, and run this again"
        chown discod:discod "$directory"
        chmod 0700 "$directory"
    done
    systemctl daemon-reload
fi
echo "installed; start it with: systemctl enable --now discod.socket discod.service"
