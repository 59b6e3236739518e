"""The forms on a simulated accelerator, over a real daemon: gradients equal torch's to the bit.

Copies off the device and back end as late as possible, or at random; the arena holds eight of the
tensors, so the others go through the disk.
"""

import concurrent.futures
import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.daemon import Daemon
from tests.helpers.forms import (
    ALL,
    CHECKPOINT,
    NOT_REENTRANT,
    OFFLOAD,
    RECOMPUTING,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)
from tests.helpers.simulated_attachment import attach_simulated
from tests.helpers.simulated_gpu import SimulatedGpu

Tensors = list[torch.Tensor | None]

every_form = pytest.mark.parametrize("form", ALL, ids=str)


@pytest.fixture(params=["late", "random"])
def gpu(
    request: pytest.FixtureRequest, attached: None, shared_daemon: Daemon, first_seed: int
) -> Iterator[SimulatedGpu]:
    """The simulated accelerator that this process's tensors are on."""
    disco_client.close()
    gpu = attach_simulated(shared_daemon.socket_dir, request.param, seed=first_seed)
    yield gpu
    gpu.machine.finish()
    assert gpu.machine.violations == []
    assert gpu.copies > 0
    assert disco_client.stats().live_blobs == 0


@every_form
def test_a_stack_of_layers(gpu: SimulatedGpu, form: Form) -> None:
    """The usual model, over two steps: the second follows what the first has taught."""

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(), [layer() for _ in range(12)]
        for _ in range(2):
            hidden = x * 1.0
            for module in layers:
                hidden = apply(module, hidden)
            hidden.square().sum().backward()
        return grads(x, *layers)

    compare(form, pattern)
    assert disco_client.stats().written_bytes > 0
    assert disco_client.stats().device_hits > 0


