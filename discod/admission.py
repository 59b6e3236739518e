"""Who is let in: the memory budget, the checks of what a client hands over, its files opened.

Everything that can wait for a disk or for memory runs as a chore; the event loop goes on.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from discod.budget import Budget
from discod.chores import Chores
from discod.engine import Engine
from discod.mapping import BadArena, Mapping, check_arena
from discod.scratch_file import ScratchFile
from discod.storage import Directory
from discod.tenant import File, Tenant
from discod.wire import LEAST_ARENA_BYTES
from discod.wire.messages import Attach
from discod.wire.sizes import format_size

Inode = tuple[int, int]


class Inadmissible(Exception):
    """The client cannot be let in; the text is for its user."""


@dataclass(frozen=True, slots=True)
class Device:
    """A scratch directory and the engine of its device."""

    directory: Directory
    engine: Engine


@dataclass(slots=True)
class Admitted:
    """What a new tenant gets.

    Attributes:
        path_fds: ``O_PATH`` fds to send to the client: none when it resumes, since it has them.
    """

    mapping: Mapping
    files: list[File] = field(default_factory=list)
    path_fds: list[int] = field(default_factory=list)

    def free(self) -> None:
        """Give it all back, when there will be no tenant."""
        self.mapping.close()
        for file in self.files:
            file.scratch.close(discard=False)
        close_fds(self.path_fds)


class Admission:
    """Lets clients in.

    Args:
        devices: The scratch directories.
        ram: The arena bytes of all clients.
        disk: The scratch bytes of all clients.
        chores: Where the slow part runs.
    """

    def __init__(
        self, devices: Sequence[Device], ram: Budget, disk: Budget, chores: Chores
    ) -> None:
        self._devices = devices
        self._ram = ram
        self._disk = disk
        self._chores = chores
        self._held: set[Inode] = set()

    def holds(self, inodes: Iterable[Inode]) -> bool:
        """Whether any of these files is some tenant's already."""
        return not self._held.isdisjoint(inodes)

    def admit(
        self,
        attach: Attach,
        fds: list[int],
        tenants: Iterable[Tenant],
        decided: Callable[[Admitted | Exception], None],
    ) -> None:
        """Check and open everything; ``decided`` gets the outcome, now or later. Closes ``fds``.

        ``tenants``: Who is there already, for the text of a refusal.
        """
        arena_bytes = attach.arena_bytes
        inodes = {inode(fd) for fd in fds[1:]}
        try:
            self._check(attach, fds, inodes, tenants)
        except (Inadmissible, BadArena, OSError) as error:
            close_fds(fds)
            decided(error)
            return
        self._held |= inodes

        def opened(outcome: Admitted | Exception) -> None:
            close_fds(fds)
            if isinstance(outcome, Exception):
                self._ram.release(arena_bytes)
                self._held -= inodes
            else:
                self._held |= {file.scratch.inode for file in outcome.files}
            decided(outcome)

        self._chores.submit(partial(self._open, attach, fds), opened)

    def released(self, arena_bytes: int, files: Sequence[File]) -> None:
        """What was admitted has been freed."""
        self._ram.release(arena_bytes)
        self._held -= {file.scratch.inode for file in files}

    def _check(
        self,
        attach: Attach,
        fds: Sequence[int],
        inodes: set[Inode],
        tenants: Iterable[Tenant],
    ) -> None:
        """What can be checked at once; reserves the memory."""
        if not fds or (attach.resume and len(fds) < 2) or (not attach.resume and len(fds) != 1):
            raise Inadmissible(f"an attach with {len(fds)} fds: a fault of the client")
        check_arena(fds[0], attach.arena_bytes)
        if len(inodes) > len(self._devices):
            raise Inadmissible(
                f"it has {len(inodes)} scratch files, and this daemon has fewer directories; start "
                "it with every --scratch that the one before it had"
            )
        if len(inodes) != len(fds) - 1 or self.holds(inodes):
            raise Inadmissible("another client has its scratch files: a fault of the client")
        if not self._ram.reserve(attach.arena_bytes):
            raise Inadmissible(self._over_budget(attach.arena_bytes, tenants))

    def _over_budget(self, arena_bytes: int, tenants: Iterable[Tenant]) -> str:
        """Why there is no memory for such an arena, who has it, and what can be done."""
        least = " (the least there is)" if arena_bytes <= LEAST_ARENA_BYTES else ""
        text = (
            f"an arena of {format_size(arena_bytes)}{least} is over what is left of the daemon's "
            f"memory budget: {format_size(self._ram.free_bytes)} of "
            f"{format_size(self._ram.limit_bytes)}"
        )
        held = [(tenant.arena_bytes, tenant.who.pid) for tenant in tenants]
        if held:
            count = f"{len(held)} clients hold" if len(held) > 1 else "1 client holds"
            largest_bytes, pid = max(held)
            text += (
                f". {count} {format_size(sum(size for size, _ in held))}, the most by pid {pid} "
                f"({format_size(largest_bytes)}; 'discod status' shows all)"
            )
        remedies = []
        if self._ram.free_bytes >= LEAST_ARENA_BYTES:
            remedies.append("ask for a smaller arena")
        if held:
            remedies.append("give those smaller ones")
        if remedies:
            remedies[-1] += " (DISCOD_ARENA, connect(arena=))"
        if held:
            remedies.append("end them")
        remedies.append("restart the daemon with a larger --ram (DISCOD_RAM)")
        return f"{text}; {', or '.join(remedies)}"

    def _open(self, attach: Attach, fds: Sequence[int]) -> Admitted:
        admitted = Admitted(Mapping(fds[0], attach.arena_bytes))
        try:
            if attach.resume:
                self._adopt(admitted, fds[1:])
            else:
                self._create(admitted)
        except BaseException:
            admitted.free()
            raise
        return admitted

    def _create(self, admitted: Admitted) -> None:
        for number, device in enumerate(self._devices):
            scratch = self._new_file(device.directory)
            if scratch is not None:
                admitted.files.append(File(scratch, device.engine, number))
                admitted.path_fds.append(os.open(f"/proc/self/fd/{scratch.fd}", os.O_PATH))
        if not admitted.files:
            raise Inadmissible("no scratch directory works; try again, and see 'discod status'")

    def _new_file(self, directory: Directory) -> ScratchFile | None:
        """None when the directory is out of use, perhaps since it failed at this."""
        if not directory.health.in_use:
            return None
        try:
            return directory.create(self._disk)
        except OSError as error:
            text = f"making a file failed: {error.strerror} (errno {error.errno})"
            if directory.health.note(error, text):
                raise Inadmissible(f"scratch {directory}: {text}") from error
            return None

    def _adopt(self, admitted: Admitted, path_fds: Sequence[int]) -> None:
        """Open the files in the client's order, each with the directory that it is in."""
        left = list(range(len(self._devices)))
        for fd in path_fds:
            device = os.fstat(fd).st_dev
            fitting = [n for n in left if self._devices[n].directory.device == device]
            # Several may be on one device. Where none fits, any refuses the file, and says why.
            made_here = [n for n in fitting if self._devices[n].directory.made(fd)]
            number = next(iter(made_here + fitting), 0)
            target = self._devices[number]
            scratch = target.directory.adopt(fd, self._disk)
            admitted.files.append(File(scratch, target.engine, number))
            left.remove(number)


def inode(fd: int) -> Inode:
    """What tells one open file from another."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def close_fds(fds: Sequence[int]) -> None:
    """Close them all."""
    for fd in fds:
        os.close(fd)
