"""GPUs: devices, the driver's library, and whether they are seen.

The driver is started in a process of its own: it may take seconds, or never come back, and leaves
this process with threads.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from discod.checkup.finding import Finding, fail, ok, warn
from discod.cuda_driver import DEFAULT_LIBRARY, LIBRARY_VARIABLE

DRIVER_SECONDS = 1.3
"""Less than there is for all checks (:mod:`discod.checkup.run`)."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_CODE = """
import sys
from discod.cuda_driver import CudaUnavailable, load
try:
    driver = load()
    for number in range(driver.device_count()):
        print(driver.device_uuid(number).hex())
except CudaUnavailable as error:
    sys.exit(str(error))
"""


@dataclass(slots=True)
class Gpus:
    """What was seen.

    Attributes:
        nodes: Devices under /dev.
        uuids: Of the GPUs that the driver shows, in hex.
        error: Why it shows none; empty when it does.
    """

    nodes: list[Path]
    uuids: list[str] = field(default_factory=list)
    error: str = ""


def look_for_gpus(root: Path = Path("/")) -> Gpus:
    """See what there is; ``root`` is where /dev is. Takes up to ``DRIVER_SECONDS``."""
    gpus = Gpus([node for node in sorted(root.glob("dev/nvidia*")) if node.name[6:].isdigit()])
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        gpus.error = f"the driver has not answered within {DRIVER_SECONDS} s"
        return gpus
    if asked.returncode:
        gpus.error = (asked.stderr.strip().splitlines() or ["the driver's start has crashed"])[-1]
    else:
        gpus.uuids = asked.stdout.split()
    return gpus


def check_gpus(gpus: Gpus) -> Iterator[Finding]:
    """The findings."""
    hidden = [node for node in gpus.nodes if not os.access(node, os.R_OK | os.W_OK)]
    if hidden:
        names = ", ".join(map(str, hidden))
        remedy = "add the user to the group that the device belongs to (ls -l), as video or render"
        yield fail("GPU devices", f"uid {os.geteuid()} may not use {names}", remedy)
    visible = os.environ.get(_VISIBLE)
    if gpus.uuids:
        found = f"{len(gpus.uuids)} by the driver: " + ", ".join(map(_short, gpus.uuids))
        yield ok("GPU", found + ("" if visible is None else f"; {_VISIBLE}={visible}"))
    elif gpus.nodes and visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        found = f"{len(gpus.nodes)} under /dev, and {_VISIBLE}={visible!r} hides all"
        yield warn("GPU", found, f"unset {_VISIBLE}, if this is where the training runs")
    elif gpus.nodes:
        remedy = (
            "see whether nvidia-smi runs; a container needs the driver's libraries: docker run "
            "--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        yield warn("GPU", f"{len(gpus.nodes)} under /dev, and {gpus.error}", remedy)
    elif os.environ.get(LIBRARY_VARIABLE):
        library = f"{LIBRARY_VARIABLE}={os.environ[LIBRARY_VARIABLE]}"
        yield warn("GPU", f"none, with {library}: {gpus.error}", f"unset {LIBRARY_VARIABLE}")
    else:
        yield ok("GPU", f"no GPU here ({DEFAULT_LIBRARY} or /dev/nvidia0 is missing)")


def _short(uuid: str) -> str:
    return f"GPU-{uuid[:8]}"
