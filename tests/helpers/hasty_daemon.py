"""``python hasty_daemon.py python -m discod ...``: it grows files by little and trims at once.

The real one grows a file by 256 MiB at least, and trims it when it was idle for 3 s, which a test
would have to wait for. A prefix for :class:`tests.helpers.daemon.Daemon`.
"""

import sys

from discod import scratch_file, trimming
from discod.cli import main

if __name__ == "__main__":
    scratch_file.GROW_STEP_BYTES = 1 << 20
    trimming.IDLE_SECONDS = 0.05
    main(sys.argv[4:])
