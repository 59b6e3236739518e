"""``torch.compile`` around and inside, and ``torch.func``: equal results, or one clear error."""

import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.forms import (
    CHECKPOINT,
    DISCO,
    NOT_REENTRANT,
    OFFLOAD,
    PATCHED,
    RECOMPUTING,
    WIDTH,
    Form,
    grads,
    leaf,
)

pytestmark = pytest.mark.filterwarnings(
    # torch.compile's own, about its internals
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute of a Tensor",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    """No dropout: a compiled function draws other random numbers, with or without discod."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(hidden)) * hidden


Step = Callable[[], list[torch.Tensor | None]]


def equal(form: Form, build: Callable[[Callable[..., torch.Tensor]], list[torch.Tensor]]) -> None:
    """Compiled through discod against compiled through torch, from one seed, three steps each."""
    results = []
    for apply, around in ((form.oracle, None), (form.apply, form.around)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        if around is None:
            results.append(build(apply))
        else:
            with around():
                results.append(build(apply))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", [*RECOMPUTING, OFFLOAD], ids=str)
def test_compiled_layer_inside_of_a_call(form: Form) -> None:
    """checkpoint(compile(layer)): the layer is compiled, its input is stored."""

    def build(apply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, block = leaf(), Block()
        compiled = torch.compile(block, backend="aot_eager")
        for _ in range(3):
            apply(compiled, apply(compiled, x * 1.0)).sum().backward()
        return [g for g in grads(x, block) if g is not None]

    equal(form, build)
    assert disco_client.stats().saved_blobs > 0


class Model(nn.Module):
    """Two layers, each called through ``apply``."""

    def __init__(self, apply: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.apply_to = apply
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = self.apply_to(block, hidden)
        return hidden


@pytest.mark.parametrize("form", [CHECKPOINT, DISCO], ids=str)
def test_compiled_model_around_the_calls(form: Form, caplog: pytest.LogCaptureFixture) -> None:
    """compile(model of checkpointed layers): graph breaks at the calls, and they offload."""

    def build(apply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, model = leaf(), Model(apply)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(x * 1.0).sum().backward()
        return [g for g in grads(x, model) if g is not None]

    with caplog.at_level(logging.ERROR):
        equal(form, build)
    assert disco_client.stats().saved_blobs == 6
    assert caplog.records == []


def test_compiled_model_inside_of_a_block(caplog: pytest.LogCaptureFixture) -> None:
    """offload() around a compiled model: what the compiled graph saves is stored."""

    def build(apply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, model = leaf(), Model(apply)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(x * 1.0).sum().backward()
        return [g for g in grads(x, model) if g is not None]

    equal(OFFLOAD, build)
    assert disco_client.stats().saved_blobs > 0
    assert [r for r in caplog.records if r.name.startswith("disco_client")] == []


def test_compiled_model_around_patched_calls() -> None:
    """torch compiles its own checkpoint into the graph, patched or not: equal, and not discod's."""

    def build(apply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, model = leaf(), Model(apply)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(x * 1.0).sum().backward()
        return [g for g in grads(x, model) if g is not None]

    equal(PATCHED, build)
    assert disco_client.stats().saved_blobs == 0


def test_a_block_inside_of_compiled_code() -> None:
    """A compiled function that enters offload(): the block is left out of the graph, and works."""
    x, block = leaf(), Block()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        with disco_client.offload():
            hidden = block(hidden)
        return hidden.sum()

    step(x * 1.0).backward()
    expected = [g.clone() for g in grads(x, block) if g is not None]
    saved = disco_client.stats().saved_blobs
    for _ in range(3):
        x.grad = None
        block.zero_grad()
        torch.compile(step, backend="aot_eager")(x * 1.0).backward()
        for one, other in zip(grads(x, block), expected, strict=True):
            assert one is not None
            assert torch.allclose(one, other, atol=1e-6)
    assert disco_client.stats().saved_blobs > saved
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", [CHECKPOINT, DISCO], ids=str)
def test_fullgraph_is_refused_by_name(form: Form) -> None:
    """fullgraph=True allows no graph break: one error before the first step, which says where."""
    model = torch.compile(Model(form.apply), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"disco_client|checkpoint|apply"):
        model(leaf() * 1.0)


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
def test_torch_func_under_hooks_is_one_clear_error(form: Form) -> None:
    """torch lets no transform run under saved-tensor hooks; the text names discod's block."""
    text = "offload" if form is OFFLOAD else "saved tensor hooks"
    with pytest.raises(RuntimeError, match=text), form.around():
        form.apply(lambda h: torch.func.grad(lambda v: torch.sin(v).sum())(h), leaf() * 1.0)
    assert disco_client.stats().live_blobs == 0
    with form.around():  # and it works again
        form.apply(torch.sin, leaf() * 1.0).sum().backward()


@pytest.mark.parametrize("form", [DISCO], ids=str)
def test_torch_func_inside_of_disco(form: Form) -> None:
    """No hooks are active while the function runs: a chunked loss may use torch.func."""
    results = []
    for apply in (form.oracle, form.apply):
        torch.manual_seed(0)
        x, weight = leaf(), nn.Parameter(torch.randn(WIDTH, WIDTH))

        def run(h: torch.Tensor, w: nn.Parameter = weight) -> torch.Tensor:
            inner, _ = torch.func.grad_and_value(lambda v: torch.sin(v).sum())(h.detach())
            return torch.sin(h @ w) * inner

        apply(run, x * 1.0).sum().backward()
        results.append([*grads(x), weight.grad])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert torch.equal(one, other)
    assert disco_client.stats().saved_blobs == 1


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_a_transform_around_a_call_is_torchs_error(form: Form) -> None:
    """torch.func.grad over a checkpointed call is refused by torch, with discod or without."""
    with form.around(), pytest.raises(RuntimeError, match="hooks"):
        torch.func.grad(lambda h: form.apply(torch.sin, h).sum())(torch.randn(64, WIDTH))
    if form is OFFLOAD:
        return
    with pytest.raises(RuntimeError, match="hooks"):
        torch.func.grad(lambda h: form.oracle(torch.sin, h).sum())(torch.randn(64, WIDTH))
