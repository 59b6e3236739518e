#!/bin/sh
# Slurm's TaskProlog: tells each task where its job's daemon is. What it prints as "export NAME=VALUE" is
# set in the task's environment. slurm.conf: TaskProlog=/etc/slurm/discod/task-prolog.sh
run_root=${RUN_ROOT:-/run/discod-jobs}

if [ -d "$run_root/$SLURM_JOB_ID/sockets" ]; then
    echo "export DISCOD_SOCKET_DIR=$run_root/$SLURM_JOB_ID/sockets"
fi
