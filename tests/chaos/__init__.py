"""A job trains while a seeded adversary kills, stops, fills and breaks what it can.

``python -m tests.chaos --help``; what must hold after every round is in
:mod:`tests.chaos.invariants`, what the adversary can do in :mod:`tests.chaos.plan`.
"""
