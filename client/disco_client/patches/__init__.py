"""Adapters that send a framework's activation checkpoints to discod, one module each.

A module here may import its framework at its top; nothing imports it but who asks for it. Each has
``enable()`` and ``disable()``, both idempotent; ``lightning`` has a callback instead. To add one:
a new module with a :class:`~disco_client.patches.replacing.Patch`, a test against the real package,
and a page in ``docs/frameworks/``.
"""
