"""Measurements. Each checks the bytes it moved, and runs in a tiny form in the suite."""
