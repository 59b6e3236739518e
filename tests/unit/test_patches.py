"""Patches: exact restoration, a proof that something was moved, and the line at the end."""

import logging
from typing import Any

import pytest
import torch

from disco_client import summary
from disco_client.errors import UsageError
from disco_client.patches.proof import Proof
from disco_client.patches.replacing import Patch, Replacement
from disco_client.stats import Stats
from disco_client.tally import tally


class Base:
    """Has what a subclass inherits."""

    @staticmethod
    def static(value: int) -> int:
        return value

    def inherited(self) -> int:
        return 1


class Owner(Base):
    """The class that is patched."""

    def own(self) -> int:
        return 1


def patch(*names: str, owner: Any = Owner) -> Patch:
    def double(original: Any) -> Any:
        return lambda *args: 2 * original(*args)

    return Patch("test", lambda: [Replacement(owner, n, double) for n in names], "Is it on?")


def test_attributes_are_replaced_once_and_put_back_exactly() -> None:
    """A patch that is applied twice, or leaves its own object behind, changes the program."""
    before = dict(vars(Owner))
    one = patch("own", "inherited")
    one.enable()
    one.enable()
    assert one.enabled
    assert (Owner().own(), Owner().inherited()) == (2, 2)
    one.disable()
    one.disable()
    assert not one.enabled
    assert dict(vars(Owner)) == before
    assert (Owner().own(), Owner().inherited()) == (1, 1)


def test_a_static_method_stays_one() -> None:
    """The descriptor is put back, not what looking it up gives."""
    raw = vars(Base)["static"]
    one = patch("static", owner=Base)
    one.enable()
    one.disable()
    assert vars(Base)["static"] is raw


def test_an_unknown_attribute_changes_nothing() -> None:
    """Another version of the framework: an error that names the attribute, and no half of it."""
    before = dict(vars(Owner))
    with pytest.raises(UsageError, match="has no misspelt"):
        patch("own", "misspelt").enable()
    assert dict(vars(Owner)) == before


def test_a_replacement_that_nobody_calls_changes_nothing() -> None:
    """A framework may keep an old name that it does not use any more; nothing would be moved."""
    before = dict(vars(Owner))
    replace = Replacement(Owner, "own", lambda original: original)
    unused = Patch("test", lambda: [replace], "", works=lambda: False)
    with pytest.raises(UsageError, match="does not call what was replaced"):
        unused.enable()
    assert not unused.enabled
    assert dict(vars(Owner)) == before


def test_another_patch_on_top_is_not_torn_out() -> None:
    """Restoring the original would undo it as well."""
    one, two = patch("own"), patch("own")
    one.enable()
    two.enable()
    assert Owner().own() == 4
    with pytest.raises(UsageError, match=r"Owner\.own was replaced by something else"):
        one.disable()
    assert Owner().own() == 4
    two.disable()
    one.disable()
    assert Owner().own() == 1


def step() -> None:
    """What every training does after its first backward."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_proof_warns_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A patch that moves nothing, silently, is worse than none."""
    proof = Proof("test", "Is checkpointing on?")
    proof.begin()
    step()
    step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "test patch" in record.message
    assert record.message.endswith("no checkpointed call reached discod. Is checkpointing on?")


def test_proof_is_silent_when_something_was_moved(caplog: pytest.LogCaptureFixture) -> None:
    """And when it was ended before the step."""
    proof = Proof("test", "")
    proof.begin()
    tally.calls += 1
    tally.offloaded += 1
    step()
    proof.begin()
    proof.end()
    step()
    assert caplog.records == []


def test_proof_names_sizes_and_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """Calls came, but everything was too small or of a kind that cannot be moved."""
    tally.largest_small_bytes = 2**40  # of something before this patch
    proof = Proof("test", "")
    proof.begin()
    tally.calls += 1
    tally.largest_small_bytes, tally.its_min_bytes = 4096, 2**20
    tally.unsupported.add("Float9Tensor")
    proof.check()
    (record,) = caplog.records
    for part in ("4.0 KiB", "min_bytes is 1.0 MiB", "DISCOD_MIN_BYTES", "Float9Tensor"):
        assert part in record.message
    proof.begin()
    tally.calls += 1
    proof.check()
    assert "in memory anyway" in caplog.records[-1].message


def test_summary_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, for one rank of a node, only where it is wanted, and never about nothing."""
    stats = Stats(
        saved_blobs=192,
        saved_bytes=3 * 2**30,
        written_bytes=2**30,
        arena_bytes=2**31,
        attached_seconds=3600.0,
    )
    monkeypatch.delenv("DISCOD_SUMMARY", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(summary, "_shown", False)
    summary.finish(stats)
    assert capsys.readouterr().err == ""
    summary.show_at_end()
    summary.finish(Stats())
    assert capsys.readouterr().err == ""
    summary.finish(stats)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    written = "1.0 GiB written to disk (24.0 GiB a day)"
    for part in ("192 tensors", "3.0 GiB saved", written, "2.0 GiB arena"):
        assert part in line
    monkeypatch.setenv("LOCAL_RANK", "1")
    summary.finish(stats)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DISCOD_SUMMARY", "0")
    summary.finish(stats)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(summary, "_shown", False)
    monkeypatch.setenv("DISCOD_SUMMARY", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    summary.finish(stats)
    assert "rank 0 of 8" in capsys.readouterr().err
