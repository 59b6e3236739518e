"""The daemon's life: start-up, messages and answers, the drained exit.

Everything runs on one event loop in which nothing waits: disks are for :mod:`discod.engine`, other
slow calls for :mod:`discod.chores`. How clients come and go is in :mod:`discod.clients`.

The drained exit
----------------
1. The first SIGTERM or SIGINT: no more attaches; what has been received is answered as ever, what
   is in the socket is received once more, and then no more.
2. When nothing is in flight, or after ``DRAIN_SECONDS``, when what is queued is dropped without an
   answer: the answers are flushed, the sockets unlinked, and the process exits.
3. What a client has not had an answer to by then it sends again to the next daemon.

A second signal skips all of that.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from discod import __version__, checksum, faults
from discod.activation import passed_sockets
from discod.admission import Admission, Admitted, Device
from discod.budget import Budget
from discod.chores import Chores
from discod.clients import Clients, End
from discod.closer import Closer
from discod.config import FIRST_CLIENT_SECONDS, Config, default_disk_bytes, default_ram_bytes
from discod.descriptors import LEAST_LIMIT, Descriptors
from discod.engine import Engine
from discod.exits import Exit, StartupError
from discod.gpus import Gpus
from discod.health import Outages
from discod.io_connections import IoConnections, Owner
from discod.logs import RateLimited
from discod.loop import Loop, Timer
from discod.notify import ServiceManager
from discod.permits import Permits
from discod.recorder import MOST_CALLS, Recorder
from discod.router import MAX_REQUEST_BYTES, Router
from discod.socket_dir import SocketDir
from discod.status import Snapshot, Status, make_status, to_json
from discod.storage import Directory
from discod.tenant import Tenant, Who
from discod.trace import Recorded
from discod.trimming import Trimmer
from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import WireError, decode, encode
from discod.wire.messages import Failed, Failure, Message, Reply, Request, Welcome
from discod.wire.sizes import format_size
from discod.write_record import WriteRecord
from discod.writes import Writes

if TYPE_CHECKING:
    from discod.metrics_server import MetricsServer

MESSAGES_PER_ROUND = 256
"""Then the loop looks after lifelines and attaches, whatever else a client has sent."""
CONNECTIONS_PER_ROUND = 256
"""The same for connections to the I/O socket."""
MESSAGES_AT_THE_END = 100_000
"""All that is there, and not without end from a client that goes on sending."""

DRAIN_SECONDS = 3.0
"""The exit takes 5 s at most; service managers and schedulers send SIGKILL some time later."""
DROP_SECONDS = 0.5
"""Then, at most, for the pieces that are in flight when what is queued is dropped."""

_log = logging.getLogger(__name__)
_foreign = RateLimited(_log)


class Server:
    """The daemon. It listens once it is made; :meth:`run` serves until a signal or idleness.

    Args:
        config: Its options.

    Raises:
        StartupError: It cannot start; what it has locked by then is free when the process exits.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started_at = time.monotonic()
        descriptors = Descriptors(_raise_fd_limit())
        _check_fd_limit(descriptors, config)
        passed = passed_sockets()
        socket_dir = config.socket_dir if passed is None else passed.directory
        self._socket_dir = SocketDir(socket_dir, config.allow_gids, passed)
        io = faults.from_environment()
        directories = [Directory(path, io) for path in config.scratch]
        self._ram = Budget(config.ram_bytes or default_ram_bytes())
        free = ((directory.device, directory.free_bytes()) for directory in directories)
        self._disk = Budget(config.disk_bytes or default_disk_bytes(free))
        self._loop = Loop()
        # Before anybody finds the sockets: process 1 never gets a signal that it does not handle.
        self._watch_signals()
        self._manager = ServiceManager(self._loop)
        self._metrics = self._make_metrics()
        self._chores = Chores(self._loop.post)
        self._record = WriteRecord(config.scratch, self._chores)
        self._writes = self._make_writes()
        engines: dict[int, Engine] = {}
        calls = MOST_CALLS // len({directory.device for directory in directories})
        for directory in directories:
            if directory.device not in engines:
                name = f"io-{len(engines)}"
                engines[directory.device] = Engine(
                    *(config.threads, config.chunk_bytes, self._loop.post, io, name),
                    Recorder(calls),
                )
        self._engines = list(engines.values())
        self._devices = [Device(d, engines[d.device]) for d in directories]
        self._recorded = Recorded(self._devices)
        self._outages = Outages(directories, self._loop)
        self._epoch = int.from_bytes(os.urandom(8), "big") >> 1
        self._draining = False
        self._signal = 0
        self._idle_timer: Timer | None = None
        self._trimmer = Trimmer(self._loop, self._chores)
        self._gpus = Gpus(self._loop)
        listener = self._socket_dir.listen()
        try:
            self._router = Router(self._socket_dir.io_path, None if passed is None else passed.io)
            self._socket_dir.open_to_clients()
        except (OSError, StartupError) as error:
            listener.close()
            self._socket_dir.remove_sockets()
            if isinstance(error, StartupError):
                raise
            raise self._socket_dir.unusable(error) from error
        self._connections_changed = True
        messages_fd, connections_fd = self._router.fds
        self._loop.add_reader(messages_fd, lambda: None)  # received in every round: _more()
        self._loop.add_reader(connections_fd, self._look_at_connections)
        self._io_connections = IoConnections(self._clients_of, descriptors.most_io_connections)
        closer = Closer()
        self._clients = Clients(
            self._loop,
            self._chores,
            Admission(
                self._devices,
                self._ram,
                self._disk,
                self._chores,
                self._loop,
                closer,
                descriptors,
                self._clients_changed,
            ),
            Permits(config.allow_gids),
            closer,
            descriptors.most_handshakes,
            listener,
            self._welcome,
            self._status,
            self._recorded.reply,
            self._make_tenant,
            self._clients_changed,
            self._io_connections.client_gone,
        )
        _log.info(
            "discod %s (pid %d) serves %s on %s: arenas up to %s, scratch up to %s, %d threads per "
            "device, chunks of %s, checksums %s",
            __version__,
            os.getpid(),
            ", ".join(map(str, config.scratch)),
            self._socket_dir.path,
            format_size(self._ram.limit_bytes),
            format_size(self._disk.limit_bytes),
            config.threads,
            format_size(config.chunk_bytes),
            config.checksum.value,
        )
        if config.checksum is checksum.Mode.OFF:
            _log.warning(
                "checksums are off: what the disk gives back is not verified, and a fault of it is "
                "a wrong gradient; --checksum sampled finds most of them next to free"
            )

    def run(self) -> Exit:
        """Serve until the end, then leave nothing but what the kernel cleans up."""
        if self._config.exit_idle_seconds:
            first = max(self._config.exit_idle_seconds, FIRST_CLIENT_SECONDS)
            self._idle_timer = self._loop.call_later(first, self._idle)
        if self._metrics is not None:
            self._metrics.start()
        self._manager.ready()
        try:
            self._loop.run(self._more)
            _log.info("discod ends: %s", signal.strsignal(self._signal) if self._signal else "idle")
        finally:
            self._router.close()
            self._socket_dir.remove_sockets()
            self._gpus.stop()
            if self._metrics is not None:
                self._metrics.close()
        if self._config.write_budget is not None:
            self._record.save_now(self._writes.entries())
        if not self._clients.in_flight:
            for engine in self._engines:
                engine.stop()
        return Exit.OK

    def _more(self) -> bool:
        more = False
        if self._connections_changed:
            accepted = self._io_connections.accepted
            more = self._router.take_connections(accepted, self._io_ended, CONNECTIONS_PER_ROUND)
            self._connections_changed = more
        if not self._draining:
            for engine in self._engines:
                engine.hold()
            more |= self._router.receive(self._message, MESSAGES_PER_ROUND)
            for engine in self._engines:
                engine.let_go()
        return more

    def _look_at_connections(self) -> None:
        self._connections_changed = True

    def _message(self, identity: bytes, body: bytes) -> None:
        client = self._clients.find(identity)
        if client is None:
            self._foreign_message(identity, body)
            return
        if client.tenant.closing:
            return
        if client.io_fd is None:
            client.io_fd = self._router.source_fd()
        try:
            request = _decode(body)
        except WireError as error:
            self._clients.hang_up(client, f"it broke the protocol: {error}", End.BREACH)
            return
        try:
            client.tenant.handle(request)
        except Exception:  # noqa: BLE001  a bug here is that client's alone
            _log.exception("%s: %r", client.tenant.who, request)
            self._clients.hang_up(client, "the daemon failed at a request of it", End.LOST)

    def _foreign_message(self, identity: bytes, body: bytes) -> None:
        _foreign.warning("message from %.32s, which is no client's identity", identity.hex())
        with contextlib.suppress(WireError):
            request = _decode(body)
            text = "its sender is not attached"
            reply = Failed(request.seq, request.epoch, Failure.REFUSED, 0, text)
            self._router.send(identity, encode(reply))

    def _clients_of(self, owner: Owner) -> int:
        return self._clients.count_of(owner)

    def _io_ended(self, fd: int) -> None:
        """An I/O connection has ended: what was under way on it is lost, in both directions."""
        self._io_connections.ended(fd)
        self._clients.io_ended(fd)

    def _make_tenant(self, identity: bytes, who: Who, admitted: Admitted) -> Tenant:
        return Tenant(
            who,
            self._epoch,
            admitted.mapping,
            admitted.files,
            self._config.checksum,
            self._gpus,
            partial(self._answer, identity),
            self._trimmer.idle,
            checksum.sample_step_bytes(self._config.chunk_bytes),
            self._writes,
            self._recorded.waited,
        )

    def _make_writes(self) -> Writes:
        budget = self._config.write_budget
        if budget is None:
            return Writes()
        writes = Writes(budget, self._loop.call_later, self._record.save)
        writes.restore(self._record.load())
        _log.info(
            "write budget %s, of which %s are used",
            budget,
            format_size(sum(size for _, size in writes.entries())),
        )
        return writes

    def _answer(self, identity: bytes, reply: Reply) -> None:
        if not self._router.send(identity, encode(reply)):
            client = self._clients.find(identity)
            if client is not None:
                # It attaches again and resends what has no answer.
                self._clients.hang_up(client, "it takes no answers", End.LOST)
        self._stop_when_drained()

    def _welcome(self) -> Welcome:
        return Welcome(
            protocol=PROTOCOL_VERSION,
            version=__version__,
            epoch=self._epoch,
            pid=os.getpid(),
            ram_bytes=self._ram.limit_bytes,
            ram_free_bytes=self._ram.free_bytes,
            disk_bytes=self._disk.limit_bytes,
            directories=tuple(str(device.directory.path) for device in self._devices),
        )

    def _make_metrics(self) -> "MetricsServer | None":
        if self._config.metrics is None:
            return None
        # Prometheus' client costs some 8 MB.
        from discod.metrics_server import MetricsServer

        return MetricsServer(self._config.metrics, self._loop.post, self._snapshot)

    def _make_status(self) -> Status:
        return make_status(
            self._config,
            self._devices,
            self._ram,
            self._disk,
            self._writes,
            self._clients.tenants,
            self._gpus.status(),
            time.monotonic() - self._started_at,
            None if self._metrics is None else self._metrics.address,
        )

    def _status(self) -> str:
        return to_json(self._make_status())

    def _snapshot(self) -> Snapshot:
        ranks, tenants = self._clients.ranks, list(self._clients.tenants)
        totals = ranks.totals(tenants)
        names = [ranks.name(tenant.who.rank) for tenant in tenants]
        return Snapshot(self._make_status(), totals, names)

    def _clients_changed(self) -> None:
        self._stop_when_drained()
        self._manager.clients(self._clients.count)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._config.exit_idle_seconds and not self._in_use:
            after = self._config.exit_idle_seconds
            self._idle_timer = self._loop.call_later(after, self._idle)

    @property
    def _in_use(self) -> bool:
        """Whether there is anybody, or may come back for what is kept here."""
        return bool(self._clients.count or self._clients.awaited)

    def _idle(self) -> None:
        if self._in_use:
            # Someone is just attaching, or asks for the status, or is awaited.
            self._idle_timer = self._loop.call_later(1.0, self._idle)
        else:
            self._loop.stop()

    def _watch_signals(self) -> None:
        self._signals, waker = socket.socketpair()
        self._signals.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            # The handler must exist for the wakeup fd to be written to.
            signal.signal(number, lambda *_: None)
        self._loop.add_reader(self._signals.fileno(), self._signalled)

    def _signalled(self) -> None:
        for number in self._signals.recv(64):
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            if self._draining:
                self._socket_dir.remove_sockets()
                os._exit(Exit.FORCED)
            self._signal = number
            self._drain()

    def _drain(self) -> None:
        """Step 1 of the drained exit."""
        self._manager.stopping()
        name = signal.strsignal(self._signal)
        _log.info("%s: %d requests in flight", name, self._clients.in_flight)
        self._clients.stop_accepting()
        self._loop.call_later(DRAIN_SECONDS, self._drop)
        self._router.receive(self._message, MESSAGES_AT_THE_END)
        self._draining = True
        # Connections are still looked at.
        self._loop.remove_reader(self._router.fds[0])
        self._stop_when_drained()

    def _stop_when_drained(self) -> None:
        if self._draining and not self._clients.in_flight:
            self._loop.stop()

    def _drop(self) -> None:
        _log.warning("%d requests are left to the next daemon", self._clients.in_flight)
        self._loop.call_later(DROP_SECONDS, self._loop.stop)
        self._clients.cancel_all(self._stop_when_drained)


def _raise_fd_limit() -> int:
    """To what is allowed: a client takes four fds and one for each scratch directory."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _check_fd_limit(descriptors: Descriptors, config: Config) -> None:
    """A limit that is too low is a danger from other users alone: our own could do worse."""
    if descriptors.enough:
        return
    text = (
        f"at most {descriptors.limit} fds are allowed: from {LEAST_LIMIT} on no number of "
        "connections can end the daemon; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
    )
    if config.allow_gids:
        raise StartupError(Exit.USAGE, f"{text}; not started with --allow-group")
    _log.warning("%s", text)


_REQUESTS: tuple[type[Message], ...] = get_args(Request)


def _decode(body: bytes) -> Request:
    if len(body) > MAX_REQUEST_BYTES:
        raise WireError(f"a request of {len(body)} bytes: {MAX_REQUEST_BYTES} are the most")
    # mypy infers the bound of decode's type variable for several classes.
    return cast(Request, decode(body, *_REQUESTS))
