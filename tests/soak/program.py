"""One process of the soak: random saves, loads, layers and drops, each result checked.

Run as a program with a JSON object: ``seed``, ``socket_dir``, ``arena``, ``most_bytes`` of one
tensor. It prints one JSON line a second and ends, having released everything, when its stdin is
closed.
"""

import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import disco_client
from tests.helpers.training import fingerprint
from tests.soak.procfs import sample

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
ROUNDS_PER_STEP = 12
LIVE_SHARE = 2.5
"""Live bytes over the arena's size at which a round begins to release: most of it is on disk."""
LARGE_SHARE = 0.4
"""Of the tensors: as large as allowed, or half of it; the others are of any size from 4 B on."""


@dataclass(slots=True)
class Done:
    """What was done so far, and found wrong."""

    rounds: int = 0
    saved: int = 0
    verified: int = 0
    steps: int = 0
    wrong: int = 0


class Store:
    """One manager with random tensors in it, each remembered by its hash."""

    def __init__(self, rng: random.Random, most_bytes: int, live_bytes: int, done: Done) -> None:
        self._rng = rng
        self._most_bytes = most_bytes
        self._live_bytes = live_bytes
        self._done = done
        self._used_bytes = 0
        self._bytes = torch.randint(0, 256, (2 * most_bytes,), dtype=torch.uint8)
        self._manager = disco_client.DiskOffloadManager(prefetch_size=rng.choice((0, 3, 8)))
        self._held: dict[str, tuple[str, int]] = {}

    def round(self) -> None:
        """Save one or load one; release what is too much."""
        rng = self._rng
        if rng.random() < 0.55 or not self._held:
            tensor = self._tensor()
            handle = self._manager.save_tensor(tensor)
            self._held[handle] = fingerprint(tensor), tensor.nbytes
            self._used_bytes += tensor.nbytes
            self._done.saved += 1
        else:
            self._check(rng.choice(list(self._held)))
        while self._used_bytes > self._live_bytes:
            self._release(rng.choice(list(self._held)))

    def clear(self) -> None:
        """Check a few of what is left, and release it all at once."""
        for handle in self._rng.sample(list(self._held), min(3, len(self._held))):
            self._check(handle)
        if self._rng.random() < 0.5:
            self._manager.cleanup()
        self._held.clear()
        self._used_bytes = 0

    def _tensor(self) -> torch.Tensor:
        rng, most = self._rng, self._most_bytes
        # Else each power of two is as likely as the next.
        size = rng.randint(most // 2, most) if rng.random() < LARGE_SHARE else most ** rng.random()
        size = max(4, int(size) // 8 * 8)
        start = rng.randrange(most) // 8 * 8
        data = self._bytes[start : start + size].clone()
        return data.view(rng.choice(DTYPES)) if size % 8 == 0 else data

    def _check(self, handle: str) -> None:
        wanted, _ = self._held[handle]
        self._done.verified += 1
        self._done.wrong += fingerprint(self._manager.load_tensor(handle)) != wanted

    def _release(self, handle: str) -> None:
        _, nbytes = self._held.pop(handle)
        self._used_bytes -= nbytes
        if self._rng.random() < 0.5:  # else by the handle's end
            self._manager.cleanup_tensor(handle)


class Layers:
    """Training steps of a small stack of layers, compared with the same without discod."""

    def __init__(self, rng: random.Random, done: Done) -> None:
        self._rng = rng
        self._done = done
        torch.manual_seed(0)
        self._layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self._inputs = [torch.randn(batch, 512) for batch in (64, 1024, 2048)]
        self._wanted = [self._gradients(each, self._plain) for each in self._inputs]

    def step(self) -> None:
        """One step in a form drawn at random; or a forward whose graph is dropped."""
        form = self._rng.choice((self._checkpointed, self._offloaded, self._mixed))
        which = self._rng.randrange(len(self._inputs))
        self._done.steps += 1
        if self._rng.random() < 0.2:
            form(self._inputs[which].clone().requires_grad_())
        else:
            self._done.wrong += self._gradients(self._inputs[which], form) != self._wanted[which]

    def _gradients(
        self, source: torch.Tensor, form: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[str]:
        source = source.clone().requires_grad_()
        form(source).square().mean().backward()
        tensors = [source, *self._layers.parameters()]
        marks = [fingerprint(each.grad) for each in tensors if each.grad is not None]
        self._layers.zero_grad()
        return marks

    def _plain(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self._layers:
            hidden = torch.tanh(layer(hidden))
        return hidden

    def _checkpointed(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self._layers:
            hidden = disco_client.checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), hidden)
        return hidden

    def _offloaded(self, hidden: torch.Tensor) -> torch.Tensor:
        with disco_client.offload():
            return self._plain(hidden)

    def _mixed(self, hidden: torch.Tensor) -> torch.Tensor:
        with disco_client.offload():
            return self._checkpointed(hidden)


def in_threads(seed: int, most_bytes: int, live_bytes: int, done: Done) -> None:
    """Two threads at once, each with a manager of its own."""
    parts = [Done(), Done()]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(seed + number)
            store = Store(rng, most_bytes, live_bytes // 2, parts[number])
            for _ in range(ROUNDS_PER_STEP):
                store.round()
            store.clear()
        except BaseException as failure:  # noqa: BLE001  raised by the caller below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
    for part in parts:
        done.saved += part.saved
        done.verified += part.verified
        done.wrong += part.wrong


def report(done: Done) -> None:
    """One line for the parent, with the memory that is left when nothing is held.

    glibc keeps what was freed in pieces of all sizes, tens of MiB more or less at any moment: it is
    made to give that back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    stats = disco_client.stats()
    measures = {
        "written_bytes": stats.written_bytes,
        "read_bytes": stats.read_bytes,
        "live_blobs": stats.live_blobs,
        "anon_bytes": sample(os.getpid(), 0.0).anon_bytes,
    }
    print(json.dumps(asdict(done) | measures), flush=True)


def main(settings: dict[str, Any]) -> None:
    """Until stdin is closed."""
    torch.set_num_threads(1)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    arena_bytes, most_bytes = settings["arena"], settings["most_bytes"]
    disco_client.connect(
        settings["socket_dir"],
        arena=arena_bytes,
        min_bytes=64 << 10,
        reply_timeout=600,  # a shared machine may stand still for a minute, daemon and all
    )
    rng = random.Random(settings["seed"])
    torch.manual_seed(settings["seed"])
    done = Done()
    layers = Layers(rng, done)
    live_bytes = int(arena_bytes * LIVE_SHARE)
    next_line = 0.0
    while not ended.is_set():
        done.rounds += 1
        draw = rng.random()
        if draw < 0.5:
            store = Store(rng, most_bytes, live_bytes, done)
            for _ in range(ROUNDS_PER_STEP * rng.randint(1, 4)):
                store.round()
            store.clear()
            del store
        elif draw < 0.7:
            in_threads(rng.randrange(1 << 30), most_bytes, live_bytes, done)
        else:
            layers.step()
        if time.monotonic() >= next_line:
            report(done)
            next_line = time.monotonic() + 1.0
    report(done)
    disco_client.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
