"""Random programs on a simulated device: no load ever gives anything but what was saved."""

import pytest

from tests.helpers.device_programs import EagerProgram, LazyProgram, Program, run
from tests.helpers.simulated_gpu import MODES

SEEDS = 40


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_any_program(kind: type[Program], mode: str, first_seed: int) -> None:
    """Else some order of copies, kernels, changes and frees gives wrong values, leaks or hangs."""
    for seed in range(first_seed, first_seed + SEEDS):
        assert run(kind, seed, mode) == [], f"seed {seed}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [LazyProgram, EagerProgram])
def test_any_program_with_interrupts_failures_and_shortages(
    kind: type[Program], mode: str, first_seed: int
) -> None:
    """Else Ctrl-C, an error of the device or a lack of its memory leaves a copy to nowhere."""
    for seed in range(first_seed, first_seed + SEEDS):
        assert run(kind, seed, mode, troubles=True) == [], f"seed {seed}"


@pytest.mark.parametrize("keep", [0, 1, 3, None])
@pytest.mark.parametrize("pages", [2, 3, 32])
def test_any_arena_and_any_number_of_sources_that_stay(
    keep: int | None, pages: int, first_seed: int
) -> None:
    """An arena in which every load waits for others' copies to end, and one in which none does."""
    for seed in range(first_seed, first_seed + 10):
        assert run(LazyProgram, seed, "late", keep=keep, pages=pages) == [], f"seed {seed}"
        assert run(EagerProgram, seed, "random", keep=keep, pages=pages + 2) == [], f"seed {seed}"
