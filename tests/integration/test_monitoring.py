"""What people and Prometheus see of a daemon: ``discod status``, ``discod top``, the metrics."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

import disco_client
from discod.client_report import TOTALS
from discod.config import Address
from discod.exits import Exit, StartupError
from discod.metrics_server import MOST_PEERS, MetricsServer
from discod.status import Snapshot
from discod.wire.messages import Done, Failed, Report
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.faults import Rules
from tests.helpers.raw_client import MIB, RawClient

Start = Callable[..., Daemon]
Connect = Callable[..., RawClient]

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "discod.json"
ALERTS = DOCS / "grafana" / "alerts.yaml"

Sample = tuple[str, tuple[tuple[str, str], ...]]


def report(client: RawClient, **totals: int) -> Any:
    """Have a client report; the daemon's answer."""
    return client.ask(Report, **{name: totals.get(name, 0) for name in TOTALS}, spans=())


def metrics_url(daemon: Daemon) -> str:
    """Where it says that it serves them."""
    return f"http://{daemon.status()['metrics']}/metrics"


def scrape(daemon: Daemon) -> dict[Sample, float]:
    """All samples, by name and labels."""
    with urllib.request.urlopen(metrics_url(daemon), timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        body = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    """One of them."""
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def monitored(start_daemon: Start) -> Daemon:
    """A daemon with metrics, on a port that is free."""
    return start_daemon("--metrics", "127.0.0.1:0", "--write-budget", "1TB/day")


@contextlib.contextmanager
def attached(daemon: Daemon, **settings: Any) -> Iterator[None]:
    """This process, as a client with an arena that is soon full."""
    disco_client.connect(daemon.socket_dir, **({"arena": "4MiB", "min_bytes": "4KiB"} | settings))
    try:
        yield
    finally:
        disco_client.close()


def step() -> None:
    """A forward and backward of which most goes to disk."""
    hidden = torch.ones(MIB // 4, requires_grad=True)
    for _ in range(8):
        hidden = disco_client.checkpoint(torch.sin, hidden)
    hidden.sum().backward()


class TestStatus:
    def test_a_training_is_seen(self, daemon: Daemon) -> None:
        """Nobody could tell which rank waits, writes or does nothing."""
        with attached(daemon):
            step()
            [client] = eventually(
                lambda: [one for one in daemon.status()["clients"] if one["cycles"]],
                what="the report of the first cycle",
            )
            stats = disco_client.stats()
            assert client["loads"] == stats.saved_blobs == 7  # the first input is a leaf
            assert client["saved_bytes"] == stats.saved_bytes == 7 * MIB
            assert client["elided_bytes"] == stats.elided_bytes
            assert client["written_bytes"] == stats.written_bytes > 0
            assert client["read_bytes"] == stats.read_bytes > 0
            assert client["written_bytes_per_second"] > 0
            assert 0 <= client["reported_seconds"] < 20
            assert client["command"]
            assert client["command"][:20] == " ".join(sys.argv)[:20]
            waited = client["waits"]
            assert waited["room"]["seconds"] == pytest.approx(stats.save_wait_seconds, abs=1e-4)
            assert waited["read"]["seconds"] == pytest.approx(stats.load_wait_seconds, abs=1e-4)
            [scratch] = daemon.status()["scratch"]
            assert scratch["written_bytes"] == stats.written_bytes
            device = os.stat(daemon.scratch).st_dev
            assert scratch["device"] == f"{os.major(device)}:{os.minor(device)}"

    def test_a_client_that_talks_nonsense_harms_itself_alone(
        self, daemon: Daemon, raw_client: Connect
    ) -> None:
        """One client could hide the others, or end the daemon, by what it says of itself."""
        most = (1 << 63) - 1
        client, other = raw_client(daemon), raw_client(daemon)
        assert isinstance(report(client, **dict.fromkeys(TOTALS, most)), Done)
        assert isinstance(report(client, saved_bytes=-1), Failed)
        assert isinstance(report(other, cycles=3), Done)
        status = daemon.status()
        assert sorted(one["cycles"] for one in status["clients"]) == [3, most]
        for one in status["clients"]:
            assert all(0 <= wait["share"] <= 1 for wait in one["waits"].values())
        result = run("top", "--once", "--socket-dir", str(daemon.socket_dir), COLUMNS="80")
        assert result.returncode == 0
        assert "3 cycles" in result.stdout

    def test_a_command_with_escape_sequences(self, daemon: Daemon, raw_client: Connect) -> None:
        """A client could write to the terminal of whoever looks."""
        raw_client(daemon, command="a\x1b[2J\n" + "b" * 500)
        [client] = daemon.status()["clients"]
        assert client["command"].startswith("a?[2J?bbb")
        assert len(client["command"]) == 80

    def test_every_key_is_documented(self, monitored: Daemon, raw_client: Connect) -> None:
        """Scripts would use keys of which nobody has said what they mean and that they stay."""
        raw_client(monitored)
        status = monitored.status()
        page = (DOCS / "status.md").read_text()
        documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
        keys = set(status) | set(status["clients"][0]) | set(status["scratch"][0])
        keys |= set(status["clients"][0]["waits"]["room"])
        gpu = {"uuid", "clients", "copied_bytes"}  # there is none here
        assert documented == keys | gpu


class TestMetrics:
    def test_numbers_are_those_of_the_status(self, monitored: Daemon, raw_client: Connect) -> None:
        """A graph would show something else than the daemon does."""
        client = raw_client(monitored, 8 * MIB, rank=3)
        client.write(0, 0, 2 * MIB)
        client.read(0, 0, MIB)
        report(client, cycles=2, saved_bytes=5 * MIB, read_waits=4, read_wait_ns=1_500_000_000)
        samples = scrape(monitored)
        scratch = str(monitored.scratch)
        assert value(samples, "discod_clients") == 1
        assert value(samples, "discod_ram_reserved_bytes") == 8 * MIB
        assert value(samples, "discod_scratch_written_bytes_total", scratch=scratch) == 2 * MIB
        assert value(samples, "discod_scratch_reads_total", scratch=scratch) == 1
        assert value(samples, "discod_rank_written_bytes_total", rank="3") == 2 * MIB
        assert value(samples, "discod_rank_cycles_total", rank="3") == 2
        assert value(samples, "discod_rank_wait_seconds_total", rank="3", reason="read") == 1.5
        assert value(samples, "discod_rank_arena_bytes", rank="3") == 8 * MIB
        assert value(samples, "discod_write_budget_bytes") == 10**12
        assert value(samples, "discod_build_info", version=monitored.status()["version"]) == 1
        assert value(samples, "process_resident_memory_bytes") > MIB

    def test_failures_are_counted_by_kind(
        self, start_daemon: Start, raw_client: Connect, tmp_path: Path
    ) -> None:
        """An alert on a failing disk would never fire, or for a full one too."""
        rules = Rules(tmp_path / "faults")
        daemon = start_daemon("--metrics", "127.0.0.1:0", env=rules.environment)
        client = raw_client(daemon)
        labels = {"scratch": str(daemon.scratch), "operation": "write", "kind": "io"}
        assert value(scrape(daemon), "discod_scratch_failures_total", **labels) == 0
        rules.set("pwritev EIO")
        assert isinstance(client.write(0, 0, MIB), Failed)
        samples = scrape(daemon)
        assert value(samples, "discod_scratch_failures_total", **labels) == 1
        labels["kind"] = "disk-full"
        assert value(samples, "discod_scratch_failures_total", **labels) == 0
        assert value(samples, "discod_scratch_writes_total", scratch=str(daemon.scratch)) == 0

    def test_totals_neither_fall_nor_count_twice(
        self, monitored: Daemon, raw_client: Connect
    ) -> None:
        """Each trainer that ends or comes back would be a leap in all graphs."""
        client = raw_client(monitored, rank=0)
        client.write(0, 0, MIB)
        report(client, saved_bytes=10 * MIB)

        def totals() -> tuple[float, float]:
            samples = scrape(monitored)
            return (
                value(samples, "discod_rank_written_bytes_total", rank="0"),
                value(samples, "discod_rank_saved_bytes_total", rank="0"),
            )

        assert totals() == (MIB, 10 * MIB)
        client.detach()
        eventually(lambda: not monitored.status()["clients"])
        assert totals() == (MIB, 10 * MIB)
        client.attach(monitored.socket_dir)
        report(client, saved_bytes=10 * MIB)
        assert totals() == (MIB, 10 * MIB)
        report(client, saved_bytes=11 * MIB)
        client.close()
        eventually(lambda: not monitored.status()["clients"])
        assert totals() == (MIB, 11 * MIB)

    def test_the_dashboard_and_the_alerts_ask_for_what_there_is(
        self, monitored: Daemon, raw_client: Connect
    ) -> None:
        """Panels would stay empty, and alerts silent, for a name that was changed or misspelt."""
        client = raw_client(monitored, rank=0)
        client.write(0, 0, MIB)
        exported: dict[str, set[str]] = {}
        for name, labels in scrape(monitored):
            exported.setdefault(name, set()).update(label for label, _ in labels)
        # Without a GPU there is no sample; what Prometheus itself adds.
        exported["discod_gpu_copied_bytes_total"] = exported["discod_gpu_process_up"] = {"gpu"}
        exported["up"] = set()
        expressions = [
            target["expr"]
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel.get("targets", ())
        ]
        rules = [
            rule
            for group in yaml.safe_load(ALERTS.read_text())["groups"]
            for rule in group["rules"]
        ]
        assert len(expressions) > 10
        assert len(rules) > 5
        for expression in [*expressions, *(rule["expr"] for rule in rules)]:
            names = re.findall(r"\b(?:discod|process)_\w+|\bup\b", expression)
            assert names, expression
            known = {"instance", "job"}.union(*(exported[name] for name in names))
            used = re.findall(r"(\w+)=~?\"", expression)
            lists = re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression)
            used += re.findall(r"\w+", " ".join(lists))
            assert set(used) <= known, expression
        for rule in rules:
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in ("warning", "critical")
            known = {"instance", "job"}.union(
                *(exported[name] for name in re.findall(r"\bdiscod_\w+", rule["expr"]))
            )
            said = " ".join(rule["annotations"].values())
            assert set(re.findall(r"\$labels\.(\w+)", said)) <= known, rule["alert"]

    def test_all_are_documented(self, monitored: Daemon) -> None:
        """Nobody could tell what a metric means, or what to do at an alert."""
        page = (DOCS / "monitoring.md").read_text()
        with urllib.request.urlopen(metrics_url(monitored), timeout=10) as reply:
            exported = set(re.findall(r"^# TYPE (discod_\w+)", reply.read().decode(), re.MULTILINE))
        assert set(re.findall(r"`(discod_\w+)`", page)) == exported
        alerts = set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
        assert set(re.findall(r"`(Discod\w+)`", page)) == alerts

    def test_names_keep_to_prometheus_conventions(self, monitored: Daemon) -> None:
        """Tools that go by name would draw a total as a level, or bytes as seconds."""
        with urllib.request.urlopen(metrics_url(monitored), timeout=10) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        ours = [family for family in families if family.name.startswith("discod_")]
        assert len(ours) > 25
        for family in ours:
            assert re.fullmatch(r"discod(_[a-z0-9]+)+", family.name)
            assert family.documentation.endswith(".")
            assert family.type in ("gauge", "counter")
            assert not re.search(r"_(total|ms|kb|mb|gb|percent|count)$", family.name)
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter")

    def test_only_the_metrics_are_there(self, monitored: Daemon) -> None:
        """A page that looks right would be scraped under a wrong path; nothing may be changed."""
        url = metrics_url(monitored)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url.replace("/metrics", "/other"), timeout=10)
        assert caught.value.code == 404
        caught.value.close()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, b"x", method="POST"), timeout=10)
        assert caught.value.code == 501
        caught.value.close()

    def test_an_address_that_is_taken(
        self, monitored: Daemon, start_daemon: Start, tmp_path: Path
    ) -> None:
        """The daemon would run, and nobody notice until the first graph is missing."""
        taken = monitored.status()["metrics"]
        other = tmp_path / "other"
        other.mkdir()
        sockets = tmp_path / "sockets"
        daemon = start_daemon("--metrics", taken, scratch=other, socket_dir=sockets, ready=False)
        assert daemon.wait() == Exit.METRICS_UNUSABLE
        for part in (f"metrics cannot be served on {taken}", "Address already in use", "--metrics"):
            assert part in daemon.log
        assert not sockets.exists() or os.listdir(sockets) == []

    @pytest.mark.parametrize("wrong", ["9478", "127.0.0.1:", "127.0.0.1:99999", "::1:9478", ":1"])
    def test_an_address_that_is_none(self, wrong: str, scratch: Path) -> None:
        """It would listen elsewhere than was meant."""
        result = run("--scratch", str(scratch), "--metrics", wrong)
        assert result.returncode == Exit.USAGE
        assert "127.0.0.1:9478" in result.stderr

    def test_peers_that_say_nothing(self, monitored: Daemon, raw_client: Connect) -> None:
        """Whoever can connect could take threads and fds without end, or stop the daemon."""
        host, port = monitored.status()["metrics"].rsplit(":", 1)
        threads = len(os.listdir(f"/proc/{monitored.pid}/task"))
        with contextlib.ExitStack() as peers:
            for _ in range(3 * MOST_PEERS):
                peers.enter_context(socket.create_connection((host, int(port)), timeout=10))
            eventually(
                lambda: len(os.listdir(f"/proc/{monitored.pid}/task")) == threads + MOST_PEERS
            )
            assert isinstance(raw_client(monitored).write(0, 0, MIB), Done)
        eventually(lambda: len(os.listdir(f"/proc/{monitored.pid}/task")) == threads)
        assert value(scrape(monitored), "discod_clients") == 1

    def test_a_loop_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A scrape would hang with the daemon, or read its state while it changes."""
        monkeypatch.setattr("discod.metrics_server.SNAPSHOT_SECONDS", 0.05)
        posted: list[Callable[[], None]] = []

        def snapshot() -> Snapshot:
            raise AssertionError("made outside of the loop")

        server = MetricsServer(Address("127.0.0.1", 0), posted.append, snapshot)
        server.start()
        try:
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10)
            assert caught.value.code == 503
            assert b"within" in caught.value.read()
            assert len(posted) == 1
        finally:
            server.close()

    def test_ipv6_and_a_name(self, caplog: pytest.LogCaptureFixture) -> None:
        """An address that others write would not be understood."""
        with caplog.at_level("INFO"):
            for host in ("::1", "localhost"):
                try:
                    server = MetricsServer(Address(host, 0), lambda make: None, _none)
                except StartupError:
                    assert host == "::1", "a machine without IPv6"
                    continue
                server.close()
                assert server.address.startswith(("[::1]:", "127.0.0.1:"))
        assert "without a password" not in caplog.text
        server = MetricsServer(Address("0.0.0.0", 0), lambda make: None, _none)
        server.close()
        assert "without a password" in caplog.text

    def test_nothing_is_loaded_without_it(self) -> None:
        """Every daemon would start later and be larger for metrics that nobody asked for."""
        code = (
            "import sys, discod.server, discod.cli; "
            "sys.exit(any(m.split('.')[0] in ('prometheus_client', 'http') for m in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _none() -> Snapshot:
    raise AssertionError("no one asks")


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "discod", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | env,
        check=False,
    )


class Terminal:
    """``discod top`` in a terminal of 80 columns and 24 rows.

    Args:
        socket_dir: The daemon's.
    """

    def __init__(self, socket_dir: Path) -> None:
        self.master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(terminal)
        self.terminal = terminal
        command = [sys.executable, "-m", "discod", "top", "--interval", "0.1"]
        self.process = subprocess.Popen(
            [*command, "--socket-dir", str(socket_dir)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"TERM": "xterm"},
        )
        self._seen = ""

    def until(self, what: str, timeout: float = 20.0) -> None:
        """Read until the screen has shown it, after what was awaited before."""
        deadline = time.monotonic() + timeout
        while what not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{what!r} is not shown: {self._seen[-2000:]}"
            if select.select([self.master], [], [], left)[0]:
                text = os.read(self.master, 1 << 16).decode(errors="replace")
                self._seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        self._seen = self._seen.rpartition(what)[2]

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self.master, key)

    def ended(self, timeout: float = 10.0) -> int:
        """The exit code; what it still prints is read, so that it can end."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            if select.select([self.master], [], [], 0.01)[0]:
                self._seen += os.read(self.master, 1 << 16).decode(errors="replace")
        assert termios.tcgetattr(self.terminal) == self.modes, "the terminal is left as it was"
        return self.process.returncode

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        os.close(self.master)


