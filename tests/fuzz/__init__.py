"""Fuzzing of what peers can send: ``python -m tests.fuzz`` (atheris), and a corpus for the suite.

A target is a function of bytes that raises when an invariant is broken (:mod:`tests.fuzz.targets`).
``tests/unit/test_fuzz_corpus.py`` runs every target over its part of ``corpus/``, without atheris.
"""
