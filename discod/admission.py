"""Who is let in: the memory budget, the checks of what a client hands over, its files opened.

Everything that can wait for a disk or for memory runs as a chore; the event loop goes on.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from discod.budget import Budget
from discod.chores import Chores
from discod.closer import Closer
from discod.descriptors import Descriptors, NoDescriptors
from discod.engine import Engine
from discod.loop import Loop
from discod.mapping import BadArena, Mapping, check_arena
from discod.parking import Inode, Lot, Parking
from discod.scratch_file import ScratchFile
from discod.storage import Directory
from discod.syscalls import stat_known
from discod.tenant import File, Tenant
from discod.traffic import Traffic
from discod.wire import LEAST_ARENA_BYTES
from discod.wire.fds import close_all
from discod.wire.messages import Attach
from discod.wire.sizes import format_size


class Inadmissible(Exception):
    """The client cannot be let in; the text is for its user."""


@dataclass(frozen=True, slots=True)
class Device:
    """A scratch directory, the engine of its device, and what goes by in it."""

    directory: Directory
    engine: Engine
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class Admitted:
    """What a new tenant gets.

    Attributes:
        path_fds: ``O_PATH`` fds to send to the client: none when it resumes, since it has them.
        lot: Where the files were parked, if they were.
    """

    mapping: Mapping
    files: list[File] = field(default_factory=list)
    path_fds: list[int] = field(default_factory=list)
    lot: Lot | None = None

    def free(self) -> None:
        """Give it all back, when there will be no tenant; files that were parked stay so."""
        self.mapping.close()
        for file in self.files:
            if self.lot is None or file.scratch.inode not in self.lot.files:
                file.scratch.close(discard=False)
        close_all(self.path_fds)


class Admission:
    """Lets clients in.

    Args:
        devices: The scratch directories.
        ram: The arena bytes of all clients.
        disk: The scratch bytes of all clients.
        chores: Where the slow part runs.
        loop: The event loop.
        closer: Closes what clients handed over.
        descriptors: The limit on fds.
        forgotten: Called when files were freed that had been kept for a client to come back.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        ram: Budget,
        disk: Budget,
        chores: Chores,
        loop: Loop,
        closer: Closer,
        descriptors: Descriptors,
        forgotten: Callable[[], None],
    ) -> None:
        self._devices = devices
        self._ram = ram
        self._disk = disk
        self._chores = chores
        self._closer = closer
        self._descriptors = descriptors
        self._held: set[Inode] = set()
        self._forgotten = forgotten
        self.parking = Parking(loop, chores, self._unparked)

    def admit(
        self,
        attach: Attach,
        fds: list[int],
        uid: int,
        tenants: Iterable[Tenant],
        decided: Callable[[Admitted | Exception], None],
    ) -> None:
        """Check and open everything; ``decided`` gets the outcome, now or later. Closes ``fds``.

        Args:
            attach: What the client asks for.
            fds: What it handed over.
            uid: The user that it runs as.
            tenants: Who is there already, for the text of a refusal.
            decided: Called on the event loop. Of what was admitted the caller has to tell
                :meth:`let_in` or :meth:`released`.
        """
        arena_bytes = attach.arena_bytes
        try:
            inodes = inodes_of(attach, fds)
            lot = self.parking.find(inodes)
            self._check(attach, fds, inodes, lot, uid, tenants)
        except (Inadmissible, BadArena, NoDescriptors, OSError) as error:
            self._closer.close(fds, uid)
            decided(error)
            return
        self._held |= inodes
        if lot is not None:
            self.parking.lend(lot)

        def opened(outcome: Admitted | Exception) -> None:
            self._closer.close(fds, uid)
            if isinstance(outcome, Exception):
                self._ram.release(arena_bytes)
                if lot is None:
                    self._held -= inodes
                else:
                    self.parking.take_back(lot)
            else:
                self._held |= {file.scratch.inode for file in outcome.files}
            decided(outcome)

        user = None if uid == os.geteuid() else uid
        self._chores.submit(partial(self._open, attach, fds, lot, user), opened)

    def let_in(self, admitted: Admitted) -> None:
        """What was admitted is a tenant's."""
        if admitted.lot is not None:
            self.parking.remove(admitted.lot)

    def not_let_in(self, admitted: Admitted, freed: Callable[[], None]) -> None:
        """What was admitted is nobody's: free it, and call ``freed`` then."""

        def undone(_: object) -> None:
            if admitted.lot is None:
                self.released(admitted.mapping.size_bytes, admitted.files)
            else:
                self.released(admitted.mapping.size_bytes, ())
                self.parking.take_back(admitted.lot)
            freed()

        self._chores.submit(admitted.free, undone)

    def released(self, arena_bytes: int, files: Sequence[File]) -> None:
        """What was admitted has been freed."""
        self._ram.release(arena_bytes)
        self._held -= {file.scratch.inode for file in files}

    def _unparked(self, inodes: Iterable[Inode]) -> None:
        self._held.difference_update(inodes)
        self._forgotten()

    def _check(
        self,
        attach: Attach,
        fds: Sequence[int],
        inodes: set[Inode],
        lot: Lot | None,
        uid: int,
        tenants: Iterable[Tenant],
    ) -> None:
        """What can be checked at once; reserves the memory."""
        self._descriptors.check()
        check_arena(fds[0], attach.arena_bytes)
        if len(inodes) > len(self._devices):
            raise Inadmissible(
                f"it has {len(inodes)} scratch files, and this daemon has fewer directories; start "
                "it with every --scratch that the one before it had"
            )
        if lot is not None and lot.owner[1] != uid:
            raise Inadmissible(f"its scratch files are those of a client of uid {lot.owner[1]}")
        taken = lot is None and not self._held.isdisjoint(inodes)
        if len(inodes) != len(fds) - 1 or taken:
            raise Inadmissible("another client has its scratch files: a fault of the client")
        if attach.resume:
            # It has the memory already, and others may have come before it to a new daemon.
            self._ram.reserve_over(attach.arena_bytes)
        elif not self._ram.reserve(attach.arena_bytes):
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

    def _open(
        self, attach: Attach, fds: Sequence[int], lot: Lot | None, user: int | None
    ) -> Admitted:
        admitted = Admitted(Mapping(fds[0], attach.arena_bytes), lot=lot)
        try:
            if attach.resume:
                self._adopt(admitted, fds[1:], user)
            else:
                self._create(admitted, user)
        except BaseException:
            admitted.free()
            raise
        return admitted

    def _create(self, admitted: Admitted, user: int | None) -> None:
        for number, device in enumerate(self._devices):
            scratch = self._new_file(device.directory, user)
            if scratch is not None:
                admitted.files.append(File(scratch, device.engine, number, device.traffic))
                admitted.path_fds.append(os.open(f"/proc/self/fd/{scratch.fd}", os.O_PATH))
        if not admitted.files:
            raise Inadmissible("no scratch directory works; try again, and see 'discod status'")

    def _new_file(self, directory: Directory, user: int | None) -> ScratchFile | None:
        """None when the directory is out of use, perhaps since it failed at this."""
        if not directory.health.in_use:
            return None
        try:
            return directory.create(self._disk, user)
        except OSError as error:
            text = f"making a file failed: {error.strerror} (errno {error.errno})"
            if directory.health.note(error, text):
                raise Inadmissible(f"scratch {directory}: {text}") from error
            return None

    def _adopt(self, admitted: Admitted, path_fds: Sequence[int], user: int | None) -> None:
        """Open the files in the client's order, each with the directory that it is in."""
        parked = {} if admitted.lot is None else admitted.lot.files
        left = list(range(len(self._devices)))
        for fd in path_fds:
            known = stat_known(fd)
            kept = parked.get((known.device, known.number))
            if kept is not None:
                admitted.files.append(File(kept.scratch, kept.engine, kept.directory, kept.traffic))
                continue
            fitting = [n for n in left if self._devices[n].directory.device == known.device]
            # Several may be on one device. Where none fits, any refuses the file, and says why.
            made_here = [n for n in fitting if self._devices[n].directory.made(fd)]
            number = next(iter(made_here + fitting), 0)
            target = self._devices[number]
            scratch = target.directory.adopt(fd, self._disk, user)
            admitted.files.append(File(scratch, target.engine, number, target.traffic))
            left.remove(number)


def inodes_of(attach: Attach, fds: Sequence[int]) -> set[Inode]:
    """What tells the scratch files that are handed back from others.

    Raises:
        Inadmissible: They are too many or few, or one is no ``O_PATH`` fd, so that its file system
            might be asked to close it.
    """
    if not fds or (attach.resume and len(fds) < 2) or (not attach.resume and len(fds) != 1):
        raise Inadmissible(f"an attach with {len(fds)} fds: a fault of the client")
    return scratch_inodes(fds[1:])


def scratch_inodes(fds: Sequence[int]) -> set[Inode]:
    """As :func:`inodes_of`, of scratch files alone."""
    inodes = set()
    for fd in fds:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
            raise Inadmissible("a scratch file that it hands back is open: a fault of the client")
        known = stat_known(fd)
        inodes.add((known.device, known.number))
    return inodes
