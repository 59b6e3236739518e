"""What the figures were taken on: the GPU, the versions, the disk. Makes no CUDA context."""

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import torch

from discod import __version__
from discod.wire.sizes import format_size
from tests.gpu.timing import disk_rates

GPU_QUESTIONS = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "compute_mode",
)
"""As ``nvidia-smi --help-query-gpu`` names them."""
NVIDIA_SMI_SECONDS = 20


def describe(device: str, scratch: Path, probe_bytes: int) -> dict[str, str]:
    """What to print above the table."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "discod": __version__,
        "device": device,
        "gpu": gpus() if device.startswith("cuda") else "none",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": f"{os.cpu_count()} cores, {format_size(psutil.virtual_memory().total)}",
        "scratch": f"{file_system(scratch)}, {disk(scratch, probe_bytes)}",
    }


def unusable(device: str) -> str | None:
    """Why nothing can be measured on ``device`` (cpu, cuda or cuda:N) here; None: it can be."""
    if device == "cpu":
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install its CUDA build"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: look at "
            "nvidia-smi (driver, container's --gpus) and at CUDA_VISIBLE_DEVICES, which is "
            + ("not set" if visible is None else repr(visible))
        )
    if int(device.partition(":")[2] or 0) >= count:
        return f"{device}: this machine has {count} GPU{'' if count == 1 else 's'}"
    return None


def gpus() -> str:
    """What ``nvidia-smi`` says of each GPU."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUESTIONS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {NVIDIA_SMI_SECONDS} s"
    if answer.returncode:
        return f"nvidia-smi fails: {(answer.stdout + answer.stderr).strip()}"
    labels = "name, driver, memory, PCIe generation, PCIe lanes, compute mode"
    return f"{'; '.join(answer.stdout.strip().splitlines())} ({labels})"


def file_system(directory: Path) -> str:
    """The type of the file system that ``directory`` is on."""
    path = directory.resolve()
    mounts = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if path.is_relative_to(partition.mountpoint)
    ]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"


def disk(directory: Path, nbytes: int) -> str:
    """How fast it is, by the bare probe of the disk benchmark."""
    rates = disk_rates(directory, nbytes)
    if rates is None:
        return "no O_DIRECT"
    return "O_DIRECT writes {:.2f} GB/s, reads {:.2f}".format(*(rate / 1e9 for rate in rates))
