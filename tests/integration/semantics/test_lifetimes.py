"""When memory is free again, and what may be read while copies and writes are under way."""

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.forms import ALL, CHECKPOINT, OFFLOAD, RECOMPUTING, Form, layer, leaf


@pytest.mark.parametrize("form", ALL, ids=str)
def test_freed_memory_is_used_again_at_once(
    form: Form, attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """A source that is freed while its bytes are on their way gives NaN gradients elsewhere."""
    disco_client.close()
    attach_to(shared_daemon, arena="2MiB", min_bytes="4KiB")
    for _ in range(40):
        x = torch.randn(512, 32, requires_grad=True)
        with form.around():
            hidden = x * 1.0
            for _ in range(40):
                hidden = form.apply(torch.sin, hidden)
                rubbish = [torch.full((512, 32), float("nan")) for _ in range(2)]
                del rubbish
        hidden.sum().backward()
        assert torch.isfinite(x.grad).all()
    assert disco_client.stats().written_bytes > 0


@pytest.mark.parametrize("form", ALL, ids=str)
def test_backward_at_once(form: Form) -> None:
    """The load waits for what is on its way, or is served from memory: never stale bytes."""
    for value in range(50):
        x = torch.full((64, 32), float(value), requires_grad=True)
        with form.around():
            form.apply(torch.square, x * 1.0).sum().backward()
        assert torch.equal(x.grad, torch.full((64, 32), 2.0 * value))


def test_load_while_the_write_cannot_go_on(
    attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """load_tensor without wait_for_save, with the daemon frozen in the middle of the write."""
    disco_client.close()
    attach_to(shared_daemon, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    tensors = [torch.randn(256, 512) for _ in range(3)]
    os.kill(shared_daemon.pid, signal.SIGSTOP)
    try:
        handles = [manager.save_tensor(tensor) for tensor in tensors]
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(manager.load_tensor(handle), tensor)
    finally:
        os.kill(shared_daemon.pid, signal.SIGCONT)


def test_a_loaded_tensor_stays_as_it_is() -> None:
    """A view of a slot that is used again would change under its reader."""
    manager = disco_client.DiskOffloadManager()
    tensor = torch.randn(64, 1024)
    loaded = manager.load_tensor(manager.save_tensor(tensor))
    for _ in range(100):
        handle = manager.save_tensor(torch.randn(64, 1024))
        manager.load_tensor(handle)
    assert torch.equal(loaded, tensor)


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_the_source_is_freed(form: Form) -> None:
    """A reference that stays alive anywhere means that offloading frees nothing."""
    module = layer()
    alive: list[weakref.ref[torch.Tensor]] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 1.0
        for _ in range(3):
            alive.append(weakref.ref(hidden))
            hidden = form.apply(module, hidden)
        return hidden

    gc.disable()
    try:
        with form.around():
            output = model(leaf())
        assert [ref() for ref in alive] == [None, None, None]
        output.sum().backward()
    finally:
        gc.enable()


def test_the_sources_of_a_block_are_freed() -> None:
    """The same for every activation that a block saves."""
    alive: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        with disco_client.offload():
            hidden = leaf() * 1.0
            for _ in range(3):
                alive.append(weakref.ref(hidden))
                hidden = torch.sin(hidden)
        assert [ref() for ref in alive] == [None, None, None]
        hidden.sum().backward()
    finally:
        gc.enable()


class Dequantizing(nn.Module):
    """A weight kept in 8 bits, multiplied as a temporary of full size, as bitsandbytes does it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(-128, 127, (32, 32), dtype=torch.int8))
        self.adapter = nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.packed.float().repeat(8, 8)[:32] / 128
        return torch.sin(hidden @ weight[:, :32] + self.adapter(hidden))


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
def test_fifty_steps_hold_no_more_than_five(form: Form) -> None:
    """Temporaries that are captured and leaked each step."""
    model = nn.Sequential(*(Dequantizing() for _ in range(3)))
    process, resident = psutil.Process(), []
    for step in range(50):
        with form.around():
            hidden = torch.randn(4096, 32, requires_grad=True) * 1.0
            for module in model:
                hidden = form.apply(module, hidden)
        hidden.sum().backward()
        del hidden
        assert disco_client.stats().live_blobs == 0
        if step >= 5:
            resident.append(process.memory_info().rss)
    # A leak of one activation a step would be 22 MiB here.
    assert min(resident[-5:]) - min(resident[:5]) < 8 * 2**20


def test_many_threads_on_one_arena() -> None:
    """Allocation and release from eight threads: no overlap, and all room back at the end."""
    manager = disco_client.DiskOffloadManager()
    errors: list[str] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        held: list[tuple[str, torch.Tensor]] = []
        for index in range(250):
            if held and (len(held) > 3 or order.random() < 0.5):
                handle, expected = held.pop(order.randrange(len(held)))
                if not torch.equal(manager.load_tensor(handle), expected):
                    errors.append(f"{seed}: {index}")
                manager.cleanup_tensor(handle)
            else:
                tensor = torch.full((order.randrange(1, 8192),), seed * 1000 + index)
                held.append((manager.save_tensor(tensor), tensor))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert disco_client.stats().live_blobs == 0


def test_prefetched_blobs_stay_within_the_limit(
    attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """A schedule that runs ahead over layers that were not offloaded would load everything."""
    disco_client.close()
    attach_to(shared_daemon, arena="4MiB", min_bytes="4KiB")
    blob = 128 * 2**10
    module = nn.Linear(32, 32)
    for prefetch in (1, 2):
        outputs, x = [], torch.randn(1024, 32, requires_grad=True)
        hidden = x * 1.0
        for index in range(60):  # every second layer is offloaded
            if index % 2:
                hidden = torch.tanh(module(hidden))
            else:
                hidden = disco_client.Disco.apply(module, hidden, prefetch_size=prefetch)
            hidden = hidden * 1.0
            outputs.append(hidden)
        residency = disco_client.connection.current().session._residency
        ahead: list[int] = []

        def look(grad: torch.Tensor, into: list[int] = ahead, held: object = residency) -> None:
            into.append(sum(b.prefetched for b in list(held._held.blobs.values())))

        for output in outputs:
            output.register_hook(look)
        hidden.sum().backward()
        assert max(ahead) <= prefetch
        del outputs, output, hidden
    assert blob * 30 < 4 * 2**20


def test_cleanup_while_a_prefetch_is_queued() -> None:
    """Cleaned up in that moment, a blob must not stop later prefetches."""
    manager = disco_client.DiskOffloadManager(prefetch_size=2)
    for _ in range(50):
        handles = [manager.save_tensor(torch.randn(128, 1024)) for _ in range(16)]
        manager.load_tensor(handles[-1])
        manager.trigger_prefetch()
        for handle in handles[::2]:
            manager.cleanup_tensor(handle)
        for handle in reversed(handles[1::2]):
            manager.load_tensor(handle)
        manager.cleanup()
    del handles, handle
    assert disco_client.stats().live_blobs == 0
    handles = [manager.save_tensor(torch.randn(128, 1024)) for _ in range(16)]
    before = disco_client.stats().read_bytes
    for handle in handles[-8:]:
        manager.cleanup_tensor(handle)
    manager.trigger_prefetch()
    eventually(lambda: disco_client.stats().read_bytes > before, what="a prefetch")
