"""The policy over a simulated disk and clock, beside other policies and the offline optimum.

``traces`` are what trainers do, ``disk`` how fast bytes move, ``machine`` plays a trace with a
policy, ``policies`` are those to compare with, ``bounds`` what no policy can do better.
``python -m tests.simulation`` prints the table.
"""