def _take_terminal() -> None:
    """So that Ctrl-C is one, also where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def top(socket_dir: Path) -> Iterator[Terminal]:
    """``discod top`` on the daemon's sockets."""
    terminal = Terminal(socket_dir)
    yield terminal
    terminal.close()


class TestTop:
    def test_live(self, daemon: Daemon, top: Terminal) -> None:
        """It would show nothing of a training, or the first moment for ever."""
        top.until(f"pid {daemon.pid}")
        top.until("no clients")
        with attached(daemon):
            step()
            top.until(f"{os.getpid()}")
            top.until(" 1 cycles")
            step()
            eventually(lambda: disco_client.stats().live_blobs == 0)
            top.until(" cycles")
        top.until("no clients")
        top.press(b"q")
        assert top.ended() == 0

    def test_a_daemon_that_goes_and_comes(self, start_daemon: Start, top: Terminal) -> None:
        """Whoever watches over a restart would have to begin anew, and miss it."""
        top.until("Waiting for a daemon")
        first = start_daemon()
        top.until(f"pid {first.pid}")
        first.kill()
        top.until("Waiting for a daemon")
        second = start_daemon()
        top.until(f"pid {second.pid}")
        top.press(b"\x03")  # Ctrl-C
        assert top.ended() == 0

    def test_sigterm_puts_the_terminal_back(self, daemon: Daemon, top: Terminal) -> None:
        """The shell would be left without echo, on the wrong screen."""
        top.until(f"pid {daemon.pid}")
        top.process.terminate()
        assert top.ended() == 128 + 15

    def test_once_for_scripts(self, daemon: Daemon, raw_client: Connect, socket_dir: Path) -> None:
        """A script would get escape sequences, or not all clients."""
        for rank in range(14):
            raw_client(daemon, 2 * MIB, rank=rank)
        result = run("top", "--once", "--socket-dir", str(socket_dir))
        assert result.returncode == 0
        assert "\x1b" not in result.stdout
        assert result.stdout.count(" in flight") == 14
        assert max(map(len, result.stdout.splitlines())) <= 80

    def test_once_without_a_daemon(self, socket_dir: Path) -> None:
        """A script would take an empty screen for an idle daemon."""
        result = run("top", "--once", "--socket-dir", str(socket_dir))
        assert result.returncode == Exit.NO_DAEMON
        assert "discod --scratch" in result.stderr

    def test_without_a_terminal(self, socket_dir: Path) -> None:
        """A log would fill with screens."""
        result = run("top", "--socket-dir", str(socket_dir))
        assert result.returncode == Exit.USAGE
        assert "--once" in result.stderr


def test_a_wait_that_goes_on_is_seen(start_daemon: Start, tmp_path: Path) -> None:
    """A rank that has stood still for a minute would look like one that computes."""
    rules = Rules(tmp_path / "faults")
    daemon = start_daemon(env=rules.environment)
    with attached(daemon):
        rules.set("pwritev delay=60")
        training = threading.Thread(target=step)
        training.start()
        eventually(
            lambda: daemon.status()["clients"][0]["waits"]["room"]["share"] > 0.3,
            what="the wait",
        )
        assert training.is_alive()
        rules.clear()
        training.join(20)
        assert not training.is_alive()
        # A report of what has been since comes with the end of the cycle, or the next one.
        eventually(lambda: step() or daemon.status()["clients"][0]["cycles"])
        room = daemon.status()["clients"][0]["waits"]["room"]
        assert room["count"] >= 1
        assert room["seconds"] > 1
