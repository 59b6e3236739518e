"""Axolotl's ``Disco``, from its published package, made to run on the CPU.

Only its module ``offload_disk`` is imported, with what it takes from Axolotl itself (a logger)
given here: the package pulls in dozens of others. Changed are two defaults that name CUDA.
"""

import importlib.util
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.benchmarks import peers

MODULE = "axolotl/monkeypatch/gradient_checkpointing/offload_disk.py"
"""In the package's ``src`` or in its wheel."""


class NotInstalled(Exception):
    """Axolotl's source is not there; the text says where it was looked for."""


def find() -> Path:
    """The file of its ``offload_disk``.

    Raises:
        NotInstalled: There is none.
    """
    places = [Path(folder) for folder in sys.path if folder]
    places.append(peers.AXOLOTL_CACHE)
    for place in places:
        for path in (place / MODULE, place / "src" / MODULE):
            if path.is_file():
                return path
    raise NotInstalled(
        f"axolotl {peers.AXOLOTL} is not installed: no {MODULE} in sys.path or {places[-1]}"
    )


def load(path: Path, folder: Path, *, prefetch_size: int = 1, save_workers: int = 4) -> Any:
    """The module of ``path``, whose ``Disco`` has its manager already.

    Args:
        path: As of :func:`find`.
        folder: Where it makes its files.
        prefetch_size: As Axolotl's own default.
        save_workers: As Axolotl's own default.
    """
    logger = types.ModuleType("axolotl.utils.logging")
    vars(logger)["get_logger"] = logging.getLogger
    stand_ins = {name: types.ModuleType(name) for name in ("axolotl", "axolotl.utils")}
    stand_ins[logger.__name__] = logger
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("axolotl_offload_disk", path)
        if spec is None or spec.loader is None:
            raise NotInstalled(f"{path} cannot be imported")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, earlier in before.items():
            if earlier is None:
                del sys.modules[name]
            else:
                sys.modules[name] = earlier
    module.DiskOffloadManager.load_tensor.__defaults__ = ("cpu",)
    usual = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        module.Disco.get_instance(
            prefetch_size=prefetch_size, prefetch_to_gpu=False, save_workers=save_workers
        )
    finally:
        tempfile.tempdir = usual
    return module
