"""Two ranks train a small GPT on real text, with and without discod, and compare every bit.

Run it as ``make demo`` or ``python -m examples.demo --help``. The parts: ``model`` is the GPT,
``trainer`` one rank's process, ``jobs`` starts the daemon and the ranks and takes them down again,
``report`` compares and prints, ``__main__`` puts them together.
"""