@every_form
def test_inputs_that_are_shared(gpu: SimulatedGpu, form: Form) -> None:
    """One blob for a mask that every layer gets; views of one storage are one blob too."""

    def pattern(apply: Apply) -> Tensors:
        x, mask = leaf(), torch.randn(64, 32) * 1.0
        hidden, positions = x * 1.0, leaf() * 1.0
        for _ in range(5):
            hidden = apply(lambda h, m, p: torch.sin(h) * m + p, hidden, mask, positions)
        (hidden + apply(torch.cos, hidden.view(32, 64)).view(64, 32)).sum().backward()
        return [hidden.detach(), x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("view", ["transposed", "columns", "offset", "expanded", "conjugated"])
@every_form
def test_views(gpu: SimulatedGpu, form: Form, view: str) -> None:
    """What has gaps is packed on the device first; lazy bits come back as they were."""

    def pattern(apply: Apply) -> Tensors:
        x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
        hidden = x * 1.0
        for _ in range(4):
            argument = {
                "transposed": lambda h: h.t(),
                "columns": lambda h: h[:, ::2],
                "offset": lambda h: h[3:],
                "expanded": lambda h: h.view(1, -1)[:, :2048].expand(2, 2048),
                "conjugated": lambda h: h.conj(),
            }[view](hidden)
            output = apply(lambda h: torch.sin(h) * h, argument)
            hidden = hidden + output.mean()
        hidden.abs().sum().backward()
        return [hidden.detach(), x.grad]

    compare(form, pattern)


@every_form
def test_retain_graph(gpu: SimulatedGpu, form: Form) -> None:
    """The second backward finds nothing on the device, and loads all of it again."""

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(), [layer() for _ in range(10)]
        hidden = x * 1.0
        for module in layers:
            hidden = apply(module, hidden)
        output = hidden.sum()
        output.backward(retain_graph=True)
        output.backward()
        return grads(x, *layers)

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_double_backward(gpu: SimulatedGpu, form: Form) -> None:
    """A gradient penalty, which loads in an order of its own."""

    def pattern(apply: Apply) -> Tensors:
        x, module = leaf(), nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        hidden = x * 1.0
        for _ in range(6):
            hidden = apply(module, hidden)
        (grad,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        (grad**2).sum().backward()
        return [grad.detach(), *grads(x, module)]

    compare(form, pattern)


@every_form
def test_accumulation_over_microbatches_in_flight(gpu: SimulatedGpu, form: Form) -> None:
    """Pipeline schedules: first in, first out."""

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(), [layer() for _ in range(4)]
        for _ in range(2):
            outputs = []
            for _ in range(4):
                hidden = x * 1.0
                for module in layers:
                    hidden = apply(module, hidden)
                outputs.append(hidden.sum())
            while outputs:
                outputs.pop(0).backward()
        return grads(x, *layers)

    compare(form, pattern)


@every_form
def test_autocast(gpu: SimulatedGpu, form: Form) -> None:
    """Inputs in bfloat16, and casts of parameters that autograd saves."""

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(128, 32), [layer() for _ in range(6)]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = x * 1.0
            for module in layers:
                hidden = apply(module, hidden)
        hidden.float().sum().backward()
        return grads(x, *layers)

    compare(form, pattern)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@every_form
def test_nested_calls(gpu: SimulatedGpu, form: Form) -> None:
    """What is recomputed as a whole stores nothing inside, and saves anew in backward."""

    def pattern(apply: Apply) -> Tensors:
        x, one, two = leaf(), layer(), layer()

        def outer(h: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = apply(two, apply(one, h))
            return result

        hidden = x * 1.0
        for _ in range(5):
            hidden = apply(outer, hidden)
        hidden.sum().backward()
        return grads(x, one, two)

    compare(form, pattern)


@pytest.mark.parametrize("form", [f for f in ALL if "patched" not in f.name], ids=str)
def test_several_threads(gpu: SimulatedGpu, form: Form) -> None:
    """Data parallelism in one process: all of them save, wait and load at once."""

    def work(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        x = leaf()
        hidden = x * 1.0
        with form.around():
            for _ in range(6):
                hidden = form.apply(torch.sin, hidden)
            hidden.sum().backward()
        return [x.detach(), x.grad]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    for x, grad in results:
        copy = x.clone().requires_grad_()
        hidden = copy * 1.0
        for _ in range(6):
            hidden = torch.sin(hidden)
        hidden.sum().backward()
        assert torch.equal(copy.grad, grad)


@every_form
def test_memory_that_is_freed_is_used_again_at_once(gpu: SimulatedGpu, form: Form) -> None:
    """A source that is freed while its bytes are on their way gives NaN gradients elsewhere."""
    x = leaf()
    with form.around():
        hidden = x * 1.0
        for _ in range(20):
            hidden = form.apply(torch.sin, hidden)
            rubbish = [torch.full((64, 32), float("nan")) for _ in range(2)]
            del rubbish
    hidden.sum().backward()
    assert torch.isfinite(x.grad).all()
    del hidden


@every_form
def test_graphs_that_are_dropped(gpu: SimulatedGpu, form: Form) -> None:
    """A skipped step, a failed one and one in the middle of its backward leave no copy behind."""

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(), [layer() for _ in range(10)]

        def forward() -> torch.Tensor:
            hidden = x * 1.0
            for module in layers:
                hidden = apply(module, hidden)
            return hidden.sum()

        forward()
        output = forward()
        handle = layers[4][0].weight.register_hook(_fail)
        with contextlib.suppress(ValueError):
            output.backward()
        handle.remove()
        del output
        x.grad = None
        for module in layers:
            module.zero_grad()
        forward().backward()
        return grads(x, *layers)

    gc.collect()
    compare(form, pattern)


def _fail(grad: torch.Tensor) -> None:
    raise ValueError("in the middle of backward")


def test_many_small_tensors(gpu: SimulatedGpu) -> None:
    """offload(min_bytes=1): hundreds of copies under way, each looked at once, not every time."""
    x, module = leaf(), nn.Sequential(*(nn.Tanh() for _ in range(50)))
    module(x * 1.0).sum().backward()
    expected, x.grad = x.grad, None
    with disco_client.offload(min_bytes=1):
        for part in range(0, 64, 16):
            module(x[part : part + 16] * 1.0).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_sources_that_stay(gpu: SimulatedGpu, shared_daemon: Daemon, form: Form, keep: int) -> None:
    """keep_on_device: the first loads of a backward are served by the device itself."""
    mode = gpu.machine.mode
    disco_client.close()
    other = attach_simulated(shared_daemon.socket_dir, mode, keep_on_device=keep)
    gpu.copies = 1

    def pattern(apply: Apply) -> Tensors:
        x, layers = leaf(), [layer() for _ in range(12)]
        hidden = x * 1.0
        for module in layers:
            hidden = apply(module, hidden)
        hidden.sum().backward()
        return grads(x, *layers)

    compare(form, pattern)
    assert disco_client.stats().device_hits >= keep
    other.machine.finish()
    assert other.machine.violations == []


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_a_change_that_autograd_would_refuse(gpu: SimulatedGpu, form: Form) -> None:
    """An input that is changed after its save: an error or the right gradient, no wrong one."""
    x = leaf()
    with form.around():
        hidden = x * 1.0
        output = form.apply(torch.sin, hidden)
        with torch.no_grad():
            hidden.mul_(0.5)
        try:
            output.sum().backward()
        except disco_client.BlobModified:
            x.grad = torch.cos(x.detach())
    assert torch.equal(x.grad, torch.cos(x.detach()))
    del output, hidden
