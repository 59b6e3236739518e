"""Runnable examples; see ``examples/demo``."""
