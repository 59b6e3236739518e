"""The fake CUDA driver of ``fake_cuda.c``: built once, a private copy for each test, controlled.

What it models and what it does not is said there. Give :meth:`FakeCuda.env` to processes, or load
:attr:`FakeCuda.library` in this one. Faults, leaks and violations are those of all processes that
use the same directory.
"""

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cuda.c")
_REPORT_BYTES = 1 << 20


def uuid_of(ordinal: int) -> bytes:
    """The UUID of the fake GPU with this ordinal."""
    return b"fake-cuda-gpu-%02d" % ordinal


@cache
def _built() -> Path:
    """The library, compiled in this process's first need of it."""
    if shutil.which("gcc") is None:
        if os.environ.get("DISCOD_TEST_REQUIRE_ALL") == "1":
            pytest.fail("DISCOD_TEST_REQUIRE_ALL is set, and the fake CUDA driver needs gcc")
        pytest.skip("the fake CUDA driver needs gcc")
    directory = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / "libcuda-fake.so"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", library, SOURCE, "-ldl"], check=True)
    return library


class FakeCuda:
    """One fake driver with its GPUs, and the state that the processes using it share.

    Args:
        directory: An existing, empty directory of its own.
        devices: How many GPUs there are.
        memory_bytes: The memory of each.
    """

    def __init__(self, directory: Path, devices: int = 1, memory_bytes: int = 4 << 30) -> None:
        self.directory = directory
        # Loaded by another path it is another instance, which shares nothing with other tests'.
        self.library = Path(shutil.copy(_built(), directory / "libcuda-fake.so"))
        self._settings = {
            "FAKE_CUDA_DIR": str(directory),
            "FAKE_CUDA_DEVICES": str(devices),
            "FAKE_CUDA_MEMORY": str(memory_bytes),
        }
        self._faults: list[str] = []

    def env(self) -> dict[str, str]:
        """The environment of a process that is to use it."""
        return {"DISCOD_CUDA_LIBRARY": str(self.library)} | self._settings

    def fail(self, call: str, code: int, times: int = 1, after: int = 0, *, pid: int = 0) -> None:
        """Have the next ``times`` calls fail, those after the next ``after`` ones.

        ``call``: A function of the API, or "copy" or "record" for what happens on streams; such a
        failure makes the process's context useless, as with a real driver. ``pid``: Only there.
        """
        self._add(f"f {call} {code} {after} {times} 0 {pid}")

    def delay(self, call: str, seconds: float, *, pid: int = 0) -> None:
        """Have every such call, "copy" or "record" take ``seconds`` longer."""
        self._add(f"d {call} 0 0 0 {round(seconds * 1e6)} {pid}")

    def hang(self, call: str, *, pid: int = 0) -> None:
        """Have such calls not return before :meth:`heal`."""
        self._add(f"h {call} 0 0 0 0 {pid}")

    def heal(self) -> None:
        """Take back all faults."""
        self._faults.clear()
        self._publish()

    def violations(self) -> list[str]:
        """What would have been a crash or a leak with a real driver."""
        path = self.directory / "violations"
        return path.read_text().splitlines() if path.exists() else []

    def allocated_bytes(self) -> Counter[int]:
        """Device memory that live processes have allocated, by pid."""
        return self._sums("memory")

    def registered_bytes(self) -> Counter[int]:
        """Host memory that live processes have registered, by pid."""
        return self._sums("range")

    def open_handles(self) -> Counter[int]:
        """How often live processes have other processes' memory open, by pid."""
        return self._sums("open")

    def _sums(self, kind: str) -> Counter[int]:
        sums: Counter[int] = Counter()
        for line in self._report():
            name, pid, _, amount = line.split()
            if name == kind:
                sums[int(pid)] += int(amount)
        return sums

    def _report(self) -> list[str]:
        report = ctypes.CDLL(str(self.library)).fakeCudaReport
        report.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        text = ctypes.create_string_buffer(_REPORT_BYTES)
        assert report(os.fsencode(self.directory), text, _REPORT_BYTES) == 0
        return text.value.decode().splitlines()

    def _add(self, line: str) -> None:
        self._faults.append(line)
        self._publish()

    def _publish(self) -> None:
        new = self.directory / "control.new"
        new.write_text("".join(f"{line}\n" for line in self._faults))
        new.replace(self.directory / "control")
