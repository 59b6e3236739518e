"""``pinning``: the arena is pinned as far as it is used, and not after that."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import disco_client
from disco_client import connection
from discod.cuda_driver import CudaError, Driver
from discod.wire.sizes import format_size
from tests.gpu.bench import Bench, Row, guarded, left_out
from tests.gpu.equality import same
from tests.gpu.llama import Apply, Shape, Task, plain
from tests.gpu.staging import arena_pinning

SHAPE = Shape(layers=12, width=512, batch=2, length=512)
ARENA = "16MiB"

OUT_OF_MEMORY = CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")


def run(bench: Bench) -> Iterator[Row]:
    """As it should be, and with a driver that refuses."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    task = Task.make(SHAPE, bench.device, torch.float32)
    expected = _gradients(task, plain)
    yield from guarded("pinned", _pinned(bench, task, expected))
    yield from guarded("refused", _refused(bench, task, expected))


def _gradients(task: Task, apply: Apply) -> list[torch.Tensor]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        task.step(apply)
    return task.gradients()


def _pinned(bench: Bench, task: Task, expected: list[torch.Tensor]) -> Iterator[Row]:
    with bench.attached(arena=ARENA):
        equal = same(expected, _gradients(task, disco_client.checkpoint))
        pinning = arena_pinning(bench)
        pinned_bytes = pinning.pinned_bytes if pinning is not None else 0
        yield Row("pinned", format_size(pinned_bytes), "> 0", pinned_bytes > 0)
        if not pinned_bytes:
            yield left_out("gradients, pinned", "nothing is pinned")
            return
        yield Row("gradients, pinned", "equal" if equal else "DIFFER", "bit-equal", equal)
        view = connection.current().session._arena.view
        arena = torch.frombuffer(view[:pinned_bytes], dtype=torch.uint8)
        ends = arena[:4096], arena[-4096:]
        yield Row("is_pinned() of its ends", *_all_are(ends, True))
    # The view keeps the memory mapped.
    yield Row("is_pinned() after close()", *_all_are(ends, False))


def _all_are(tensors: tuple[torch.Tensor, ...], wanted: bool) -> tuple[str, str, bool]:
    found = [tensor.is_pinned() for tensor in tensors]
    return str(found), str([wanted] * len(found)), found == [wanted] * len(found)


def _refused(bench: Bench, task: Task, expected: list[torch.Tensor]) -> Iterator[Row]:
    with (
        mock.patch.object(Driver, "host_register", side_effect=OUT_OF_MEMORY) as register,
        _warnings("disco_client.pinning") as warnings,
        bench.attached(arena=ARENA),
    ):
        equal = all(same(expected, _gradients(task, disco_client.checkpoint)) for _ in range(2))
        pinning = arena_pinning(bench)
        yield Row("asked to pin", f"{register.call_count} times", "1", register.call_count == 1)
        if not register.call_count:
            yield left_out("gradients, not pinned", "the driver was not asked to pin")
            return
        pinned_bytes = pinning.pinned_bytes if pinning is not None else -1
        yield Row("pinned although refused", f"{pinned_bytes} bytes", "0", pinned_bytes == 0)
    yield Row("gradients, not pinned", "equal" if equal else "DIFFER", "bit-equal", equal)
    yield Row("warnings", f"{len(warnings)}: {warnings[:1]}"[:160], "1", len(warnings) == 1)


class _Kept(logging.Handler):
    """Keeps the text of every warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _warnings(logger: str) -> Iterator[list[str]]:
    """The warnings that ``logger`` gives meanwhile."""
    kept = _Kept()
    logging.getLogger(logger).addHandler(kept)
    try:
        yield kept.texts
    finally:
        logging.getLogger(logger).removeHandler(kept)
