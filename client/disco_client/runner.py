"""Running a training script as Python itself would, with discod in place.

What the script can see is as under ``python SCRIPT`` or ``python -m MODULE``: ``sys.argv``,
``sys.path``, ``__main__``, the exit code and the traceback. The command line is in ``__main__``.
"""

import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from disco_client.offload import saved_everywhere
from disco_client.patches import torch as torch_patch

_OWN_FRAMES = {__file__, "<frozen runpy>"}


def configure(
    scratch: Sequence[str | os.PathLike[str]] = (),
    arena: str | None = None,
    min_bytes: str | None = None,
) -> None:
    """Put settings into the environment, for the first use of discod here and in children."""
    if scratch:
        os.environ["DISCOD_SCRATCH"] = ":".join(os.path.abspath(part) for part in scratch)
    if arena is not None:
        os.environ["DISCOD_ARENA"] = arena
    if min_bytes is not None:
        os.environ["DISCOD_MIN_BYTES"] = min_bytes


def run(
    target: str, args: Sequence[str], *, module: bool = False, everything: bool = False
) -> None:
    """Run a script, or a module, with the torch patch enabled; it ends as the script ends.

    Args:
        target: The script's path, or the module's name.
        args: What the script finds in ``sys.argv`` after its name.
        module: Whether ``target`` is a module.
        everything: Whether all tensors that autograd saves go to discod, not only the inputs of
            activation checkpoints. Only what this thread saves.
    """
    torch_patch.enable()
    sys.argv = [target, *args]
    try:
        with saved_everywhere() if everything else contextlib.nullcontext():
            if module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                _run_script(target)
    except BaseException as error:
        _show_only_the_scripts_frames(error)
        raise


def _run_script(path: str) -> None:
    """By hand, because ``runpy.run_path`` takes ``__main__`` away before threads and atexit end."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins,
        __cached__=None,
        __file__=absolute,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
    )
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _show_only_the_scripts_frames(error: BaseException) -> None:
    """Around whichever hook the script has installed; the interpreter calls it at the very end."""
    shown_by = sys.excepthook
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FRAMES:
        frames = frames.tb_next

    def show(kind: type[BaseException], raised: BaseException, whole: Any) -> None:
        if raised is not error:
            shown_by(kind, raised, whole)
        else:
            shown_by(kind, error.with_traceback(frames), frames)

    sys.excepthook = show
