"""``python impatient.py python -m discod ...``: a daemon that gives a stuck GPU process 1 s only.

A prefix for :class:`tests.helpers.daemon.Daemon`; the daemon runs in this process.
"""

import sys

from discod import gpu_host
from discod.cli import main

if __name__ == "__main__":
    gpu_host.TICK_SECONDS = 0.1
    gpu_host.START_TICKS = 200
    gpu_host.IDLE_SECONDS = 0.3
    main(sys.argv[4:])
