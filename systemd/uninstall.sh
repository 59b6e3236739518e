#!/bin/sh
# Removes what install.sh has installed. The user discod, and what is in /etc/discod, stay.
set -eu

destination=${DESTDIR:-}
case ${1:-} in
    "") user=no ;;
    --user) user=yes ;;
    *) echo "usage: uninstall.sh [--user]" >&2; exit 1 ;;
esac

if [ $user = yes ]; then
    units=$destination${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
    [ -n "$destination" ] ||
        systemctl --user disable --now discod.service discod.socket || true
    rm -f "$units/discod.service" "$units/discod.socket"
    [ -n "$destination" ] || systemctl --user daemon-reload
    exit 0
fi

units=$destination/etc/systemd/system
if [ -z "$destination" ]; then
    [ "$(id -u)" = 0 ] || { echo "uninstall.sh: not root; or use --user" >&2; exit 1; }
    systemctl disable --now discod.service discod.socket || true
fi
rm -f "$units/discod.service" "$units/discod.socket" "$units/discod.service.d/scratch.conf" \
    "$destination/usr/lib/sysusers.d/discod.conf" "$destination/usr/lib/tmpfiles.d/discod.conf"
rmdir "$units/discod.service.d" 2>/dev/null || true # drop-ins of the administrator's own stay
[ -n "$destination" ] || systemctl daemon-reload
