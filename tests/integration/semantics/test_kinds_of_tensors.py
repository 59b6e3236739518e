"""Views, layouts, sizes, dtypes and subclasses: what comes back is what went in."""

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.forms import (
    ALL,
    CHECKPOINT,
    NOT_REENTRANT,
    OFFLOAD,
    PATCHED,
    ROWS,
    WIDTH,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda t: t[1:],
    "columns": lambda t: t[:, ::2],
    "transposed": lambda t: t.t(),
    "steps and offset": lambda t: t[::2, 1:],
    "diagonal": lambda t: t.view(64, 64).diagonal()[None].expand(64, 64),
    "expanded": lambda t: t[:1].expand(512, WIDTH * 2),
    "unsqueezed": lambda t: t[:, None, :],
    "permuted": lambda t: t.view(8, 8, 64).permute(2, 0, 1),
    "channels last": lambda t: t.view(4, 4, 16, 16).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_views(form: Form, view: str) -> None:
    """Offsets applied twice, lost strides, and reads past a storage are the classic faults."""
    strides: set[tuple[int, ...]] = set()

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf(64, 64)
        hidden = VIEWS[view](x * 1.0)

        def run(h: torch.Tensor) -> torch.Tensor:
            strides.add(h.stride())
            return torch.sin(h) * h

        output = apply(run, hidden)
        output.sum().backward()
        return [output.detach(), x.grad]

    small = view in ("diagonal", "expanded") and form is not OFFLOAD  # which saves sin(h) too
    compare(form, pattern, saves=not small)
    assert len(strides) == 1


def test_an_expanded_tensor_is_written_once() -> None:
    """At full size it would be 4096 times its bytes."""
    for form in (CHECKPOINT, OFFLOAD):
        x = torch.randn(1, 4096, requires_grad=True)
        before = disco_client.stats().saved_bytes
        with form.around():
            output = form.apply(torch.sin, (x * 1.0).expand(4096, 4096))
        assert disco_client.stats().saved_bytes - before == 4 * 4096
        output.sum().backward()
        assert torch.allclose(x.grad, torch.cos(x) * 4096)


SIZES = (1, 2, 511, 512, 513, 4095, 4096, 4097, 2**20 - 1, 2**20 + 1)


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_that_are_no_multiple_of_a_block(nbytes: int) -> None:
    """The tail that is smaller than a block must come back too, through the disk as well."""
    manager = disco_client.DiskOffloadManager()
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    handle = manager.save_tensor(tensor)
    fillers = [manager.save_tensor(torch.zeros(2**20, dtype=torch.uint8)) for _ in range(6)]
    assert torch.equal(manager.load_tensor(handle), tensor)
    assert len(fillers) == 6
    assert disco_client.stats().written_bytes > 0


@pytest.mark.parametrize("shape", [(0,), (0, WIDTH), (2, 0), ()], ids=str)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_empty_and_scalar_inputs(form: Form, shape: tuple[int, ...]) -> None:
    """An expert of a mixture that got no tokens; a loss scale."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, y = torch.randn(shape, requires_grad=True), leaf()
        output = apply(lambda a, h: torch.sin(a).sum() * torch.sin(h), x * 1.0, y * 1.0)
        output.sum().backward()
        return [x.grad, y.grad]

    compare(form, pattern)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_dtypes_with_gradients(form: Form, dtype: torch.dtype) -> None:
    """Going through numpy or a file format fails for some, and converts others."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = torch.randn(128, WIDTH, dtype=dtype, requires_grad=True)
        output = apply(lambda h: torch.sin(h) * h, x * 1.0)
        output.sum().abs().backward()
        return [output.detach(), x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_lazy_conjugate_and_negative(form: Form) -> None:
    """The bits of conj() and of x.imag of a conjugate are dropped when raw bytes are copied."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = torch.randn(ROWS, WIDTH, dtype=torch.complex64, requires_grad=True)
        conjugate = (x * 1.0).conj()
        negative = conjugate.imag
        assert conjugate.is_conj()
        assert negative.is_neg()
        output = apply(lambda c, n: torch.view_as_real(c * n).sum(-1), conjugate, negative)
        output.sum().backward()
        return [output.detach(), x.grad]

    compare(form, pattern)


class Pair(torch.Tensor):
    """A wrapper subclass around two plain tensors, whose value is their sum."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(
            cls, high.shape, strides=high.stride(), dtype=high.dtype, device=high.device
        )

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> "Pair":
        return Pair(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Pair(func(args[0].high), func(args[0].low))
        plain = torch.utils._pytree.tree_map_only(Pair, lambda p: p.high + p.low, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
def test_wrapper_subclass_is_stored_by_its_parts(form: Form) -> None:
    """Quantized weights and float8 tensors have several inner tensors and a type to keep."""
    types: set[type] = set()

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        pair = Pair(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))

        def run(h: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            types.add(type(p))
            return torch.sin(h) * p

        apply(run, x * 1.0, pair).sum().backward()
        return [x.grad]

    compare(form, pattern)
    assert types == {Pair}
    assert disco_client.stats().saved_bytes >= 3 * ROWS * WIDTH * 4


class Marked(torch.Tensor):
    """A subclass that is more than its bytes, in a way that nobody can know."""


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
def test_other_subclasses_stay_in_memory_with_one_warning(
    form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a plain tensor in silence, and never a warning per layer and step."""
    name = f"Marked{form.name}"
    kind = type(name, (Marked,), {})
    types: set[type] = set()

    def run(h: torch.Tensor) -> torch.Tensor:
        types.add(type(h))
        return torch.sin(h)

    with form.around():
        for _ in range(3):
            x = leaf()
            form.apply(run, (x * 1.0).as_subclass(kind)).sum().backward()
            assert torch.equal(x.grad, torch.cos(x.detach()))
    assert types == {kind}
    assert disco_client.stats().saved_blobs == 0
    assert len([r for r in caplog.records if name in r.message]) == 1
    assert all(r.levelno == logging.WARNING for r in caplog.records)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_sparse_tensors_stay_in_memory(form: Form) -> None:
    """They have no plain bytes; the gradients are exact all the same."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf(WIDTH)
        mask = torch.eye(2 * WIDTH)[:, :WIDTH].to_sparse()
        output = apply(lambda m, h: torch.sparse.mm(m, torch.sin(h)), mask, x * 1.0)
        output.sum().backward()
        return [x.grad]

    compare(form, pattern)


class Model(nn.Module):
    """A large parameter, used as it is and transposed, and a large buffer, used in part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 256))
        self.register_buffer("mask", torch.rand(256, 256))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        grown = hidden @ self.weight * self.mask[: len(hidden)]
        return self.linear(grown @ self.weight.t())


def test_parameters_and_buffers_of_a_model_stay() -> None:
    """Their views too: they are alive whatever becomes of the graph."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, model = leaf(8), Model()
        apply(model, x * 1.0).sum().backward()
        return grads(x, model)

    compare(OFFLOAD, pattern)
    # What is stored is `grown` of [8, 256].
    assert disco_client.stats().saved_bytes == 8 * 256 * 4


def test_weights_cast_by_autocast_stay() -> None:
    """Half a model's bytes in each step, for what a cast of the weights gives again."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, one, two = leaf(64, 256), nn.Linear(256, 256), nn.Linear(256, 256)
        with torch.autocast("cpu", torch.bfloat16):
            output = apply(lambda h: one(two(one(h))), x * 1.0)
        output.float().sum().backward()
        return [output.detach(), *grads(x, one, two)]

    compare(OFFLOAD, pattern)
    # What is stored are the three inputs in bfloat16; a weight in bfloat16 has 128 KiB.
    assert disco_client.stats().saved_bytes == 3 * 64 * 256 * 2


def _add_in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def _add_through_data(weight: torch.Tensor) -> None:
    weight.data.add_(1)


def _other_data(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


def _no_data(weight: torch.Tensor) -> None:
    weight.data = torch.empty(0)


@pytest.mark.parametrize("change", [_add_in_place, _add_through_data, _other_data, _no_data])
def test_cast_weight_changed_before_backward(change: Callable[[torch.Tensor], None]) -> None:
    """It cannot be cast again from other values: autograd's error, and no wrong gradient."""
    x, linear = leaf(), nn.Linear(256, 256, bias=False)
    with disco_client.offload(), torch.autocast("cpu", torch.bfloat16):
        loss = linear(x.repeat(1, 8) * 1.0).float().sum()
    change(linear.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cast_weight_exchanged_and_put_back() -> None:
    """ZeRO takes a parameter's data away after the forward and brings it back for backward."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, linear = leaf(64, 256), nn.Linear(256, 256)
        with torch.autocast("cpu", torch.bfloat16):
            output = apply(linear, x * 1.0)
        data, linear.weight.data = linear.weight.data.clone(), torch.empty(0)
        linear.weight.data = data
        output.float().sum().backward()
        return grads(x, linear)

    compare(OFFLOAD, pattern)


def _rounded(weight: nn.Parameter) -> torch.Tensor:
    cast = weight.to(torch.float64)
    cast.data.round_()
    return cast


def _replaced(weight: nn.Parameter) -> torch.Tensor:
    cast = weight.to(torch.float64)
    cast.data = cast.data.round()
    return cast


def _outdated(weight: nn.Parameter) -> torch.Tensor:
    cast = weight.to(torch.float64)
    _add_in_place(weight)
    return cast


def _conjugated(weight: nn.Parameter) -> torch.Tensor:
    return weight.to(torch.complex128).conj()


def _negated(weight: nn.Parameter) -> torch.Tensor:
    return torch._neg_view(weight.to(torch.float64))


@pytest.mark.parametrize("cast", [_rounded, _replaced, _outdated, _conjugated, _negated])
def test_casts_that_the_weight_does_not_give_again(
    cast: Callable[[nn.Parameter], torch.Tensor],
) -> None:
    """Straight-through tricks, weights cached by autocast, lazy bits: not the plain cast."""
    dtype = torch.complex64 if cast is _conjugated else torch.float32

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, weight = leaf(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        apply(lambda h: (h.double() * cast(weight)).abs() ** 2, x * 1.0).sum().backward()
        return [x.grad, weight.grad]

    compare(OFFLOAD, pattern)


def test_leaves_that_need_a_gradient_stay() -> None:
    """The graph holds them for their gradient, so storing them would free nothing."""
    for form in ALL:
        x, module = leaf(), layer()
        before = disco_client.stats().saved_bytes
        with form.around():
            form.apply(module, x).sum().backward()
            form.apply(module, x[1:]).sum().backward()
        saved = disco_client.stats().saved_bytes - before
        assert saved == 0 or form is OFFLOAD, form  # which stores what is made of them


def test_buffers_of_a_model_that_was_copied() -> None:
    """A copy registers nothing; the model can be named instead."""
    model = copy.deepcopy(Model())
    with disco_client.offload(model):
        model(leaf(8) * 1.0).sum().backward()
    assert disco_client.stats().saved_bytes == 8 * 256 * 4


@pytest.mark.parametrize("form", [CHECKPOINT, PATCHED], ids=str)
def test_attributes_of_an_input(form: Form) -> None:
    """autograd hands leaves back as they are, attributes included."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        mask = torch.ones(ROWS, WIDTH)
        mask.scale = 3.0  # type: ignore[attr-defined]

        def run(h: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.sin(h) * m.scale  # type: ignore[attr-defined]

        apply(run, x * 1.0, mask).sum().backward()
        return [x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_attributes_of_hidden_states(form: Form) -> None:
    """torch hands the very object to the recomputation; without them it computes another thing."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        hidden = x * 1.0
        hidden.doubled = True  # type: ignore[attr-defined]
        apply(lambda h: torch.sin(h * (2 if hasattr(h, "doubled") else 3)), hidden).sum().backward()
        return [x.grad]

    compare(form, pattern, saves=form is OFFLOAD)


def test_device_of_a_loaded_tensor() -> None:
    """It goes back to where it came from, not to a GPU that may not be there."""
    manager = disco_client.DiskOffloadManager()
    assert manager.load_tensor(manager.save_tensor(torch.ones(3))).device.type == "cpu"
    module = layer()
    disco_client.Disco.apply(module, leaf() * 1.0).sum().backward()
    assert module[0].weight.grad.device.type == "cpu"


def test_nested_tensors_stay_in_memory() -> None:
    """They have no strides of their own; asking for them is an internal error of torch."""
    rows = [torch.randn(600, WIDTH), torch.randn(700, WIDTH)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        nested = torch.nested.nested_tensor(rows)
        weight = torch.eye(WIDTH, requires_grad=True)
        padded = disco_client.checkpoint(
            lambda n: torch.nested.to_padded_tensor(n, 0.0) @ weight, nested
        )
        padded.sum().backward()
    assert weight.grad is not None
    assert disco_client.stats().saved_bytes == 0
