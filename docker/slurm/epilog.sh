#!/bin/sh
# Slurm's Epilog: ends this job's daemon on this node, and removes what the prolog has made. See README.md
# in the folder above. slurm.conf: Epilog=/etc/slurm/discod/epilog.sh
#
# It never fails, as the prolog.
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# As in prolog.sh.
scratch_root=${SCRATCH_ROOT:-/nvme}
run_root=${RUN_ROOT:-/run/discod-jobs}
# The daemon needs 5 s at most.
wait_seconds=8

say() {
    echo "discod epilog, job ${SLURM_JOB_ID:-?}: $1" >&2
}

case ${SLURM_JOB_ID:-} in
    '' | *[!0-9]*) say "SLURM_JOB_ID is no number: nothing is done"; exit 0 ;;
esac
scratch=$scratch_root/discod-job-$SLURM_JOB_ID
job=$run_root/$SLURM_JOB_ID

# Still the daemon of this job? A pid may be another process's by now.
runs() {
    [ -n "$pid" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF "$job/sockets"
}

pid=
[ ! -r "$job/pid" ] || read -r pid <"$job/pid"
case $pid in *[!0-9]*) pid= ;; esac
if runs; then
    kill -TERM "$pid"
    tries=0
    while runs && [ "$tries" -lt $((wait_seconds * 10)) ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    if runs; then
        say "pid $pid did not end within $wait_seconds s of SIGTERM and is killed"
        kill -KILL "$pid"
    fi
fi
rm -rf -- "$job" "$scratch"
exit 0
