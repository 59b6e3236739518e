"""The screens of ``discod status`` and ``discod top``: what they show, and that it fits."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from discod.block_device import device_name
from discod.screen import cut_path, duration, short_size
from discod.status import to_json
from discod.status_table import lines
from discod.top import frame, waiting
from discod.wire.codec import MAX_TEXT_CHARS

GOLDEN = Path(__file__).parents[1] / "golden"
CLOCK = "16:20:31"
MOST = (1 << 62) - 1


@pytest.fixture
def status() -> dict[str, Any]:
    """A recorded status: two directories, one of them out of use, and three clients."""
    status: dict[str, Any] = json.loads((GOLDEN / "status.json").read_text())
    return status


def text(shown: Any) -> str:
    """Lines as a file has them."""
    return "".join(f"{line.plain}\n" for line in shown)


def test_a_frame_of_top(status: dict[str, Any]) -> None:
    """Somebody would look at it and not find what he found last week. 80 columns and 24 rows."""
    shown = text(frame(status, CLOCK, 80, 24))
    assert shown == (GOLDEN / "top-80x24.txt").read_text()


def test_status_in_80_columns(status: dict[str, Any]) -> None:
    """The same for what ``discod status`` prints."""
    assert text(lines(status, 80)) == (GOLDEN / "status-80.txt").read_text()


@pytest.mark.parametrize("width", [80, 132])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_nothing_is_wider_or_longer_than_the_terminal(
    status: dict[str, Any], width: int, height: int
) -> None:
    """Lines would wrap, and the screen be garbage, just when numbers are large."""
    client = status["clients"][0]
    for name, value in client.items():
        if type(value) is int and name not in ("pid", "uid", "rank"):
            client[name] = MOST
    client |= {"pid": 4_194_304, "uid": 65_534, "rank": 9999, "command": "x" * 80}
    status["clients"] = [copy.deepcopy(client) for _ in range(20)]
    for directory in status["scratch"]:
        directory |= {"path": "/p" * 100, "device_name": "mapper-0123456789"}
        directory |= {"written_bytes_per_second": MOST, "last_failure": "it failed " * 30}
    status |= {"written_bytes": MOST, "written_last_day_bytes": MOST, "written_bytes_per_day": MOST}
    status |= {"write_budget_bytes": MOST, "write_budget_held": MOST, "ram_used_bytes": MOST}
    shown = frame(status, CLOCK, width, height)
    assert len(shown) <= height
    assert max(len(line.plain) for line in shown) <= width


def test_clients_without_room_are_counted(status: dict[str, Any]) -> None:
    """Somebody would take the screen for all there is, and miss the rank that waits."""
    client = status["clients"][0]
    status["clients"] = [{**client, "pid": pid} for pid in range(100, 140)]
    status["clients_left_out"] = 7
    shown = text(frame(status, CLOCK, 80, 24))
    seen = sum(f"\n    {pid}  " in shown for pid in range(100, 140))
    assert seen
    assert f"{40 - seen + 7} more; " in shown
    assert "7 more; " in text(frame(status, CLOCK, 80))


def test_a_status_that_is_too_large(status: dict[str, Any]) -> None:
    """With so many clients nobody would get a status, or clients would be missing unseen."""
    client = status["clients"][0]
    status["clients"] = [{**client, "pid": pid} for pid in range(1000)]
    text = to_json(status)
    assert MAX_TEXT_CHARS * 0.9 < len(text) <= MAX_TEXT_CHARS
    shown = json.loads(text)
    assert len(shown["clients"]) + shown["clients_left_out"] == 1000
    assert len(status["clients"]) == 1000


def test_what_is_wrong_stands_out(status: dict[str, Any]) -> None:
    """A disk that has failed would look like all the others."""
    styles = {
        line.plain[span.start : span.end].strip(): str(span.style)
        for line in frame(status, CLOCK, 80, 24)
        for span in line.spans
    }
    assert styles["OUT OF USE"] == "bold red"
    assert styles["buffered"] == styles["42%"] == "yellow"
    assert "in use" not in styles
    assert "O_DIRECT" not in styles


def test_without_a_daemon() -> None:
    """One would look at an empty screen, and not know that it goes on by itself."""
    shown = text(waiting("no discod daemon listens on /run/discod/attach.sock", CLOCK, 80))
    assert "listens on /run/discod/attach.sock. Waiting for a daemon; q ends." in shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0K"),
        (1536, "1.5K"),
        ((1 << 20) - 1, "1.0M"),
        (int(99.9 * 2**30), "99.9G"),
        (int(99.96 * 2**30), "100G"),
        (999 << 30, "999G"),
        (1000 << 30, "1.0T"),
        (5 << 50, "5.0P"),
        (MOST, "4096P"),
    ],
)
def test_sizes(size_bytes: int, shown: str) -> None:
    """A number would be wider than its column, or say another size."""
    assert short_size(size_bytes) == shown
    assert len(shown) <= 5


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.9, "0:00:00"), (7511, "2:05:11"), (266_711, "3d 02:05:11")]
)
def test_durations(seconds: float, shown: str) -> None:
    """An uptime would be off by an hour or a day."""
    assert duration(seconds) == shown


def test_paths_keep_their_end() -> None:
    """Two directories of one parent would look the same."""
    assert cut_path("/mnt/nvme0/scratch", 12) == "...0/scratch"
    assert cut_path("/nvme", 12) == "/nvme"


def test_device_names(tmp_path: Path) -> None:
    """Nobody could tell by the status which disk to replace; and not all have one."""
    blocks = tmp_path / "dev" / "block"
    blocks.mkdir(parents=True)
    (blocks / "259:3").symlink_to("../../devices/pci0000:00/nvme/nvme0/nvme0n1/nvme0n1p1")
    assert device_name((259 << 8) | 3, tmp_path) == "nvme0n1p1"
    assert device_name(42, tmp_path) == ""
    assert device_name(42, tmp_path / "no-sysfs") == ""
