#!/bin/sh
# Slurm's Prolog: a daemon for this job on this node, run by the job's user. See README.md in the folder
# above. slurm.conf: Prolog=/etc/slurm/discod/prolog.sh, PrologFlags=Alloc
#
# It never fails, since a Prolog that fails takes the node out of service: a job that wants discod and has
# no daemon says so by itself (DaemonNotRunning), and the reason is in the log.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# To be fitted. All three are made here for the job; log_root must be root's alone.
discod=${DISCOD:-/opt/discod/bin/discod}
scratch_root=${SCRATCH_ROOT:-/nvme}
run_root=${RUN_ROOT:-/run/discod-jobs}
log_root=${LOG_ROOT:-/var/log/discod}
# More options for each daemon, such as --ram; without it half of what memory is free.
options=${OPTIONS:-}
wait_seconds=10

say() {
    echo "discod prolog, job ${SLURM_JOB_ID:-?}: $1" >&2
}

case ${SLURM_JOB_ID:-}:${SLURM_JOB_UID:-} in
    *[!0-9:]* | :* | *:) say "SLURM_JOB_ID and SLURM_JOB_UID are no numbers: no daemon"; exit 0 ;;
esac
# Where Slurm gives no gid, that of the user.
gid=${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID")} || { say "uid $SLURM_JOB_UID is unknown: no daemon"; exit 0; }

scratch=$scratch_root/discod-job-$SLURM_JOB_ID
job=$run_root/$SLURM_JOB_ID
log=$log_root/job-$SLURM_JOB_ID.log

start() {
    # Above the sockets all is root's: that is what clients of other users' daemons look at.
    install -d -m 0755 "$run_root" "$job" &&
        install -d -m 0700 "$log_root" &&
        install -d -m 0700 -o "$SLURM_JOB_UID" -g "$gid" "$scratch" "$job/sockets" || return 1
    # In a session of its own, without Slurm's files and variables. Each command becomes the next, so
    # that the pid stays.
    # shellcheck disable=SC2086  # options are words
    env -i PATH="$PATH" setsid setpriv --reuid="$SLURM_JOB_UID" --regid="$gid" --clear-groups \
        --no-new-privs -- "$discod" --scratch "$scratch" --socket-dir "$job/sockets" $options \
        </dev/null >>"$log" 2>&1 &
    echo $! >"$job/pid"
    tries=0
    until [ -S "$job/sockets/io.sock" ]; do
        tries=$((tries + 1))
        [ "$tries" -le $((wait_seconds * 10)) ] || return 1
        # Ended already? Its own words are in the log.
        kill -0 $! 2>/dev/null || return 1
        sleep 0.1
    done
}

start || say "no daemon for this job, which will say DaemonNotRunning if it wants one; see $log"
exit 0
