"""Python processes that need not import torch again: forked from one that has.

``start("-c", code, ...)``, ``start("-m", module, ...)`` and ``start(script, ...)`` are what
``subprocess.Popen([sys.executable, ...])`` is, and the process that they give has the same methods.
It is forked before it has threads, an attachment or a torch that was used; from then on it is a
process as any other, down to the interpreter's end. Not for tests of imports and of the
interpreter's start.

1. A test's process starts the nursery, once: ``python -m tests.helpers.nursery FD``.
2. The test's process sends a request with four descriptors: the three standard ones, and one end
   of a connection of the new process's own.
3. The nursery forks, and says the pid on that connection, and later the exit code.
4. A process of the nursery that starts others has them from the same one, whose address is in its
   environment.
5. The nursery ends, when the test's process does, with its last child.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]

LOADED = ("torch", "torch.distributed", "disco_client", "disco_client.__main__")
LOADED_LATER = ("tests.helpers.models", "tests.helpers.training", "torch.distributed.fsdp")
"""Modules that most need."""

REQUEST_BYTES = 1 << 18
"""With an environment that may be long."""

ADDRESS = "NURSERY_SOCKET"
"""The variable with the name of the nursery's socket, which is an abstract one."""


class Process:
    """A process of the nursery, with the methods of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: Of the process, which is the nursery's child.
        returncode: As Popen has it, or None before its end was seen.
        stdin, stdout, stderr: The pipes that were asked for; others are None.
    """

    def __init__(
        self, pid: int, connection: socket.socket, pipes: Mapping[str, IO[str] | None]
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: Any = pipes["stdin"]
        self.stdout: Any = pipes["stdout"]
        self.stderr: Any = pipes["stderr"]
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: It has not ended in time.
        """
        if self.returncode is None:
            if not _readable(self._connection, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._connection.recv(64))
            self._connection.close()
        return self.returncode

    def communicate(
        self, text: str | None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        """Give it a text and the end of its input; all that it says until it ends.

        Raises:
            TimeoutExpired: It has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text or "")
        said: dict[IO[str], bytearray] = {}
        with selectors.DefaultSelector() as selector:
            for stream in (self.stdout, self.stderr):
                if stream is not None and not stream.closed:
                    said[stream] = bytearray()
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
                for key, _ in selector.select(left):
                    if not (data := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
                    said[key.fileobj] += data  # type: ignore[index]
        texts = []
        for stream in (self.stdout, self.stderr):
            texts.append(said[stream].decode() if stream in said else None)
            if stream is not None:
                stream.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """SIGKILL, wait for its end and close the pipes; idempotent."""
        self.kill()
        self.wait()
        _close_pipes(self)


class Fresh(subprocess.Popen[str]):
    """A process that has imported for itself, with the methods that one of the nursery has."""

    def close(self) -> None:
        """SIGKILL, wait for its end and close the pipes; idempotent."""
        self.kill()
        self.wait()
        _close_pipes(self)


_STREAMS = ("stdin", "stdout", "stderr")


def _close_pipes(process: Process | Fresh) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _readable(connection: socket.socket, timeout: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout))


def start(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ROOT,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    start_new_session: bool = False,
) -> Process:
    """Start Python with this command line; the rest is as in Popen, and pipes are of text."""
    pipes: dict[str, IO[str] | None] = dict.fromkeys(_STREAMS)
    theirs: list[int] = []
    made: list[int] = []
    for number, (name, stream) in enumerate(zip(_STREAMS, (stdin, stdout, stderr), strict=True)):
        if stream == subprocess.PIPE:
            reads, writes = os.pipe()
            ours, its = (writes, reads) if number == 0 else (reads, writes)
            pipes[name] = os.fdopen(ours, "w" if number == 0 else "r")
            made.append(its)
        elif stream == subprocess.DEVNULL:
            its = os.open(os.devnull, os.O_RDWR)
            made.append(its)
        else:
            its = (
                number if stream is None else stream if isinstance(stream, int) else stream.fileno()
            )
        theirs.append(its)
    ours_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {
        "command": list(map(str, command)),
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd),
        "new_session": start_new_session,
    }
    try:
        socket.send_fds(_nursery(), [json.dumps(request).encode()], [*theirs, its_end.fileno()])
    finally:
        its_end.close()
        for descriptor in made:
            os.close(descriptor)
    if not (pid := ours_end.recv(64)):
        raise RuntimeError("the nursery has ended; see its stderr")
    return Process(int(pid), ours_end, pipes)


def start_fresh(*command: str | Path, cwd: str | Path = ROOT, **options: Any) -> Fresh:
    """As :func:`start`, by a Python of its own: where a GPU is used, or the start is the test."""
    return Fresh([sys.executable, *map(str, command)], cwd=cwd, text=True, **options)


@functools.cache
def _nursery() -> socket.socket:
    """The connection to this process's nursery, which ends with it, or to the one it is from."""
    if ADDRESS in os.environ:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{os.environ[ADDRESS]}")
        return _roomy(connection)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.nursery", str(its.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return _roomy(ours)


def _roomy(connection: socket.socket) -> socket.socket:
    """A connection that takes any request."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * REQUEST_BYTES)
    return connection


# In the nursery


class Nursery:
    """Forks what it is asked for.

    Args:
        first: The connection of the process that started it.
    """

    def __init__(self, first: socket.socket) -> None:
        self._first = first
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._address = f"tests-nursery-{os.getpid()}"
        self._listener.bind(f"\0{self._address}")
        self._listener.listen()
        self._askers = [first]
        self._children: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> Callable[[], None] | None:
        """Fork what is asked for until the first one has ended, and all children too.

        Returns:
            In a child, what it is to run; None in the nursery itself.
        """
        while self._first in self._askers or self._children:
            ready, _, _ = select.select([self._listener, *self._askers, *self._children], [], [])
            for one in ready:
                if one is self._listener:
                    self._askers.append(self._listener.accept()[0])
                elif isinstance(one, int):
                    self._bury(one)
                elif work := self._answer(one):
                    return work
        return None

    def _answer(self, asker: socket.socket) -> Callable[[], None] | None:
        data, descriptors, _, _ = socket.recv_fds(asker, REQUEST_BYTES, 4)
        if not data:
            self._askers.remove(asker)
            asker.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._forget_all()
            request = json.loads(data)
            request["env"][ADDRESS] = self._address
            return functools.partial(_become, request, descriptors)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        connection = socket.socket(fileno=descriptors[3])
        self._children[os.pidfd_open(pid)] = (pid, connection)
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(pid).encode())
        return None

    def _bury(self, pidfd: int) -> None:
        pid, connection = self._children.pop(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, contextlib.suppress(BrokenPipeError):
            connection.send(str(code).encode())

    def _forget_all(self) -> None:
        for pidfd, (_, connection) in self._children.items():
            os.close(pidfd)
            connection.close()
        for one in (self._listener, *self._askers):
            one.close()


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the process that was asked for."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    kind, *arguments = request["command"]
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path[0] = ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[0], "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        sys.argv = arguments
        sys.path[0] = request["cwd"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *arguments]
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Load, and serve; a child comes out of here with its own work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests: they end what they started
    for name in (*LOADED, *LOADED_LATER):
        importlib.import_module(name)
    work = Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()
    if work is not None:
        work()


if __name__ == "__main__":
    main()
