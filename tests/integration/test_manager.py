"""``DiskOffloadManager``: every tensor back exactly, through RAM and through the disk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import disco_client
from disco_client import DiskOffloadManager

Attach = Callable[..., None]
MIB = 1 << 20


def blob(seed: int, nbytes: int = MIB) -> torch.Tensor:
    return torch.randint(
        0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_more_than_the_arena_comes_back_exactly(attach: Attach) -> None:
    """32 MiB through an arena of 4: nearly all of it has to go to the disk and back."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handles = [manager.save_tensor(blob(i)) for i in range(32)]
    for i in reversed(range(32)):
        assert torch.equal(manager.load_tensor(handles[i]), blob(i))
        manager.cleanup_tensor(handles[i])
    stats = disco_client.stats()
    assert stats.live_blobs == 0
    assert stats.written_bytes >= 28 * MIB
    assert stats.read_bytes >= 28 * MIB


def test_any_order_of_loads(attach: Attach) -> None:
    """First in first out is the worst order for the policy, and must still be right."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handles = [manager.save_tensor(blob(i)) for i in range(16)]
    for _ in range(2):
        for i in range(16):
            assert torch.equal(manager.load_tensor(handles[i]), blob(i))


def test_the_default_device_is_another(attach: Attach) -> None:
    """``torch.set_default_device("cuda")`` is not for what discod makes for itself."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handle = manager.save_tensor(blob(1))
    with torch.device("meta"):
        again = manager.save_tensor(manager.load_tensor(handle))
        loaded = manager.load_tensor(again)
    assert torch.equal(loaded, blob(1))


def test_sizes_around_pages_and_stripes(attach: Attach) -> None:
    """The tail of a blob that is no whole page must not be lost under O_DIRECT."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    sizes = [1, 2, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB + 1]
    handles = [manager.save_tensor(blob(n, n)) for n in sizes]
    fillers = [manager.save_tensor(blob(i)) for i in range(8)]
    for size, handle in zip(sizes, handles, strict=True):
        assert torch.equal(manager.load_tensor(handle), blob(size, size))
    assert disco_client.stats().read_bytes > 0
    del fillers


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_dtypes_and_views_through_the_disk(attach: Attach, dtype: torch.dtype) -> None:
    """dtype, shape, strides and device are those of the tensor that was saved."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    base = torch.randint(0, 2, (256, 512)).to(dtype)
    views = [
        base,
        base.t(),
        base[1:],
        base[:, ::2],
        base[:1].expand(64, 512),
        base[3, 5],
        base[:0],
    ]
    handles = [manager.save_tensor(view) for view in views]
    fillers = [manager.save_tensor(blob(i)) for i in range(8)]
    for view, handle in zip(views, handles, strict=True):
        loaded = manager.load_tensor(handle)
        assert loaded.dtype is dtype
        assert loaded.stride() == view.stride()
        assert loaded.device == view.device
        assert torch.equal(loaded.to(torch.complex64), view.to(torch.complex64))
    del fillers


def test_requires_grad_is_the_saved_tensors_own(attach: Attach) -> None:
    """The flag comes back, and integer tensors are not forced to have one."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    assert manager.load_tensor(manager.save_tensor(torch.ones(3, requires_grad=True))).requires_grad
    assert not manager.load_tensor(manager.save_tensor(torch.ones(3))).requires_grad
    assert not manager.load_tensor(manager.save_tensor(torch.arange(3))).requires_grad


def test_a_loaded_tensor_outlives_its_handle(attach: Attach) -> None:
    """Its slot must not be reused while the zero-copy view is alive."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    loaded = manager.load_tensor(manager.save_tensor(blob(1)))
    for i in range(100):
        manager.load_tensor(manager.save_tensor(blob(i)))
    assert torch.equal(loaded, blob(1))
    disco_client.close()
    assert torch.equal(loaded, blob(1))


def test_source_may_change_at_once(attach: Attach) -> None:
    """The bytes are those at the call, whatever becomes of the source."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    source = blob(1)
    handle = manager.save_tensor(source)
    source.zero_()
    assert torch.equal(manager.load_tensor(handle), blob(1))


def test_changing_a_loaded_tensor_never_reaches_a_later_load(attach: Attach) -> None:
    """Zero-copy must not turn an in-place operation of the user into other bytes later."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    in_ram = manager.save_tensor(blob(1))
    loaded = manager.load_tensor(in_ram)
    loaded[:10].add_(1)
    with pytest.raises(disco_client.BlobModified, match="changed in place"):
        manager.load_tensor(in_ram)
    del loaded
    with pytest.raises(disco_client.BlobModified):
        manager.load_tensor(in_ram)


