"""disco_client: keeps training activations on NVMe through the node's ``discod`` daemon.

The short way, in place of :func:`torch.utils.checkpoint.checkpoint`::

    import disco_client

    h = disco_client.checkpoint(layer, h, mask)
"""

from disco_client import needs_torch  # noqa: F401  # before what needs it
from disco_client.checkpoint import checkpoint
from disco_client.connection import close, connect, stats
from disco_client.errors import (
    ArenaFull,
    AttachRefused,
    BlobCorrupted,
    BlobError,
    BlobModified,
    BlobTooLarge,
    DaemonError,
    DaemonLost,
    DaemonNotRunning,
    DiscodError,
    HandleReleased,
    NoDescriptors,
    RoomError,
    ScratchError,
    ScratchFull,
    SocketForbidden,
    UnsupportedCall,
    UnsupportedKeyword,
    UnsupportedOutput,
    UnsupportedTensor,
    UsageError,
    VersionMismatch,
)
from disco_client.function import Disco
from disco_client.manager import BlobHandle, DiskOffloadManager
from disco_client.offload import offload
from disco_client.patches.torch import enable as patch_torch
from disco_client.stats import Counters, Stats

__all__ = [  # noqa: RUF022  # grouped by topic
    # attaching
    "connect",
    "close",
    "stats",
    "Stats",
    "Counters",
    # training
    "checkpoint",
    "Disco",
    "offload",
    "patch_torch",
    # tensors by hand
    "DiskOffloadManager",
    "BlobHandle",
    # errors
    "DiscodError",
    "DaemonError",
    "DaemonNotRunning",
    "DaemonLost",
    "AttachRefused",
    "SocketForbidden",
    "VersionMismatch",
    "NoDescriptors",
    "RoomError",
    "ScratchFull",
    "ArenaFull",
    "BlobTooLarge",
    "BlobError",
    "ScratchError",
    "BlobCorrupted",
    "BlobModified",
    "HandleReleased",
    "UsageError",
    "UnsupportedTensor",
    "UnsupportedCall",
    "UnsupportedKeyword",
    "UnsupportedOutput",
]
