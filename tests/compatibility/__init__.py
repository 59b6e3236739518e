"""What each way to save activations does under DDP, FSDP2 and tensor parallelism.

A matrix: the rows are models under a wrapper (``ddp``, ``fsdp``, ``tensor_parallel``), the columns
are the ``forms``, torch's and ours. ``rank`` runs every cell on two real ranks, ``verdicts`` says
which are equal, raise or differ, and ``page`` writes that into ``docs/compatibility.md``::

    python -m tests.compatibility

measures anew and writes the page. ``tests/integration/test_compatibility.py`` measures too, and
fails when the page shows anything else.
"""
