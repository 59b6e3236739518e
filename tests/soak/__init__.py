"""An hour of use at random: whether memory, fds, threads and mappings stay what they were.

``python -m tests.soak --minutes 60`` runs one daemon, two processes that last (``program``), and
others that come and end, also by SIGKILL. All save, load, checkpoint and drop at random, and
compare every tensor with what was saved. ``procfs`` samples what the kernel says of each process,
``flat`` decides whether that is flat, ``report`` writes it down.
"""
