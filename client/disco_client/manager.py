"""``DiskOffloadManager``: tensors saved and loaded by hand, in the form of Axolotl's manager.

Source of the names and signatures: ``axolotl/monkeypatch/gradient_checkpointing/offload_disk.py``.
"""

import itertools
import secrets
import weakref
from typing import NoReturn

import torch

from disco_client import connection
from disco_client.errors import HandleReleased
from disco_client.residency import Group
from disco_client.stored import StoredTensor


class BlobHandle(str):
    """An opaque name of a saved tensor. The blob lives as long as this object."""

    __slots__ = ("__weakref__", "_stored")
    _stored: StoredTensor

    def __copy__(self) -> "BlobHandle":
        return self

    def __deepcopy__(self, memo: object) -> "BlobHandle":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{str(self)!r} is of this process's attachment and cannot be sent to another; send "
            "the tensor that load_tensor() returns"
        )


class DiskOffloadManager:
    """Saves tensors to discod and loads them back.

    Any number of managers share the process's one attachment; each owns the blobs it saved.

    Args:
        prefetch_size: Most blobs read ahead of their loads; 0 switches reading ahead off.
        prefetch_to_gpu: Whether tensors saved from a GPU are copied back to it before they are
            asked for, as soon as one is loaded and the next are in RAM.
        save_workers: Most writes in flight at the daemon at a time for this manager.

    Raises:
        ValueError: A size is negative, or ``save_workers`` is 0.
        DaemonError: There is no daemon to attach to.
    """

    def __init__(
        self, prefetch_size: int = 3, prefetch_to_gpu: bool = True, save_workers: int = 4
    ) -> None:
        if prefetch_size < 0 or save_workers < 1:
            raise ValueError(
                f"prefetch_size={prefetch_size} must be at least 0, and "
                f"save_workers={save_workers} at least 1"
            )
        self.prefetch_to_gpu = prefetch_to_gpu
        self.group = Group(
            max_prefetch=prefetch_size, max_writes=save_workers, to_device=prefetch_to_gpu
        )
        self._name = f"discod-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._handles: weakref.WeakValueDictionary[str, BlobHandle] = weakref.WeakValueDictionary()
        connection.current()

    def save_tensor(self, tensor: torch.Tensor) -> BlobHandle:
        """Save the tensor's present value; it may be changed or freed as soon as this returns.

        On a GPU, what the current stream is given after this waits for the copy, so that it may
        change the tensor; other streams have to wait for the current one, as for any tensor.

        Args:
            tensor: Any strided tensor: every dtype, views, expanded, 0-dim, empty.

        Returns:
            A handle, also good as a plain string. The blob is released when the handle is
            collected, or by :meth:`cleanup_tensor`.

        Raises:
            UnsupportedTensor: Sparse, quantized, meta, or a tensor subclass.
            RoomError: The arena is full and so is the disk; nothing was saved.
        """
        stored = StoredTensor(connection.current().store, tensor, self.group, at_once=True)
        handle = BlobHandle(f"{self._name}-{next(self._numbers)}")
        handle._stored = stored
        self._handles[str(handle)] = handle
        return handle

    def load_tensor(
        self, handle: str, target_device: torch.device | str | int | None = None
    ) -> torch.Tensor:
        """The tensor with its dtype, shape, strides and ``requires_grad`` flag.

        Args:
            handle: From :meth:`save_tensor` of this manager.
            target_device: By default the device it was saved from.

        Returns:
            On a GPU, memory of its own. On the CPU a view of the arena, which stays valid and
            unchanged for as long as it lives. Do not write to that in ways that torch does not
            count as a change (``.data``, numpy, a forked child): a later load of the handle would
            see it. ``clone()`` it first.

        Raises:
            HandleReleased: The handle is unknown here, or was cleaned up.
            BlobError: The blob cannot be read back.
        """
        stored = self._find(handle)
        device = None if target_device is None else torch.device(target_device)
        tensor = stored.load(device)
        return tensor.requires_grad_(stored.spec.requires_grad)

    def wait_for_save(self, handle: str, timeout: float | None = None) -> None:
        """Until the save needs the disk no more: it is written, or it stays in RAM.

        Raises:
            TimeoutError: Not within ``timeout`` seconds. The save goes on.
            ScratchError: The write failed. The tensor is still in RAM and can be loaded.
        """
        stored = self._find(handle)
        try:
            stored.wait_saved(timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"{handle!s} was not saved within {timeout} s; the save goes on, wait again or "
                "pass a longer timeout"
            ) from error

    def trigger_prefetch(self, n: int | None = None) -> None:
        """Start reading the next ``n`` blobs of this process now, within each ``prefetch_size``.

        By default as many as there is room for. Not needed in training, where reading ahead
        begins by itself with the first load.
        """
        connection.current().session.prefetch(n)

    def cleanup_tensor(self, handle: str) -> None:
        """Release the blob. Unknown handles are no error: it may be gone already."""
        known = self._handles.pop(handle, None)
        if known is not None:
            known._stored.release()

    def cleanup(self) -> None:
        """Release every blob of this manager. Those of other managers are not touched."""
        for handle in list(self._handles.values()):
            self.cleanup_tensor(handle)

    def _find(self, handle: str) -> StoredTensor:
        known = self._handles.get(handle)
        if known is None:
            raise HandleReleased(
                f"{handle!s} is not a live handle of this manager: it was cleaned up, its handle "
                "object was dropped, or another manager saved it"
            )
        return known._stored
