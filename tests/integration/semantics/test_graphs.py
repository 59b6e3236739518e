"""Graphs that are used twice, in another order, only in part, or never."""

import concurrent.futures
import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

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


@pytest.mark.parametrize("form", ALL, ids=str)
def test_backward_twice_with_retain_graph(form: Form) -> None:
    """A blob must not be deleted by its first use; gradients are doubled, then all is free."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        output = apply(module, apply(module, x * 1.0)).sum()
        output.backward(retain_graph=True)
        output.backward()
        return grads(x, module)

    compare(form, pattern)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_backward_twice_without_retain_graph(form: Form) -> None:
    """torch's own error, not one about a file or a key."""
    with form.around():
        output = form.apply(torch.sin, leaf() * 1.0).sum()
        output.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            output.backward()


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_double_backward(form: Form) -> None:
    """A gradient penalty: the second-order part must not be dropped in silence."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        output = apply(torch.sin, apply(module, x * 1.0))
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (grad**2).sum().backward()
        return [grad.detach(), *grads(x, module)]

    compare(form, pattern)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_backward_with_create_graph(form: Form) -> None:
    """The same through .backward(create_graph=True)."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x = leaf()
        apply(torch.sin, x * 1.0).sum().backward(create_graph=True, inputs=[x])
        first = x.grad
        assert first is not None
        (second,) = torch.autograd.grad((first**2).sum(), x)
        x.grad = None
        return [first.detach(), second]

    compare(form, pattern)


