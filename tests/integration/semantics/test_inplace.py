"""Changes in place: never gradients of bytes that came later, never twice in silence."""

import os
import signal
from collections.abc import Callable

import pytest
import torch

import disco_client
from tests.helpers.daemon import Daemon
from tests.helpers.forms import (
    ALL,
    CHECKPOINT,
    NOT_REENTRANT,
    OFFLOAD,
    RECOMPUTING,
    WIDTH,
    Form,
    leaf,
)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_input_changed_after_the_call(form: Form) -> None:
    """torch raises in backward; discod has copied the value of the call, and gives its gradient."""
    x = leaf()
    hidden = x * 1.0
    with form.around():
        output = form.apply(torch.sin, hidden)
    expected = torch.cos(x.detach())
    with torch.no_grad():
        hidden.fill_(float("nan"))
    output.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("form", NOT_REENTRANT, ids=str)
def test_input_changed_while_the_daemon_cannot_write(
    form: Form, attach_to: Callable[..., None], shared_daemon: Daemon
) -> None:
    """The bytes that reach the disk are those of the call, however late they are written."""
    disco_client.close()
    attach_to(shared_daemon, arena="2MiB", min_bytes="4KiB")
    leaves = [torch.randn(256, 256, requires_grad=True) for _ in range(16)]
    outputs, expected = [], []
    os.kill(shared_daemon.pid, signal.SIGSTOP)
    try:
        with form.around():
            for x in leaves[:6]:
                hidden = x * 1.0
                outputs.append(form.apply(torch.sin, hidden))
                expected.append(torch.cos(x.detach()))
                with torch.no_grad():
                    hidden.fill_(float("nan"))
    finally:
        os.kill(shared_daemon.pid, signal.SIGCONT)
    with form.around():
        for x in leaves[6:]:
            hidden = x * 1.0
            outputs.append(form.apply(torch.sin, hidden))
            expected.append(torch.cos(x.detach()))
            with torch.no_grad():
                hidden.fill_(float("nan"))
    torch.stack([output.sum() for output in outputs]).sum().backward()
    for x, right in zip(leaves, expected, strict=True):
        assert torch.equal(x.grad, right)
    assert disco_client.stats().written_bytes > 0


@pytest.mark.parametrize("form", RECOMPUTING, ids=str)
def test_input_changed_by_the_function(form: Form) -> None:
    """Its change would be applied twice; it is refused at once, with what to do."""
    with form.around(), pytest.raises(RuntimeError, match=r"inplace|in-place"):
        form.apply(lambda h: torch.sin(h.mul_(2)), leaf() * 1.0).sum().backward()
    assert disco_client.stats().live_blobs == 0


def test_the_refusal_names_the_function() -> None:
    """A name of discod's own would send its reader to the wrong place."""

    def writes(h: torch.Tensor) -> torch.Tensor:
        return h.mul_(2)

    with pytest.raises(disco_client.UnsupportedCall, match=r"locals>\.writes"):
        disco_client.Disco.apply(writes, leaf() * 1.0)


def test_input_changed_by_the_function_in_a_block() -> None:
    """offload() runs it once: the gradients are exact, as without discod."""
    x = leaf()
    with disco_client.offload():
        torch.sin((x * 1.0).mul_(2)).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach() * 2) * 2)


def test_output_changed_after_it_was_saved() -> None:
    """exp saves its own output; a later change of it must not reach the gradient."""
    x = leaf()
    with disco_client.offload():
        y = torch.exp(x * 1.0)
        z = y.clone()
        y.mul_(3)
        z.sum().backward()
    assert torch.equal(x.grad, torch.exp(x.detach()))
    assert disco_client.stats().live_blobs == 0


@pytest.mark.parametrize("form", [CHECKPOINT, OFFLOAD], ids=str)
def test_small_tensor_changed_later_is_refused_as_by_torch(form: Form) -> None:
    """Hooks switch torch's own check off; it must not be lost for what stays in memory."""
    small = torch.ones(WIDTH, requires_grad=True) * 1.0
    with form.around():
        output = form.apply(lambda h, s: torch.sin(h) * torch.sin(s), leaf() * 1.0, small)
    with torch.no_grad():
        small.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("form", ALL, ids=str)
def test_change_by_an_optimizer_between_forward_and_backward(form: Form) -> None:
    """A weight that stays in memory and was changed: torch's error, or torch's result."""
    x, weight = leaf(), torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def outcome(apply: Callable[..., torch.Tensor]) -> str | torch.Tensor:
        x.grad = weight.grad = None
        output = apply(lambda h: torch.sin(h @ weight), x * 1.0)
        with torch.no_grad():
            weight.add_(1)
        try:
            output.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" if "inplace" in str(error) else str(error)
        finally:
            with torch.no_grad():
                weight.sub_(1)
        return x.grad

    expected = outcome(form.oracle)
    with form.around():
        got = outcome(form.apply)
    if isinstance(expected, str):
        assert got == expected
    else:
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, expected)
