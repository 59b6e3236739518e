"""What only hardware can show: ``python -m tests.gpu``, one command and a table.

Each part is a module with ``run(bench)``, which yields rows, and runs in a process of its own.
"""