def test_double_backward_is_refused_by_disco() -> None:
    """The reentrant form drops the second-order gradient in silence."""
    output = disco_client.Disco.apply(torch.sin, leaf() * 1.0)
    with pytest.raises(disco_client.UnsupportedCall, match="twice"):
        output.sum().backward(create_graph=True)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_autograd_grad(form: Form) -> None:
    """Gradients of chosen inputs alone."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        output = apply(module, x * 1.0)
        return list(torch.autograd.grad(output.sum(), [x, *module.parameters()]))

    compare(form, pattern)


def test_autograd_grad_is_refused_by_disco() -> None:
    """As torch's reentrant form refuses it; the text names what can."""
    x = leaf()
    output = disco_client.Disco.apply(torch.sin, x * 1.0)
    with pytest.raises(disco_client.UnsupportedCall, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(output.sum(), x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_no_grad_and_eval_cost_nothing() -> None:
    """Validation and generation: nothing is saved, and no daemon is asked for."""
    module = layer()
    for form in ALL:
        with form.around(), torch.no_grad():
            form.apply(module.train(), leaf())
    for form in RECOMPUTING:
        with form.around(), torch.inference_mode():
            form.apply(module.eval(), torch.randn(64, 32))
    assert disco_client.stats().saved_blobs == 0


@pytest.mark.parametrize("form", ALL, ids=str)
def test_steps_without_backward_and_unused_branches(form: Form) -> None:
    """A skipped step, then a branch that the loss does not use, then a normal step."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, one, two = leaf(), layer(), layer()
        skipped = apply(one, x * 1.0)
        del skipped
        used, unused = apply(one, x * 1.0), apply(two, x * 1.0)
        used.sum().backward()
        del used, unused
        first = [g.clone() if g is not None else None for g in grads(x, one, two)]
        apply(two, apply(one, x * 1.0)).sum().backward()
        return first + grads(x, one, two)

    gc.disable()
    try:
        compare(form, pattern)
    finally:
        gc.enable()


def test_backward_outside_of_the_block() -> None:
    """State that is cleared when the block ends would be missed here."""
    x, module = leaf(), layer()
    torch.manual_seed(1)
    module(x * 1.0).sum().backward()
    expected = grads(x, module)
    x.grad = None
    module.zero_grad()
    torch.manual_seed(1)
    with disco_client.offload():
        loss = module(x * 1.0).sum()
    assert disco_client.stats().live_blobs > 0
    loss.backward()
    assert all(
        torch.equal(one, other) for one, other in zip(grads(x, module), expected, strict=True)
    )
    assert disco_client.stats().live_blobs == 0


class Boom(Exception):
    """The user's own error."""


@pytest.mark.parametrize("form", ALL, ids=str)
def test_exception_in_forward_leaves_nothing(form: Form) -> None:
    """The user's exception arrives unchanged, and its graph is gone with it."""
    module = layer()

    def run(h: torch.Tensor) -> torch.Tensor:
        module(h)
        raise Boom("forward")

    gc.disable()
    try:
        with form.around(), pytest.raises(Boom, match=r"^forward$") as caught:
            form.apply(run, form.apply(module, leaf() * 1.0))
        caught.value.__traceback__ = None
        del caught
        assert disco_client.stats().live_blobs == 0
    finally:
        gc.enable()
    with form.around():
        form.apply(module, leaf() * 1.0).sum().backward()


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_exception_in_the_recomputation_and_another_try(form: Form) -> None:
    """Out of memory in backward, then half the batch: as find_executable_batch_size does it."""
    module, calls = layer(), []

    def run(h: torch.Tensor) -> torch.Tensor:
        calls.append(len(h))
        if calls == [64, 64]:
            raise Boom("no memory for 64")
        return module(h)

    with form.around():
        output = form.apply(run, leaf() * 1.0)
        with pytest.raises(Boom, match=r"^no memory for 64$") as caught:
            output.sum().backward()
        caught.value.__traceback__ = None
        del output, caught
        gc.collect()
        assert disco_client.stats().live_blobs == 0

    def retried(apply: Apply) -> list[torch.Tensor | None]:
        module.zero_grad()
        x = leaf(32)
        apply(run, x * 1.0).sum().backward()
        return [g.clone() if g is not None else None for g in grads(x, module)]

    compare(form, retried)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("form", ALL, ids=str)
def test_several_forwards_before_one_backward(form: Form) -> None:
    """Micro-batches and preference pairs: nothing of one may be kept where another's is."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        one, two, reference = layer(), layer(), layer().requires_grad_(False)
        keys = set(vars(one))
        leaves = [leaf() for _ in range(4)]
        losses = []
        for x in leaves:
            policy = apply(two, apply(one, x * 1.0)).sum()
            with torch.no_grad():
                target = apply(reference, x * 1.0).sum()
            losses.append(policy * torch.sigmoid(policy.detach() - target))
        assert set(vars(one)) == keys
        torch.stack(losses).sum().backward()
        return grads(*leaves, one, two)

    compare(form, pattern)


@pytest.mark.parametrize("arena", ["4MiB", "1MiB"])
@pytest.mark.parametrize("form", ALL, ids=str)
def test_backward_in_another_order(
    form: Form, arena: str, attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """A wrong guess of what is needed next may cost time, nothing else; also from disk."""
    disco_client.close()
    attach_to(shared_daemon, arena=arena, min_bytes="4KiB")

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        module = layer()
        leaves = [torch.randn(2048, 32, requires_grad=True) for _ in range(3)]
        results = []
        for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
            losses = []
            for x in leaves:
                hidden = x * 1.0
                for _ in range(4):
                    hidden = apply(module, hidden)
                losses.append(hidden.sum())
            for index in order:
                losses[index].backward()
            del losses
            results += [g.clone() for g in grads(*leaves, module) if g is not None]
        return results

    compare(form, pattern)


@pytest.mark.parametrize("form", [OFFLOAD, CHECKPOINT], ids=str)
def test_policy_gradient_graph(form: Form) -> None:
    """Saved tensors that are needed in an order unlike the reverse of their saving."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, actor, critic = leaf(), layer(), layer()
        hidden = x * 1.0
        logits, value = apply(actor, hidden), apply(critic, hidden)
        chosen = torch.distributions.Categorical(logits=logits).log_prob(torch.zeros(64))
        advantage = (value.mean(-1) - value.mean(-1).detach().mean()).detach()
        actor_loss, critic_loss = -(chosen * advantage).mean(), value.pow(2).mean()
        critic_loss.backward(retain_graph=True)
        actor_loss.backward()
        return grads(x, actor, critic)

    compare(form, pattern)


def inner_counts(apply: Apply, inner: Apply) -> tuple[list[torch.Tensor | None], int]:
    """Nested calls: the gradients, and how often the inner function ran."""
    torch.manual_seed(0)
    x, one, two = leaf(), layer(), layer()
    runs = []

    def deep(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return two(h)

    output = apply(lambda h: inner(deep, one(h)), x * 1.0)
    output.sum().backward()
    return grads(x, one, two), len(runs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_nested_calls_are_torchs(form: Form) -> None:
    """What is recomputed as a whole stores nothing inside, and recomputes as often as torch."""
    expected, runs = inner_counts(form.oracle, form.oracle)
    with form.around():
        got, counted = inner_counts(form.apply, form.apply)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert counted == runs
    assert disco_client.stats().saved_blobs == 1


@contextlib.contextmanager
def both(form: Form) -> Iterator[None]:
    with form.around(), disco_client.offload():
        yield


@pytest.mark.parametrize("inner", RECOMPUTING, ids=str)
def test_calls_inside_of_a_block(inner: Form) -> None:
    """offload() around a checkpointed layer: its input is stored, and no more, also in backward."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        apply(module, apply(module, x * 1.0)).sum().backward()
        return grads(x, module)

    compare(dataclasses.replace(inner, around=lambda: both(inner)), pattern)
    assert disco_client.stats().saved_blobs == 2


@pytest.mark.parametrize("outer", RECOMPUTING, ids=str)
def test_a_block_inside_of_a_call(outer: Form) -> None:
    """offload() inside the function of a checkpointed call: unusual, and exact."""

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()

        def run(h: torch.Tensor) -> torch.Tensor:
            with disco_client.offload():
                return module(h)

        apply(run, x * 1.0).sum().backward()
        return grads(x, module)

    def plain(function: Callable[..., Any], *args: Any) -> Any:
        return outer.oracle(function, *args)

    compare(dataclasses.replace(outer, oracle=plain), pattern)


def test_torchs_own_checkpoint_inside_of_a_block() -> None:
    """The boundary inputs that torch saves are what the block offloads; parameters are not."""
    form = Form("torch", CHECKPOINT.oracle, CHECKPOINT.oracle, disco_client.offload)

    def pattern(apply: Apply) -> list[torch.Tensor | None]:
        x, module = leaf(), layer()
        hidden = x * 1.0
        for _ in range(3):
            hidden = apply(module, hidden)
        hidden.sum().backward()
        return grads(x, module)

    compare(form, pattern)
    assert disco_client.stats().saved_bytes == 3 * 64 * 32 * 4


def test_leaving_the_block_from_a_backward_hook() -> None:
    """The engine puts the hooks back after backward: they must do nothing any more, nor crash."""
    module = layer()

    def train(block: disco_client.offload | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module.zero_grad()
        x = leaf()
        if block is not None:
            block.__enter__()
        hidden = module(x * 1.0)
        if block is not None:
            hidden.register_hook(lambda _: block.__exit__(None, None, None))
        hidden.sum().backward()
        return [grad.clone() for grad in grads(x, module) if grad is not None]

    def leave_and_go_on() -> list[torch.Tensor]:
        got = train(disco_client.offload())
        saved = disco_client.stats().saved_blobs
        train(None)
        assert disco_client.stats().saved_blobs == saved > 0
        return got

    expected = train(None)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # whose hooks end with it
        got = thread.submit(leave_and_go_on).result()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", ALL, ids=str)
def test_gradient_hook_of_a_shared_weight(form: Form) -> None:
    """DDP and fused optimizers count these: as often as with the torch form, no more."""

    def count(apply: Apply) -> int:
        x, module = leaf(), nn.Linear(32, 32)
        fired: list[Any] = []
        module.weight.register_hook(lambda grad: fired.append(grad))
        apply(module, apply(module, x * 1.0)).sum().backward()
        return len(fired)

    expected = count(form.oracle)
    with form.around():
        assert count(form.apply) == expected


def test_decorated_function() -> None:
    """Each call of a decorated function is a block of its own, with its name and result kept."""

    @disco_client.offload(min_bytes="4KiB")
    def forward(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
        """Doc."""
        return module(h).sum()

    assert forward.__name__ == "forward"
    x, module = leaf(), layer()
    for _ in range(2):
        forward(module, x * 1.0).backward()
    assert disco_client.stats().saved_blobs > 0
    assert disco_client.stats().live_blobs == 0


def test_generators_and_coroutines_are_not_decorated() -> None:
    """Their body runs after the call: the block would cover nothing, in silence."""

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    for function in (generator, coroutine):
        with pytest.raises(disco_client.UsageError, match=function.__name__):
            disco_client.offload()(function)


def test_one_block_used_again_nested_and_after_an_error() -> None:
    """Trainers keep the context in an attribute and enter it at every step."""
    block, module = disco_client.offload(), layer()
    for _ in range(3):
        with block, block:
            loss = module(leaf() * 1.0).sum()
        loss.backward()
        with pytest.raises(Boom), block:
            raise Boom
    saved = disco_client.stats().saved_blobs
    module(leaf() * 1.0).sum().backward()
    assert disco_client.stats().saved_blobs == saved


def test_block_limits() -> None:
    """min_bytes is per block; a malformed one, or one in the model's place, is named at once."""
    x = leaf()
    with disco_client.offload(min_bytes="1MiB"):
        torch.sin(x * 1.0).sum().backward()
    assert disco_client.stats().saved_blobs == 0
    with disco_client.offload(min_bytes=64):
        torch.sin(torch.ones(16, requires_grad=True) * 1.0).sum().backward()
    assert disco_client.stats().saved_blobs == 1
    with pytest.raises(ValueError, match="min_bytes"):
        disco_client.offload(min_bytes="much")
    size: Any = 5
    with pytest.raises(TypeError, match=r"torch\.nn\.Module.*min_bytes="):
        disco_client.offload(size)
