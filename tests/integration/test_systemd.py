"""The units and their installer: valid, tight, and not too tight for the daemon."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import disco_client
from tests.helpers.tools import needs

SYSTEMD = Path(__file__).parents[2] / "systemd"
MOST_EXPOSURE = 1.0
"""Of 10: what docs/operations.md says is less."""

MDWE = """
import ctypes, os, sys
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit("no PR_SET_MDWE")
os.execv(sys.argv[1], sys.argv[1:])
"""


def script(
    name: str, *args: str, root: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run one of the scripts into ``root``."""
    command = ["sh", str(SYSTEMD / name), *args]
    env = os.environ | {"DESTDIR": str(root)} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory in which units can be looked at, with a discod in it."""
    path = tmp_path / "root"
    program = path / "opt/discod/bin/discod"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/true", program)
    return path


@pytest.fixture
def installed(root: Path) -> Path:
    """The same after the installer has run."""
    options = ["--scratch", "/nvme0", "--scratch", "/nvme1", "--discod", "/opt/discod/bin/discod"]
    done = script("install.sh", *options, root=root)
    assert done.returncode == 0, done.stderr
    return root


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["install.sh", "uninstall.sh"])
def test_scripts_are_clean(name: str) -> None:
    """Mistakes in quoting would delete or overwrite something else."""
    needs("shellcheck")
    subprocess.run(["shellcheck", str(SYSTEMD / name)], check=True)


def test_units_are_valid(installed: Path) -> None:
    """systemd would ignore a setting, or the whole unit."""
    needs("systemd-analyze")
    units = installed / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for path in Path("/usr/lib/systemd/system").glob("*.target"):
        shutil.copy(path, units)
    command = ["systemd-analyze", "verify", f"--root={installed}"]
    done = subprocess.run(
        [*command, "discod.service", "discod.socket"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_exposure(installed: Path) -> None:
    """A setting that was lost would open the machine to a daemon that was taken over."""
    needs("systemd-analyze")
    command = ["systemd-analyze", "security", "--offline=yes", f"--root={installed}", "--no-pager"]
    done = subprocess.run(
        [*command, "discod.service"], capture_output=True, text=True, check=True
    ).stdout
    (exposure,) = re.findall(r"exposure level for discod.service: ([0-9.]+)", done)
    assert float(exposure) <= MOST_EXPOSURE


def test_the_installer(installed: Path) -> None:
    """The daemon would not find its program, or may not write where it shall."""
    service = (installed / "etc/systemd/system/discod.service").read_text()
    assert "\nExecStart=/opt/discod/bin/discod\n" in service
    dropped = (installed / "etc/systemd/system/discod.service.d/scratch.conf").read_text()
    assert "Environment=DISCOD_SCRATCH=/nvme0:/nvme1\n" in dropped
    assert "ReadWritePaths=/nvme0 /nvme1\n" in dropped


def test_installing_again_and_removing(installed: Path) -> None:
    """An upgrade would undo what the administrator set, or removing leave units behind."""
    settings = installed / "etc/discod/discod.env"
    settings.write_text("DISCOD_RAM=64GiB\n")
    own = installed / "etc/systemd/system/discod.service.d/own.conf"
    own.write_text("[Service]\n")
    before = files(installed)
    again = script(
        "install.sh", "--scratch", "/nvme2", "--discod", "/opt/discod/bin/discod", root=installed
    )
    assert again.returncode == 0
    assert files(installed) == before
    assert settings.read_text() == "DISCOD_RAM=64GiB\n"
    for _ in range(2):
        assert script("uninstall.sh", root=installed).returncode == 0
    assert files(installed) == {
        "opt/discod/bin/discod",
        "etc/discod/discod.env",
        "etc/systemd/system/discod.service.d/own.conf",
    }


def test_for_one_user(root: Path) -> None:
    """Without root there would be no service."""
    home = {"HOME": "/somebody", "XDG_CONFIG_HOME": ""}
    options = ["--user", "--scratch", "/nvme/me", "--discod", "/opt/discod/bin/discod"]
    assert script("install.sh", *options, root=root, **home).returncode == 0
    config = root / "somebody/.config"
    assert (config / "discod/discod.env").read_text() == "DISCOD_SCRATCH=/nvme/me\n"
    units = {"discod.service", "discod.socket"}
    assert {path.name for path in (config / "systemd/user").iterdir()} == units
    assert script("uninstall.sh", "--user", root=root, **home).returncode == 0
    assert not list((config / "systemd/user").iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no --scratch"),
        (["--scratch"], "needs a value"),
        (["--scratch", "relative"], "relative path"),
        (["--scratch", "/with space"], "without spaces"),
        (["--scratch", "/nvme", "--discod", "/home/me/venv/bin/discod"], "home directory"),
        (["--scratch", "/nvme", "--discod", "discod"], "no discod in PATH"),
        (["--scrach", "/nvme"], "unknown argument --scrach"),
    ],
)
def test_wrong_arguments(root: Path, options: list[str], said: str) -> None:
    """A half-installed unit would fail at its start, far from the mistake."""
    before = files(root)
    done = script("install.sh", *options, root=root)
    assert done.returncode == 1
    assert said in done.stderr
    assert files(root) == before


def use(attach_to: Callable[..., None], daemon: Any) -> None:
    """All that a client does: save beyond the arena, load, release, close."""
    attach_to(daemon, arena="4MiB", min_bytes="256KiB")
    store = disco_client.DiskOffloadManager()
    tensors = [torch.randn(1 << 18) for _ in range(12)]
    handles = [store.save_tensor(tensor) for tensor in tensors]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(store.load_tensor(handle), tensor)
    assert disco_client.stats().read_bytes
    disco_client.close()


def test_the_daemon_keeps_to_the_system_calls_of_its_unit(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None], tmp_path: Path
) -> None:
    """Under systemd a call would fail that works everywhere else."""
    needs("strace")
    needs("systemd-analyze")
    allowed: set[str] = set()
    for line in re.findall(
        r"^SystemCallFilter=(.*)$", (SYSTEMD / "discod.service").read_text(), re.M
    ):
        names = calls_of(*line.lstrip("~").split())
        allowed = allowed - names if line.startswith("~") else allowed | names
    trace = tmp_path / "trace"
    # From the moment on that it is the daemon: what makes its directories is systemd's here.
    prefix = ["strace", "-D", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    daemon = start_daemon(prefix=prefix)
    use(attach_to, daemon)
    daemon.terminate()
    assert daemon.wait() == 0
    used = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M))
    assert {"pwritev", "preadv", "sendmsg"} & used
    # Only where it made its socket directory by itself.
    assert used - allowed <= {"chown", "fchown"}


def calls_of(*groups: str) -> set[str]:
    """The system calls in these groups, by systemd."""
    found = set()
    for group in groups:
        done = subprocess.run(
            ["systemd-analyze", "syscall-filter", "--no-pager", group],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        for word in re.findall(r"^ +(@?[\w-]+)$", done.stdout, re.M):
            found |= calls_of(word) if word.startswith("@") else {word}
    return found


def test_the_daemon_needs_no_memory_that_is_writable_and_executable(
    start_daemon: Callable[..., Any], attach_to: Callable[..., None]
) -> None:
    """MemoryDenyWriteExecute= would end it."""
    probe = subprocess.run(
        [sys.executable, "-c", MDWE, "/bin/true"], capture_output=True, text=True, check=False
    )
    if "no PR_SET_MDWE" in probe.stderr:
        needs("a kernel with PR_SET_MDWE (6.3)", here=False)
    daemon = start_daemon(prefix=[sys.executable, "-c", MDWE])
    use(attach_to, daemon)
