"""Threads, several models and managers, forked children: none waits for ever, none is mixed up."""

import contextlib
import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import disco_client
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.forms import ALL, CHECKPOINT, NOT_REENTRANT, Form, grads, layer, leaf

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork"  # Python's own, about any fork
)


def train(form: Form, seed: int, steps: int = 20) -> list[torch.Tensor]:
    """A model of its own, trained for some steps; its parameters."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(steps):
        hidden = torch.randn(256, 32, generator=generator).requires_grad_() * 1.0
        for _ in range(6):
            hidden = form.apply(module, hidden)
        optimizer.zero_grad()
        hidden.square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("form", ALL, ids=str)
def test_four_threads_train_models_of_their_own(form: Form) -> None:
    """Hooks are per thread, and a lock held across user code would end here."""
    expected = {seed: train(form, seed) for seed in range(4)}
    got: dict[int, list[torch.Tensor]] = {}

    def work(seed: int) -> None:
        with form.around() if form.name == "offload" else contextlib.nullcontext():
            got[seed] = train(form, seed)

    with form.around() if form.name.startswith("patched") else contextlib.nullcontext():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    for seed, parameters in expected.items():
        for one, other in zip(got[seed], parameters, strict=True):
            assert torch.equal(one, other)
    assert disco_client.stats().live_blobs == 0
    assert disco_client.stats().saved_blobs > 0


@pytest.mark.parametrize("form", ALL, ids=str)
def test_one_model_in_two_threads(form: Form) -> None:
    """Two forwards of one model at the same time, each with its own backward."""
    module = layer().eval()
    inputs = [leaf(), leaf()]
    for x in inputs:
        module(x * 1.0).sum().backward()
    expected = [x.grad.clone() for x in inputs]
    start = threading.Barrier(2)
    got: list[torch.Tensor | None] = [None, None]

    def work(index: int) -> None:
        start.wait(10)
        for _ in range(20):
            x = inputs[index].detach().clone().requires_grad_()
            with form.around() if form.name == "offload" else contextlib.nullcontext():
                output = form.apply(module, x * 1.0)
            output.sum().backward()
            got[index] = x.grad

    with form.around() if form.name.startswith("patched") else contextlib.nullcontext():
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    for one, other in zip(got, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_user_code_runs_outside_of_the_lock() -> None:
    """A function that waits for another thread's call of discod must not wait for ever."""
    done = threading.Event()

    def other() -> None:
        disco_client.checkpoint(torch.sin, leaf() * 1.0).sum().backward()
        done.set()

    def run(h: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        assert done.wait(20)
        thread.join()
        return torch.sin(h)

    disco_client.checkpoint(run, leaf() * 1.0).sum().backward()


def test_actor_and_critic_interleaved() -> None:
    """Two models and two managers in one process share nothing that the other could lose."""
    actor, critic = layer().eval(), layer().eval()
    x, y = leaf(), leaf()
    one, two = disco_client.DiskOffloadManager(), disco_client.DiskOffloadManager()
    first, second = one.save_tensor(x), two.save_tensor(y)
    value = disco_client.checkpoint(critic, y * 1.0)
    policy = disco_client.checkpoint(actor, x * 1.0)
    value.sum().backward()
    one.cleanup()
    assert torch.equal(two.load_tensor(second), y)
    with pytest.raises(disco_client.HandleReleased):
        one.load_tensor(first)
    policy.sum().backward()
    expected = [g.clone() for g in grads(x, y, actor, critic) if g is not None]
    x.grad = y.grad = None
    actor.zero_grad()
    critic.zero_grad()
    (actor(x * 1.0).sum() + critic(y * 1.0).sum()).backward()
    for got, plain in zip(expected, grads(x, y, actor, critic), strict=True):
        assert torch.equal(got, plain)


class Numbers(Dataset[torch.Tensor]):
    """Items that a worker process makes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


@pytest.mark.parametrize("form", [CHECKPOINT, *NOT_REENTRANT[2:]], ids=str)
def test_forked_data_loader_workers(form: Form) -> None:
    """Attached, forward, then workers are forked, then backward: as training loops do it."""
    x, module = leaf(), layer().eval()
    with form.around():
        output = form.apply(module, x * 1.0)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert [len(batch) for batch in loader] == [4, 4]
    output.sum().backward()
    got = x.grad.clone()
    x.grad = None
    module(x * 1.0).sum().backward()
    assert torch.equal(x.grad, got)
    assert disco_client.stats().live_blobs == 0


def exit_code(pid: int) -> str | None:
    """The ended child's exit code as a text, which is true for 0 too; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return str(os.waitstatus_to_exitcode(status)) if ended else None


def test_forks_while_other_threads_are_busy(
    attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """A child that is forked while a thread holds a lock must not hang when it touches discod."""
    disco_client.close()
    attach_to(shared_daemon, arena="2MiB", min_bytes="4KiB")
    manager = disco_client.DiskOffloadManager()
    tensor = torch.ones(64, 1024)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            handles = [manager.save_tensor(tensor) for _ in range(10)]
            for handle in reversed(handles):
                manager.load_tensor(handle)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            handle = manager.save_tensor(tensor)
            pid = os.fork()
            if pid == 0:
                try:
                    manager.load_tensor(handle)
                except disco_client.HandleReleased:
                    os._exit(0)
                os._exit(1)
            code = eventually(lambda child=pid: exit_code(child), timeout=20, what="its end")
            assert code == "0", f"the child ended with {code}"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
