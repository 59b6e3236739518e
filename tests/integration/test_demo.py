"""The whole demo, small: daemon, torchrun, ranks, table; and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--layers", "4", "--length", "256", "--rows", "2")
DEADLINE_SECONDS = 100


@pytest.fixture
def start(short_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(*options)`` starts the demo with all its files in ``short_dir``."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", "--scratch", str(short_dir), *TINY, *options],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(short_dir)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A suite that runs in the background of a shell has SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=DEADLINE_SECONDS)


def processes(directory: Path, *words: str) -> list[psutil.Process]:
    """Live processes that were started with a path in ``directory`` and with all ``words``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and (
            any(str(directory) in argument for argument in command)
            and all(word in command for word in words)
        ):
            found.append(process)
    return found


def wait_for_trainer(directory: Path) -> psutil.Process:
    """The first rank of the discod job, as soon as it runs."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        for process in processes(directory, "examples.demo.trainer", "discod"):
            if "torch.distributed.run" not in process.cmdline():
                return process
        assert time.monotonic() < deadline, "no rank was started"
        time.sleep(0.05)


def check_nothing_left(directory: Path) -> None:
    """The demo's directories are gone, and its processes end within some seconds."""
    assert list(directory.iterdir()) == []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := processes(directory):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_demo_is_bit_equal(short_dir: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    """Else the first thing that a newcomer runs fails."""
    process = start("--steps", "2")
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    assert err == ""
    assert "gradients bit-equal" in out
    assert " yes " in out
    assert " no " not in out
    check_nothing_left(short_dir)


def test_a_failed_rank_is_reported(
    short_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Else the demo would hang, or end well, when a trainer dies."""
    process = start("--ranks", "1", "--steps", "1000")
    wait_for_trainer(short_dir).kill()
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 3, err
    assert "the demo failed" in err
    check_nothing_left(short_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_after_a_signal(
    number: signal.Signals, short_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Else Ctrl-C would leave a daemon, ranks and a scratch directory behind."""
    process = start("--ranks", "1", "--steps", "1000")
    wait_for_trainer(short_dir)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + number, err
    check_nothing_left(short_dir)
