"""Trainers and a daemon, real code over a simulated machine, in one thread: a seed decides it all.

Real are, on the trainer's side, session, residency, transfers, link and greeting over an arena; on
the daemon's, server, clients, handshakes, admission, tenants, schedule and jobs over scratch files
and unix sockets. Simulated are ZeroMQ (:mod:`network`), the loop, the threads and the clock
(:mod:`machine`), and death: of processes, and of a connection alone.

While a trainer waits, the world goes on by some steps, chosen at random from all that are possible;
faults are among them while :attr:`World.faulty`. What must hold is checked at every step.
"""

import contextlib
import logging
import os
import random
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import zmq

from disco_client import greeting, io_connection, link, monitor, reporter, session, waits
from disco_client.greeting import Greeting
from disco_client.link import Link
from discod import attach, closer, locks, logs, server, tenant, trimming
from discod.wire.fds import receive_message
from discod.wire.messages import Request
from tests.model import machine
from tests.model.daemon import Daemon
from tests.model.machine import Clock, SteppedChores, SteppedEngine, SteppedLoop
from tests.model.network import Context, Network, Router
from tests.model.trainer import MOST_STEPS, Trainer

PATIENCE_SECONDS = 15.0
"""Most time of a call, once nothing fails any more."""


class World:
    """See the module's text.

    Args:
        path: An empty directory.
        seed: Of all choices.
        faults: How often, of a thousand steps, something dies.
    """

    def __init__(self, path: Path, seed: int, faults: int = 20) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.network = Network(self.chance)
        self.scratch = path / "scratch"
        self.socket_dir = path / "run"
        self.scratch.mkdir(exist_ok=True)
        self.faulty = True
        self.was_frozen = False
        self.daemon: Daemon | None = None
        self.leaving: Daemon | None = None
        self.trainers: list[Trainer] = []
        self.dead: list[Trainer] = []
        self.connecting: list[int] = []
        self.handed_over: set[int] = set()
        """Fds that the daemon got from clients and has not closed yet."""
        self.running: Trainer | None = None
        self.steps_left = MOST_STEPS
        self.violations: list[str] = []
        self.events: dict[str, int] = {}
        self._faults = faults
        self._stack = contextlib.ExitStack()
        try:
            self._patch()
            self.start()
        except BaseException:
            self._stack.close()
            raise

    # Time

    def go_on(self, timeout: float) -> None:
        """Some steps, and some time up to ``timeout``."""
        for _ in range(self.chance.randint(1, 6)):
            self.step()
        self.clock.now += self.chance.choice((0.0, 0.001, 0.01, 0.05)) * min(1.0, timeout * 10)

    def step(self) -> None:
        """One step of anything."""
        self.steps_left -= 1
        assert self.steps_left, "it hangs"
        if self.faulty and self.chance.randrange(1000) < self._faults:
            self.fault()
        found = self.network.steps()
        if self.daemon is None:
            found.append(self.start)
        else:
            found += self.daemon.steps()
        if found:
            self.chance.choice(found)()
        self.check()

    def settle(self) -> None:
        """Without faults, until nothing is left to do but to wait for the clock."""
        for _ in range(MOST_STEPS):
            found = self.network.steps() + (self.daemon.steps() if self.daemon else [self.start])
            if not found:
                return
            self.chance.choice(found)()
            self.check()
        raise AssertionError("it does not come to rest")

    # Faults

    def fault(self) -> None:
        """Something dies."""
        kind = self.chance.choice(
            ("kill", "kill", "term", "sever", "sever", "freeze", "trainer", "late")
        )
        self.events[kind] = self.events.get(kind, 0) + 1
        if kind == "kill" and self.daemon is not None:
            self.kill()
        elif kind == "term" and self.daemon is not None:
            self.terminate()
        elif kind == "sever" and self.network.connections:
            self.network.sever(self.chance.choice(self.network.connections))
        elif kind == "freeze" and self.daemon is not None:
            self.daemon.frozen_until = self.clock.now + self.chance.choice((0.2, 2.0, 9.0))
            self.was_frozen = True
        elif kind == "trainer":
            grown = [trainer for trainer in self.trainers if hasattr(trainer, "session")]
            if len(grown) > 1:
                self.chance.choice(grown).crash()
        elif kind == "late":
            self.clock.now += self.chance.choice((0.2, 1.0, 3.0))

    def kill(self) -> None:
        """SIGKILL to the daemon."""
        assert self.daemon is not None
        daemon, self.daemon = self.daemon, None
        daemon.die()

    def terminate(self) -> None:
        """SIGTERM: drained, and gone; nobody else runs meanwhile but the network."""
        assert self.daemon is not None
        daemon = self.daemon
        daemon.frozen_until = 0.0
        daemon.server._signal = 15
        daemon.server._drain()
        ends = self.clock.now + 10
        while not daemon.loop.stopped:
            found = daemon.steps() + self.network.steps()
            if not found or self.chance.random() < 0.05:
                self.clock.now += 0.1
            if found:
                self.chance.choice(found)()
            assert self.clock.now < ends, "the drained exit takes over 10 s"
        self.daemon = None
        daemon.leave()

    def start(self) -> None:
        """A new daemon, which finds no lock of the old one."""
        self.daemon = Daemon(self)

    # What must hold

    def check(self) -> None:
        """After every step."""
        if self.daemon is not None:
            self.note(self.daemon.engine.violations)
            tenants = list(self.daemon.clients.tenants)
            inodes = [file.scratch.inode for t in tenants for file in t.files]
            if len(inodes) != len(set(inodes)):
                self.violations.append("two tenants have one scratch file")
        assert not self.violations, self.violations

    def note(self, violations: list[str]) -> None:
        """Of an engine."""
        self.violations += violations

    def finish(self) -> None:
        """No more faults: all that was saved is loaded and freed, and nothing is left."""
        self.faulty = False
        if self.daemon is not None:
            self.daemon.frozen_until = 0.0
        for trainer in list(self.trainers):
            trainer.drop_views()
            began = self.clock.now
            for blob in list(trainer.blobs):
                trainer.load(blob)
                waited = self.clock.now - began
                assert waited < PATIENCE_SECONDS, f"{waited} s for a daemon that is there"
                began = self.clock.now
                trainer.free(blob)
            trainer.drop_views()
            trainer._call(lambda t=trainer: t.session.wait_for(lambda: not t.link._pending))
            residency = trainer.session._residency
            assert residency.live_blobs == residency.arena_used_bytes == 0
            assert residency.scratch.used_bytes == 0
        for _ in range(3):
            self.clock.now += 10
            self.settle()
        assert self.daemon is not None
        attached = sum(not trainer.link.lost for trainer in self.trainers)
        tenants = list(self.daemon.clients.tenants)
        assert len(tenants) == attached, f"{len(tenants)} tenants of {attached} trainers"
        for trainer in list(self.trainers):
            trainer.close()
        for _ in range(3):
            self.clock.now += 10
            self.settle()
        one = self.daemon.server
        if one._clients._admission.parking._lots:
            # A close() that the daemon did not hear: its files are kept as long as its process.
            for trainer in self.dead:
                os.eventfd_write(trainer.life, 1)
            self.settle()
        assert list(one._clients.tenants) == []
        assert one._clients.in_flight == 0
        assert one._ram.used_bytes == 0
        assert one._disk.used_bytes == 0
        assert not one._clients._admission._held
        assert not one._clients._waiting
        assert not one._clients._handshakes
        assert len(self.daemon.loop.readers) == 3, "fds are watched of clients that are gone"

    def close(self) -> None:
        """Remove everything; idempotent."""
        self.faulty = False
        with self._stack:  # whatever fails: no other test may see what was put in place
            for trainer in list(self.trainers):
                trainer.crash()
            if self.daemon is not None:
                self.kill()
            for trainer in self.dead:
                os.close(trainer.life)
            self.dead = []

    # The simulated machine

    def _patch(self) -> None:
        world = self
        time = machine.module(self.clock)
        for target in (link, session, monitor, reporter, waits, tenant, trimming, logs, locks):
            self._put(target, "time", time)
        kernel = SimpleNamespace(
            Context=lambda: Context(self.network),
            **{name: getattr(zmq, name) for name in dir(zmq) if name.isupper()},
            **{n: getattr(zmq, n) for n in ("Again", "ZMQError", "Event") if hasattr(zmq, n)},
        )
        self._put(io_connection, "zmq", kernel)
        self._put(server, "Loop", lambda: SteppedLoop(self.clock))
        self._put(server, "Chores", SteppedChores)
        self._put(server, "Engine", SteppedEngine)
        self._put(server, "Router", lambda path, bound: Router(self.network, path))
        self._put(server.Server, "_watch_signals", lambda _: None)
        self._put(server, "_raise_fd_limit", lambda: 1 << 20)
        self._put(attach, "receive_message", self._take_over)
        self._put(closer.Closer, "close", lambda _, fds, uid: self._close_fds(fds))
        self._put(attach, "_pidfd", lambda connection, pid: os.dup(self.connecting.pop(0)))

        def wait(one: Link, timeout: float) -> None:
            world.go_on(timeout)

        self._put(Link, "wait", wait)
        self._put(greeting, "receive_message", self._receive)
        connect = Greeting._connect

        def connecting(one: Greeting) -> None:
            connect(one)
            assert world.running is not None
            world.connecting.append(world.running.life)

        self._put(Greeting, "_connect", connecting)
        start = tenant.Tenant._start

        def started(one: Any, request: Request, *args: Any) -> None:
            if request.epoch != one._epoch:
                world.violations.append("a request of an old epoch is carried out")
            start(one, request, *args)

        self._put(tenant.Tenant, "_start", started)
        for name in ("free", "unmap"):
            self._put(tenant.Tenant, name, _marking(getattr(tenant.Tenant, name)))
        logging.disable(logging.ERROR)
        self._stack.callback(logging.disable, logging.NOTSET)

    def _put(self, target: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(target, name, value))

    def _receive(self, connection: socket.socket, *expected: Any) -> Any:
        """The daemon goes on while a trainer awaits its word, which may come too late."""
        timeout = connection.gettimeout() or 0.0
        ends = self.clock.now + timeout
        while True:
            self.go_on(timeout)
            if self.clock.now > ends:
                raise TimeoutError("timed out")
            connection.setblocking(False)
            try:
                return receive_message(connection, *expected)
            except BlockingIOError:
                continue
            finally:
                connection.settimeout(timeout)

    def _take_over(self, connection: socket.socket, *expected: Any, close: Any) -> Any:
        """As ``receive_message``, in the daemon."""
        message, fds = receive_message(connection, *expected)
        self.handed_over |= set(fds)
        return message, fds

    def _close_fds(self, fds: Sequence[int]) -> None:
        """As ``close_fds``, in the daemon."""
        for fd in fds:
            self.handed_over.discard(fd)
            os.close(fd)


def _marking(release: Callable[[Any], None]) -> Callable[[Any], None]:
    def released(one: Any) -> None:
        one.freed = True
        release(one)

    return released
