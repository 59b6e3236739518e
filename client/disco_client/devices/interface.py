"""What is asked of a device: copies to and from the arena, which end later than their call.

A device computes on streams, in order and behind the calling thread's back. *Why no copy races*:

1. *Out* of a device begins after all that the calling thread's stream was given before, so that the
   value is there. Until it has landed, the source is held by :class:`Departure`, so its memory is
   nobody else's; and the blob is FILLING, so its slot is neither written to disk nor lent nor given
   to another. A source that was written to meanwhile is noticed by torch's version counter.
2. *In* begins after all that the calling thread's stream was given before its memory was allocated,
   since the allocator hands out memory that queued work still uses. Until it has landed, the slot
   is on loan, and :class:`Arrival` holds the memory. Whoever uses it joins the copy first, and what
   is queued after that on the same stream, the reuse of the memory included, comes after the copy.
3. Either object, collected before its copy has ended, waits for that.
"""

import contextlib
from typing import Protocol

import torch


class Ticket(Protocol):
    """The end of one copy, as its device tells it.

    Attributes:
        needs_daemon: Whether it never comes while there is no daemon.
    """

    needs_daemon: bool

    def done(self) -> bool:
        """Whether the copy has landed. Never waits."""

    def wait(self) -> None:
        """Until it has landed."""

    def join(self, flat: torch.Tensor) -> None:
        """Let the calling thread's stream go on after the copy, and use its memory ``flat``."""


class _Copy:
    """A copy under way, and the device's side of it.

    Args:
        flat: The device's memory: uint8, 1-D.
        ticket: Tells of its end.
    """

    _landed = True

    def __init__(self, flat: torch.Tensor, ticket: Ticket) -> None:
        self.flat = flat
        self.device = flat.device
        self.nbytes = flat.nbytes
        self._ticket = ticket
        self._landed = False

    @property
    def needs_daemon(self) -> bool:
        """As :attr:`Ticket.needs_daemon`."""
        return self._ticket.needs_daemon

    def landed(self) -> bool:
        """Whether it has ended. Never waits."""
        if not self._landed:
            self._landed = self._ticket.done()
        return self._landed

    def abandon(self) -> None:
        """In a forked child: it is the parent's, and its device is out of reach."""
        self._landed = True

    def __del__(self) -> None:
        if not self._landed:
            with contextlib.suppress(Exception):  # the device has failed, and says so elsewhere
                self._ticket.wait()


class Departure(_Copy):
    """A copy to the arena, and its source, which it keeps alive.

    Args:
        flat: The source.
        ticket: Tells when the copy has landed.
        ready: Tells when the source has its value.
        taken: Whether the source's bytes are in other memory by now, in the order of its stream:
            then the copy needs it no more, and what changes it comes after.

    Attributes:
        lendable: Whether a load may get the source itself, as autograd would give it.
    """

    def __init__(
        self, flat: torch.Tensor, ticket: Ticket, ready: Ticket, *, taken: bool = False
    ) -> None:
        self._before = _condition(flat)
        self._ready = ready
        self.lendable = True
        self._taken = taken
        self._exact = taken
        self._whole: torch.Tensor | None = None
        self._whole_version = 0
        super().__init__(flat, ticket)

    @property
    def changed(self) -> bool:
        """Whether the source was written to, or its memory given away, since the copy began."""
        if self._whole is not None and self._whole._version != self._whole_version:
            return True
        return _condition(self.flat) != self._before

    @property
    def spoilt(self) -> bool:
        """Whether such a change may have come before the copy."""
        return self.changed and not self._exact

    def watch(self, whole: torch.Tensor, version: int) -> None:
        """The source is a part of ``whole``, whose changes its parts do not count.

        Args:
            whole: A detached subclass instance, which is kept as long as the source.
            version: What it had when the copy began.
        """
        self._whole, self._whole_version = whole, version

    def lend(self) -> "Lent":
        """The source for a load, which keeps it: it may be let go before the load has it."""
        return Lent(self.flat, self._ready)

    def let_go(self) -> bool:
        """Drop the source, if the copy does not need it; whether it is dropped."""
        if self._taken:
            self.flat = _NOTHING
            self._whole = None
        return self._taken

    def settle(self) -> None:
        """Let the calling thread's stream change the source from now on: it waits for the copy."""
        self.lendable = False
        if not self._exact:
            self._ticket.join(self.flat)
            self._exact = True


class Lent:
    """A source that a load gets, whatever becomes of the copy: ``flat``, to be used after a join.

    Args:
        flat: The source.
        ready: Tells when it has its value.
    """

    def __init__(self, flat: torch.Tensor, ready: Ticket) -> None:
        self.flat = flat
        self._ready = ready

    def join(self) -> None:
        """Let the calling thread's stream use the source."""
        self._ready.join(self.flat)


class Arrival(_Copy):
    """A copy from the arena, and the memory that it fills: ``flat``, to be used after a join."""

    def join(self) -> None:
        """Let the calling thread's stream go on after it."""
        self._ticket.join(self.flat)


class Device(Protocol):
    """One kind of device, with any number of units (``cuda:0``, ``cuda:1``).

    Not called inside of a session's section, but for ``close``. When a call raises, nothing of it
    is under way.
    """

    def check(self, device: torch.device) -> None:
        """Raise ``UnsupportedCall`` where no copy can be made, as in a CUDA graph's capture."""

    def stage_out(self, flat: torch.Tensor, slot: int) -> Departure:
        """Start to copy ``flat`` (uint8, 1-D, contiguous) to the arena at ``slot``.

        What is copied is the value it has in the order of the calling thread's stream.
        """

    def stage_in(self, slot: int, nbytes: int, device: torch.device) -> Arrival:
        """Start to copy ``nbytes`` from the arena at ``slot`` into new memory of ``device``.

        The memory is allocated on the calling thread's stream.

        Raises:
            torch.OutOfMemoryError: The device has no memory for it.
        """

    def reachable(self) -> bool:
        """Whether the calling thread may ask it anything: not while it captures a CUDA graph."""

    def staging_bytes(self, device: torch.device) -> int:
        """A sensible bound for what copies under way may hold of the device's memory."""

    def shortages(self, device: torch.device) -> int:
        """How often its memory has run short so far."""

    def close(self) -> None:
        """Wait for all copies, and let go of the arena."""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _condition(flat: torch.Tensor) -> tuple[int, int, int]:
    """What differs once the tensor was written to in place, or its storage given away."""
    version = 0 if flat.is_inference() else flat._version
    return version, flat.data_ptr(), flat.untyped_storage().nbytes()
