"""What goes into a checkpointed call: positions, keywords, containers, frozen inputs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disco_client
from tests.helpers.forms import (
    ALL,
    CHECKPOINT,
    DISCO,
    NOT_REENTRANT,
    PATCHED,
    PATCHED_REENTRANT,
    RECOMPUTING,
    ROWS,
    WIDTH,
    Apply,
    Form,
    compare,
    grads,
    layer,
    leaf,
)

BYTES = ROWS * WIDTH * 4
NON_REENTRANT_CHECKPOINTS = (CHECKPOINT, PATCHED)


def spellings(module: nn.Module) -> dict[str, Callable[..., Any]]:
    return {
        "module": module,
        "bound method": module.forward,
        "lambda": lambda h: module(h),
        "partial": functools.partial(module.__call__),
        "partial of partial": functools.partial(functools.partial(module)),
    }


@pytest.mark.parametrize("spelling", spellings(nn.Identity()))
@pytest.mark.parametrize("form", ALL, ids=str)
def test_every_spelling_of_a_function(form: Form, spelling: str) -> None:
    """Frameworks pass modules, methods, lambdas and partials; none has to have ``__self__``."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        apply(spellings(module)[spelling], x * 1.0).sum().backward()
        return grads(x, module)

    compare(form, pattern)


class Layer(nn.Module):
    """Takes everything that a transformer's layer takes, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        mask = attention_mask["k"][0] if isinstance(attention_mask, dict) else attention_mask
        hidden = self.linear(hidden_states) * mask * scale
        return hidden if position_ids is None else hidden[position_ids]


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_keywords(form: Form) -> None:
    """Keywords are dropped or rejected by simpler checkpoints; their gradients count too."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, mask, module = leaf(), leaf(), Layer()
        apply(
            module,
            x * 1.0,
            attention_mask=mask * 1.0,
            position_ids=torch.randperm(ROWS),
            scale=3,
        ).sum().backward()
        return grads(x, mask, module)

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_hidden_states_by_keyword(form: Form) -> None:
    """The first tensor may come by name, and is offloaded all the same."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        apply(lambda hidden_states: module(hidden_states), hidden_states=x * 1.0).sum().backward()
        return grads(x, module)

    compare(form, pattern)


@pytest.mark.parametrize("preserve", [{}, {"preserve_rng_state": True}])
@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_a_flag_is_never_an_activation(form: Form, preserve: dict[str, bool]) -> None:
    """Passed on wrongly, the first activation lands in the place of preserve_rng_state."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        apply(module, x * 1.0, **preserve).sum().backward()
        return grads(x, module)

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_tensor_with_history_hidden_in_a_partial(form: Form) -> None:
    """Closed over by two layers; its gradient is the sum, not None and not an error."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, p, module = leaf(), leaf(), Layer()
        carried = p * 2
        hidden = x * 1.0
        for _ in range(2):
            hidden = apply(functools.partial(module, attention_mask={"k": [carried]}), hidden)
        hidden.sum().backward()
        return grads(x, p, module)

    compare(form, pattern)


@pytest.mark.parametrize("where", ["partial", "container", "closure"])
def test_tensor_with_history_hidden_from_disco(where: str) -> None:
    """The reentrant form would lose its gradient or free its graph too early: it is refused."""
    carried = leaf() * 2

    def run(h: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return h

    function = {
        "partial": functools.partial(run, extra=carried),
        "container": functools.partial(run, extra={"k": [carried]}),
        "closure": lambda h: h * carried,
    }[where]
    with pytest.raises(disco_client.UnsupportedCall, match="autograd history"):
        disco_client.Disco.apply(function, leaf() * 1.0)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_other_arguments_arrive_as_they_are(form: Form) -> None:
    """None, numbers, strings, masks and integers must not shift or crash what follows them."""
    seen: set[tuple[Any, ...]] = set()

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, factor = leaf(), leaf()
        mask, index = torch.rand(ROWS, WIDTH) > 0.5, torch.arange(ROWS)

        def run(h: torch.Tensor, *args: Any) -> torch.Tensor:
            nothing, number, m, text, real, i, f = args
            seen.add((nothing, number, text, real, m.dtype, i.dtype, m.requires_grad))
            return torch.sin(h[i] * m * number * real) * f

        apply(run, x * 1.0, None, 3, mask, "s", 2.5, index, factor * 1.0).sum().backward()
        return grads(x, factor)

    compare(form, pattern)
    assert seen == {(None, 3, "s", 2.5, torch.bool, torch.int64, False)}


@pytest.mark.parametrize("form", ALL, ids=str)
def test_tensors_with_history_beside_the_hidden_states(form: Form) -> None:
    """Encoder states, rotary embeddings, shared keys: every layer adds to their gradient."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, p, module = leaf(), leaf(), layer()
        extra, hidden = p * 2, x * 1.0
        for _ in range(3):
            hidden = apply(lambda h, e: module(h) + torch.sin(e), hidden, extra)
        hidden.sum().backward()
        return grads(x, p, module)

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_argument_added_by_a_hook_of_the_module(form: Form) -> None:
    """PEFT injects arguments in forward hooks; the recomputation must call the module with them."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), Layer()
        shift = torch.randn(ROWS, WIDTH)

        def inject(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, kwargs | {"attention_mask": shift}

        module.register_forward_pre_hook(inject, with_kwargs=True)
        apply(module, x * 1.0).sum().backward()
        return grads(x, module)

    compare(form, pattern)


class Lora(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.base(hidden) + self.b(self.a(hidden)))


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_frozen_embedding_before_lora(form: Form) -> None:
    """The hidden states need no gradient, and the adapters must still get theirs."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        one, two = Lora(), Lora()
        apply(two, apply(one, torch.randn(ROWS, WIDTH))).sum().backward()
        return grads(one, two)

    compare(form, pattern)


