"""``--metrics``: the HTTP endpoint that Prometheus scrapes. Only loaded when it is asked for.

It has threads of its own, which touch nothing of the daemon's: each scrape posts one callback to
the event loop, which makes a snapshot, and waits for it. Peers that are slow, many or hostile can
keep others from the metrics, and nothing else: there are ``MOST_PEERS`` at a time.
"""

import contextlib
import http.server
import ipaddress
import logging
import signal
import socket
import socketserver
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from discod import __version__
from discod.config import Address
from discod.exits import Exit, StartupError
from discod.metrics import Collector
from discod.status import Snapshot

PATH = "/metrics"
MOST_PEERS = 8
PEER_SECONDS = 5.0
"""Most time between two bytes of a peer's."""
SNAPSHOT_SECONDS = 3.0
"""The event loop makes it within a millisecond; scrapers give up after 10 s by default."""

_log = logging.getLogger(__name__)


class MetricsServer:
    """The endpoint. It is bound once this is made.

    Args:
        address: Where it listens.
        post: Hands a callback to the event loop, from any thread.
        snapshot: Makes a snapshot, on the event loop.

    Raises:
        StartupError: It cannot listen there.
    """

    def __init__(
        self,
        address: Address,
        post: Callable[[Callable[[], None]], None],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._post = post
        self._snapshot = snapshot
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        try:
            family, _, _, _, bound = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._server = _Server(family, bound[:2], partial(_Handler, self))
        except OSError as error:
            raise StartupError(
                Exit.METRICS_UNUSABLE,
                f"metrics cannot be served on {address}: {error.strerror or error}; not started; "
                "give --metrics (DISCOD_METRICS) an address of this machine and a free port, or "
                "leave it away",
            ) from error
        host = self._server.server_address[0]
        self.address = str(Address(str(host), self._server.server_address[1]))
        _log.info("metrics are served on http://%s%s", self.address, PATH)
        if not ipaddress.ip_address(str(host).partition("%")[0]).is_loopback:
            _log.warning(
                "metrics: whoever reaches %s can read them, without a password; 127.0.0.1 keeps "
                "them on this machine",
                self.address,
            )

    def start(self) -> None:
        """Serve, in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Take no more scrapes; those under way end by themselves."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        if self._thread.is_alive():
            self._thread.join()
        self._server.server_close()

    def take(self) -> Snapshot | None:
        """A snapshot, for a thread that is not the loop's. None: the loop did not make it."""
        taken: list[Snapshot] = []
        done = threading.Event()

        def make() -> None:
            try:
                taken.append(self._snapshot())
            finally:
                done.set()

        self._post(make)
        done.wait(SNAPSHOT_SECONDS)
        return taken[0] if taken else None

    def _serve(self) -> None:
        # Signals belong to the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._closing:
            self._server.handle_request()  # serve_forever() wakes up twice a second


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = MOST_PEERS

    def __init__(
        self, family: socket.AddressFamily, address: Any, handler: Callable[..., "_Handler"]
    ) -> None:
        self.address_family = family
        self._peers = threading.BoundedSemaphore(MOST_PEERS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks up the host's name, which may take a DNS server's time.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._peers.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._peers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("metrics: %s", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = PEER_SECONDS
    server_version = f"discod/{__version__}"
    sys_version = ""

    def __init__(self, metrics: MetricsServer, *args: Any) -> None:
        self._metrics = metrics
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain", f"the metrics are at {PATH}\n".encode())
            return
        snapshot = self._metrics.take()
        if snapshot is None:
            text = f"the daemon gave no metrics within {SNAPSHOT_SECONDS:.0f} s\n"
            self._answer(503, "text/plain", text.encode())
            return
        registry = CollectorRegistry()
        registry.register(Collector(snapshot))
        ProcessCollector(registry=registry)
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(200, content_type, encode(registry))

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone away
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("metrics: " + format, *args)