def test_changing_a_tensor_loaded_from_disk_reads_it_again(attach: Attach) -> None:
    """With a good copy on disk, the changed bytes in RAM are simply given up."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handles = [manager.save_tensor(blob(i)) for i in range(8)]
    loaded = manager.load_tensor(handles[0])
    loaded.add_(1)
    del loaded
    assert torch.equal(manager.load_tensor(handles[0]), blob(0))


def test_handles_are_strings_and_keep_the_blob(attach: Attach) -> None:
    """A handle works as a plain string too; without the handle object the blob is released."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handle = manager.save_tensor(blob(1))
    name = str(handle)[:]
    assert isinstance(handle, str)
    assert torch.equal(manager.load_tensor("".join(name)), blob(1))
    name = "".join(list(handle))
    del handle
    with pytest.raises(disco_client.HandleReleased, match=name):
        manager.load_tensor(name)
    assert disco_client.stats().live_blobs == 0


def test_cleanup_touches_only_its_own_manager(attach: Attach) -> None:
    """Actor and critic in one process: cleanup of one must not lose the other's blobs."""
    attach(arena="4MiB")
    actor, critic = DiskOffloadManager(), DiskOffloadManager()
    mine, other = actor.save_tensor(blob(1)), critic.save_tensor(blob(2))
    actor.cleanup()
    with pytest.raises(disco_client.HandleReleased):
        actor.load_tensor(mine)
    assert torch.equal(critic.load_tensor(other), blob(2))
    with pytest.raises(disco_client.HandleReleased):
        actor.load_tensor(other)


def test_wait_for_save(attach: Attach) -> None:
    """It returns when the save needs the disk no more, and the blob can then be loaded."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handles = [manager.save_tensor(blob(i)) for i in range(8)]
    for i, handle in enumerate(handles):
        manager.wait_for_save(handle, timeout=10)
        assert torch.equal(manager.load_tensor(handle), blob(i))


def test_blob_larger_than_the_arena(attach: Attach) -> None:
    """It can never fit: both sizes and the setting are named, and the session goes on."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    with pytest.raises(disco_client.BlobTooLarge, match=r"DISCOD_ARENA"):
        manager.save_tensor(blob(1, 5 * MIB))
    assert torch.equal(manager.load_tensor(manager.save_tensor(blob(1))), blob(1))


def test_arena_full_of_loaded_tensors(attach: Attach) -> None:
    """Loaded tensors that are kept alive fill the arena: an error instead of a hang."""
    attach(arena="4MiB")
    manager = DiskOffloadManager()
    handles = [manager.save_tensor(blob(i)) for i in range(8)]
    kept: list[Any] = []
    with pytest.raises(disco_client.ArenaFull):
        kept.extend(manager.load_tensor(handle) for handle in handles)
    kept.clear()
    assert torch.equal(manager.load_tensor(handles[0]), blob(0))


def test_prefetch_size_bounds_what_is_read_ahead(attach: Attach) -> None:
    """With prefetch_size=0 nothing is read ahead: every load from disk is a miss."""
    attach(arena="4MiB")
    manager = DiskOffloadManager(prefetch_size=0)
    handles = [manager.save_tensor(blob(i)) for i in range(12)]
    for i in reversed(range(12)):
        assert torch.equal(manager.load_tensor(handles[i]), blob(i))
        manager.cleanup_tensor(handles[i])
    stats = disco_client.stats()
    assert stats.prefetch_hits == 0
    assert stats.prefetch_misses == stats.read_bytes // MIB > 0


def test_wrong_settings_are_refused(attach: Attach) -> None:
    """A nonsense setting is an error at construction, not a hang later."""
    attach(arena="4MiB")
    with pytest.raises(ValueError, match="prefetch_size=-1"):
        DiskOffloadManager(prefetch_size=-1)
    with pytest.raises(ValueError, match="save_workers=0"):
        DiskOffloadManager(save_workers=0)