def test_frozen_embedding_is_refused_by_disco() -> None:
    """The reentrant form would train nothing, with a warning at most."""
    with pytest.raises(disco_client.UnsupportedCall, match="requires_grad_"):
        disco_client.Disco.apply(Lora(), torch.randn(ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_frozen_embedding_in_torchs_reentrant_form() -> None:
    """The patch changes nothing about it: torch's own form trains nothing there."""
    for around in (PATCHED_REENTRANT.around, None):
        output = PATCHED_REENTRANT.apply(Lora(), torch.randn(ROWS, WIDTH))
        assert not output.requires_grad
        if around is None:
            continue
        with around():
            assert not PATCHED_REENTRANT.apply(Lora(), torch.randn(ROWS, WIDTH)).requires_grad


@pytest.mark.parametrize("form", ALL, ids=str)
def test_token_ids_first(form: Form) -> None:
    """An integer tensor cannot require a gradient, and must not be made to."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, table = leaf(), nn.Embedding(16, WIDTH)
        tokens = torch.randint(0, 16, (1024,))

        def run(ids: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            assert not ids.requires_grad
            return table(ids[:ROWS]) * torch.sin(h)

        apply(run, tokens, x * 1.0).sum().backward()
        return grads(x, table)

    compare(form, pattern)


@pytest.mark.parametrize("container", ["plain", "list", "dict", "nested"])
@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_tensors_in_containers_are_offloaded(form: Form, container: str) -> None:
    """Some models pass their hidden states in a list or dict, where hooks never see them."""
    wrap: dict[str, Callable[[torch.Tensor], Any]] = {
        "plain": lambda t: t,
        "list": lambda t: [t, None],
        "dict": lambda t: {"h": t, "n": 3},
        "nested": lambda t: ({"h": [t]}, "s"),
    }
    unwrap: dict[str, Callable[[Any], torch.Tensor]] = {
        "plain": lambda v: v,
        "list": lambda v: v[0],
        "dict": lambda v: v["h"],
        "nested": lambda v: v[0]["h"][0],
    }

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        hidden = x * 1.0
        for _ in range(3):
            hidden = apply(lambda v: module(unwrap[container](v)), wrap[container](hidden))
        hidden.sum().backward()
        return grads(x, module)

    compare(form, pattern)
    assert disco_client.stats().last_cycle.saved_bytes == 3 * BYTES


@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_a_container_that_the_function_changes(form: Form) -> None:
    """A list that the layer appends to is the caller's own in both passes, as in torch."""
    lengths: list[list[int]] = []

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        cache = [x * 1.0]
        seen: list[int] = []

        def run(h: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
            seen.append(len(kept))
            kept.append(h.detach())
            return torch.sin(h) * kept[0]

        apply(run, x * 2.0, cache).sum().backward()
        assert len(cache) == 3
        lengths.append(seen)
        return grads(x)

    compare(form, pattern)
    assert lengths == [[1, 2], [1, 2]]


@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_a_container_whose_tensors_are_written(form: Form) -> None:
    """A cache of tensors that layers fill, and a small one that is set between the calls."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        cache, statistics = [torch.zeros(3, ROWS, WIDTH)], {"h": x * 3.0, "n": torch.zeros(4)}
        hidden = x * 1.0

        def run(h: torch.Tensor, kept: list[torch.Tensor], more: Any, index: int) -> torch.Tensor:
            kept[0][index] = h.detach()
            return torch.sin(h) * kept[0][index] + more["h"] * more["n"].shape[0]

        for index in range(3):
            hidden = apply(run, hidden, cache, statistics, index)
            statistics["n"][index] = 1.0
        hidden.sum().backward()
        return [*cache, *grads(x)]

    compare(form, pattern)


@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_a_container_that_is_given_twice_is_one(form: Form) -> None:
    """A function may ask whether two lists are the same one."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        both = [x * 1.0]
        apply(lambda a, b: torch.sin(a[0] * (2.0 if a is b else 3.0)), both, both).sum().backward()
        return grads(x)

    compare(form, pattern)


@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_other_containers_are_passed_as_they_are(form: Form) -> None:
    """A cache object or a named tuple may be anything; it is handed over, not taken apart."""

    class Cache(list[torch.Tensor]):
        pass

    kinds: set[type] = set()

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()

        def run(h: torch.Tensor, cache: Cache) -> torch.Tensor:
            kinds.add(type(cache))
            return torch.sin(h) * cache[0]

        apply(run, x * 1.0, Cache([x * 2.0])).sum().backward()
        return grads(x)

    compare(form, pattern)
    assert kinds == {Cache}
    assert disco_client.stats().last_cycle.saved_bytes == BYTES


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_parameters_and_buffers_stay(form: Form) -> None:
    """They are alive whatever happens: storing them would only cost."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, ROWS))
            self.register_buffer("mask", torch.rand(1, ROWS, 1).expand(1, ROWS, WIDTH).clone())

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, model = leaf(8), Model()

        def run(h: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.sin(h @ w @ m[0])

        apply(run, x * 1.0, model.weight, model.mask).sum().backward()
        return grads(x, model)

    compare(form, pattern, saves=False)


def test_options_of_torch() -> None:
    """They are torch's options, not the function's arguments, whatever torch has of them."""
    x, module = leaf(), layer()
    entered = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: object) -> None:
            pass

    for options in (
        {"determinism_check": "none"},
        {"debug": True},
        {"early_stop": False},
        {"context_fn": lambda: (Note("forward"), Note("recomputation"))},
    ):
        disco_client.checkpoint(module, x * 1.0, **options).sum().backward()
    assert entered == ["forward", "recomputation"]
    with pytest.raises(ValueError, match="determinism_check"):
        disco_client.checkpoint(module, x * 1.0, determinism_check="nonsense")
    assert disco_client.stats().live_blobs == 0


def test_decorated_layer() -> None:
    """torch 2.14 has this form: checkpoint(options) without a function is a decorator."""

    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        @disco_client.checkpoint(use_reentrant=False, preserve_rng_state=False)
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            """Doc."""
            return torch.sin(self.linear(hidden))

    x, module = leaf(), Decorated()
    assert module.forward.__doc__ == "Doc."
    module(x * 1.0).sum().backward()
    assert disco_client.stats().saved_blobs == 1
    got = grads(x, module)
    x.grad = None
    module.zero_grad()
    torch.sin(module.linear(x * 1.0)).sum().backward()
    for one, other in zip(got, grads(x, module), strict=True):
        assert torch.equal(one, other)


def test_determinism_check_of_torch() -> None:
    """A recomputation that does something else is noticed, as by torch."""
    shapes = iter([(ROWS, WIDTH), (WIDTH, ROWS)])
    output = disco_client.checkpoint(
        lambda h: torch.sin(h.view(*next(shapes)) * 2).sum(), leaf() * 1.0
    )
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        output.backward()
    del output
    assert disco_client.stats().live_blobs == 0


def test_keywords_are_refused_by_disco() -> None:
    """They would be dropped, or lose their gradient; the text names what takes them."""
    with pytest.raises(TypeError, match=r"scale.*disco_client\.checkpoint"):
        DISCO.apply(lambda h, scale: h, leaf() * 1.0, scale=3)


def test_settings_of_disco() -> None:
    """The settings reach the manager: equal ones share it, a nonsense one is refused."""
    instance = disco_client.Disco.get_instance
    assert instance() is instance()
    assert instance(prefetch_size=2) is not instance()
    x = leaf()
    DISCO.apply(torch.sin, x * 1.0, prefetch_size=2, save_workers=1).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach()))
    with pytest.raises(ValueError, match="save_workers=0"):
        DISCO.apply(torch.sin, leaf() * 1.0, save_workers=0)


@pytest.mark.parametrize("form", NON_REENTRANT_CHECKPOINTS, ids=str)
def test_hidden_states_in_the_keywords_of_a_partial(form: Form) -> None:
    """Libraries put a layer's keywords into a partial; where all come so, nothing would move."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), Layer()
        mask, hidden = torch.rand(ROWS, WIDTH), x * 1.0
        for _ in range(3):
            call = functools.partial(module, attention_mask=mask)
            hidden = apply(functools.partial(call, hidden_states=hidden))
        hidden.sum().backward()
        return grads(x, module)

    compare(form, pattern)
    assert disco_client.stats().saved_blobs == 4  # the mask is one


@pytest.mark.parametrize("form", ALL, ids=str)
def test_one_tensor_given_twice_is_one_in_the_recomputation(form: Form) -> None:
    """Attention asks whether query, key and value are the same object, and computes accordingly."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, attention = leaf(), nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        hidden = (x * 1.0).view(2, -1, WIDTH)
        output = apply(lambda q, k, v: attention(q, k, v)[0], hidden, hidden, hidden)
        output.sum().backward()
        return [output.detach(), *grads(x, attention)]

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_one_tensor_given_twice_and_in_a_container(form: Form) -> None:
    """Taken for two, the recomputation would take another branch, in silence."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        hidden = x * 1.0

        def run(one: torch.Tensor, others: list[torch.Tensor], again: torch.Tensor) -> Any:
            return torch.sin(one * (2.0 if one is others[1] and one is again else 3.0))

        apply(run, hidden, [x, hidden], again=hidden).sum().backward()
        return [x.grad]

    compare(form, pattern)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_one_tensor_given_beside_a_container_that_changes(form: Form) -> None:
    """What comes back as it was given holds the original, so the other argument must be it too."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        hidden = x * 1.0

        def run(seen: list[Any], h: torch.Tensor) -> torch.Tensor:
            seen.append(None)
            return torch.sin(h * (2.0 if seen[0] is h else 3.0))

        apply(run, [hidden], hidden).sum().backward()
        return [x.grad]

    compare(form, pattern)
