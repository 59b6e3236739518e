"""Lightning: the callback offloads for the time of fit, in both trees of classes."""

import copy
import gc
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.utils.checkpoint
from lightning.fabric.strategies import fsdp
from torch import nn

import disco_client
from disco_client.patches import lightning as lightning_patch
from disco_client.patches import torch as torch_patch
from disco_client.patches.lightning import DiscodCallback
from tests.helpers.daemon import Daemon
from tests.helpers.pages import run_page
from tests.helpers.plain_script import LAYERS, Model, train

BATCHES = 4
TREES = [lightning.pytorch, pytorch_lightning]

pytestmark = [
    # Lightning's advice on loading data and logging, of no use for four batches.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than"),
    # Lightning's own use of what torch has deprecated.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed"),
]


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # which the callback sets, to be undone
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    yield
    assert not torch_patch.patch.enabled, "a test left the patch on"
    gc.collect()


@pytest.fixture
def attached(shared_daemon: Daemon, attach_to: Callable[..., None]) -> None:
    attach_to(shared_daemon, arena="16MiB")


def module(tree: Any, *, recompute: bool = True, automatic: bool = True, fail: bool = False) -> Any:
    """A LightningModule of ``tree`` around the plain model."""

    class Module(tree.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.net = Model(recompute)
            self.copied: Any = None

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if fail:
                raise ValueError("the step failed")
            loss = self.net(batch).square().mean()
            if not automatic:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            self.copied = copy.deepcopy(self.net)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Module()


def batches() -> torch.utils.data.DataLoader[torch.Tensor]:
    data = torch.randn(BATCHES, 1024, 256, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=None)


def fit(tree: Any, model: Any, *callbacks: Any, **settings: Any) -> Any:
    """Fit an epoch; the trainer."""
    torch.manual_seed(2)
    trainer = tree.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(model, batches())
    return trainer


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
@pytest.mark.parametrize("settings", [{}, {"automatic": False}], ids=["automatic", "manual"])
def test_inputs_of_checkpoints(attached: None, tree: Any, settings: dict[str, Any]) -> None:
    """Else the callback would train other weights, offload nothing, or stay on after fit."""
    plain, ours = module(tree, **settings), module(tree, **settings)
    accumulate = {} if settings else {"accumulate_grad_batches": 2}
    fit(tree, plain, **accumulate)
    original = torch.utils.checkpoint.CheckpointFunction
    fit(tree, ours, DiscodCallback(), **accumulate)
    assert same_weights(plain, ours)
    assert disco_client.stats().saved_blobs == LAYERS * BATCHES
    assert disco_client.stats().live_blobs == 0
    assert torch.utils.checkpoint.CheckpointFunction is original


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
@pytest.mark.parametrize("settings", [{}, {"automatic": False}], ids=["automatic", "manual"])
def test_all_saved_activations(attached: None, tree: Any, settings: dict[str, Any]) -> None:
    """Else a model that does not recompute would stay in memory, or the strategy stay changed."""
    plain = module(tree, recompute=False, **settings)
    ours = module(tree, recompute=False, **settings)
    fit(tree, plain)
    trainer = fit(tree, ours, DiscodCallback(saved="all"))
    assert same_weights(plain, ours)
    # Of each layer the inputs of the linear map and of GELU; dropout's mask is under 1 MiB.
    assert disco_client.stats().saved_blobs >= 2 * LAYERS * BATCHES
    assert disco_client.stats().live_blobs == 0
    assert "training_step" not in vars(trainer.strategy)


@pytest.mark.parametrize("saved", ["inputs", "all"])
def test_an_exception_ends_it_too(attached: None, saved: Any) -> None:
    """Else a failed fit would leave the process patched."""
    callback = DiscodCallback(saved)
    model = module(lightning.pytorch, fail=True)
    with pytest.raises(ValueError, match="the step failed"):
        fit(lightning.pytorch, model, callback)
    assert not torch_patch.patch.enabled
    assert "training_step" not in vars(model.trainer.strategy)


def test_a_patch_that_was_on_stays_on(attached: None) -> None:
    """Else fit would end the offloading that the script began, or warn of what is well."""
    disco_client.patch_torch()
    try:
        fit(lightning.pytorch, module(lightning.pytorch), DiscodCallback())
        assert torch_patch.patch.enabled
        assert disco_client.stats().saved_blobs == LAYERS * BATCHES
    finally:
        torch_patch.disable()


def test_no_warning_before_the_closure_has_run(
    attached: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning runs forward and backward inside of the optimizer's step: no proof before that."""
    disco_client.patch_torch()
    try:
        fit(lightning.pytorch, module(lightning.pytorch))
    finally:
        torch_patch.disable()
    assert [r for r in caplog.records if r.name.startswith("disco_client")] == []


@pytest.mark.parametrize("saved", ["inputs", "all"])
def test_nothing_to_offload_is_said_once(
    shared_daemon: Daemon, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else one would believe in an offload that never was."""
    disco_client.connect(shared_daemon.socket_dir, arena="2MiB", min_bytes="16MiB")
    try:
        with caplog.at_level(logging.WARNING, "disco_client"):
            model = module(lightning.pytorch, recompute=False)
            fit(lightning.pytorch, model, DiscodCallback(saved))
    finally:
        disco_client.close()
    (record,) = [r for r in caplog.records if r.name.startswith("disco_client")]
    reason = "min_bytes is 16.0 MiB" if saved == "all" else "no checkpointed call reached discod"
    assert reason in record.getMessage()


def test_checkpoints_and_copies_are_as_without(attached: None, tmp_path: Path) -> None:
    """Else a run could not be resumed without discod, or a model not be saved while it is on."""
    saved = {}
    for name, callbacks in (("plain", []), ("ours", [DiscodCallback(saved="all")])):
        model = module(lightning.pytorch)
        trainer = fit(lightning.pytorch, model, *callbacks)
        trainer.save_checkpoint(tmp_path / name)
        saved[name] = torch.load(tmp_path / name, weights_only=False)
        assert model.copied.state_dict().keys() == model.net.state_dict().keys()
    assert saved["plain"].keys() == saved["ours"].keys()
    assert saved["plain"]["callbacks"] == saved["ours"]["callbacks"]
    assert saved["plain"]["state_dict"].keys() == saved["ours"]["state_dict"].keys()
    pickle.dumps(DiscodCallback())  # as strategies do that spawn processes


def test_the_page(attached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the page has one copy would not run, or offload nothing."""
    monkeypatch.chdir(tmp_path)
    run_page("frameworks/lightning.md", model=module(lightning.pytorch), batches=batches())
    assert disco_client.stats().saved_blobs == LAYERS * BATCHES


def test_layers_wrapped_by_the_fsdp_strategy(attached: None) -> None:
    """Else the strategy's activation_checkpointing_policy would stay in memory."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(recompute=False))
        kwargs = fsdp._activation_checkpointing_kwargs(None, {nn.Sequential})
        fsdp._setup_activation_checkpointing(models[-1], kwargs)
    gradients = []
    for model, on in zip(models, (False, True), strict=True):
        if on:
            disco_client.patch_torch()
        torch.manual_seed(3)
        gradients.append(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    torch_patch.disable()
    assert all(map(torch.equal, *gradients))
    assert disco_client.stats().saved_blobs == 2 * LAYERS


def test_ranks_of_lightnings_own_launcher_share_the_ram(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first rank would take all of the daemon's RAM, and the others would have none."""
    daemon = start_daemon("--ram", "64MiB")
    monkeypatch.setenv("DISCOD_SOCKET_DIR", str(daemon.socket_dir))
    monkeypatch.delenv("DISCOD_ARENA", raising=False)
    callback, trainer = DiscodCallback(), SimpleNamespace(num_devices=2)
    callback.on_fit_start(trainer, None)
    try:
        with disco_client.offload():  # attaches
            assert disco_client.stats().arena_bytes == 32 << 20
    finally:
        callback.on_fit_end(trainer, None)
        disco_client.close()


def test_the_class_is_of_the_tree_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Lightning would not take the callback for one, or both packages would be imported."""
    assert issubclass(DiscodCallback, lightning.pytorch.Callback)
    assert issubclass(DiscodCallback, pytorch_lightning.Callback)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert lightning_patch._callback_classes() == (pytorch_lightning.Callback,)
    with pytest.raises(disco_client.UsageError, match='neither "inputs" nor "all"'):
        DiscodCallback("input")  # type: ignore[arg-type]
