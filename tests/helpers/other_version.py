"""``python other_version.py VERSION PROTOCOL python -m discod ...``: a daemon of another release.

A prefix for :class:`tests.helpers.daemon.Daemon`; the daemon runs in this process.
"""

import sys

import discod
from discod import wire

if __name__ == "__main__":
    discod.__version__ = sys.argv[1]
    wire.PROTOCOL_VERSION = int(sys.argv[2])
    from discod.cli import main  # what it imports takes the two from here

    main(sys.argv[6:])
