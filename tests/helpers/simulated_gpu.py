"""An accelerator simulated over CPU tensors: copies and kernels end when an adversary says so.

:class:`Machine` has the streams, and stands in for what ``torch.get_device_module()`` gives. What
is put on a stream is done later, in the stream's order; which stream goes on, and when, is the
adversary's choice at every call: as early as possible, as late as possible, or at random.

:class:`SimulatedGpu` is discod's own device over it, with copies that hold neither of their ends.
Tensors of type "cpu" are routed to it, in one of two ways:

- *eager*: what the calling thread computes is done at once, so torch and autograd can be used as
  they are. A wait of a compute stream runs what is waited for.
- *lazy*: tensors come from :meth:`SimulatedGpu.empty` and are written and read by
  :meth:`SimulatedGpu.write` and :meth:`SimulatedGpu.read`, which are done later too. Memory that is
  freed is given out again at once, as torch's caching allocator does it.

A copy whose memory is gone when its turn comes is a *violation*; it leaves garbage, so that it also
shows as wrong data.
"""

import contextlib
import ctypes
import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from disco_client.arena import Arena
from disco_client.devices.streamed import Streamed, StreamTicket

GARBAGE = 0xA5
RESIZED = "the storage is resized"
CPU = torch.device("cpu")
MODES = ("early", "late", "random")


class Event:
    """A place in a stream's order."""

    def __init__(self, machine: "Machine", stream: "Stream") -> None:
        self._machine = machine
        self.stream = stream
        self.end = stream.given
        self._patience = machine.patience()

    def query(self) -> bool:
        """Whether it is passed; the adversary moves first."""
        with self._machine.lock:
            self._machine.move()
            self._patience -= 1
            if self._patience < 0:
                self._machine.force(self)
            return self.stream.done >= self.end

    def synchronize(self) -> None:
        """Until it is passed."""
        with self._machine.lock:
            self._machine.waits += 1
            self._machine.force(self)


class Stream:
    """Operations that are done in their order.

    Args:
        machine: Whose it is.
        device: Its unit.
        eager: Whether each is done when it is given.
    """

    def __init__(self, machine: "Machine", device: torch.device, eager: bool) -> None:
        self.machine = machine
        self.device = device
        self.eager = eager
        self.queue: deque[Callable[[], None] | Event] = deque()
        self.given = 0
        self.done = 0

    def give(self, operation: Callable[[], None] | Event) -> None:
        """Put something at the end: what to do, or what to wait for."""
        with self.machine.lock:
            self.queue.append(operation)
            self.given += 1
            if self.eager:
                self.machine.force(Event(self.machine, self))
            else:
                self.machine.move()

    def record_event(self) -> Event:
        """The place after what was given by now."""
        with self.machine.lock:
            self.machine.move()
            return Event(self.machine, self)

    def wait_event(self, event: Event) -> None:
        """Do what is given from now on after ``event``."""
        self.give(event)

    def wait_stream(self, stream: "Stream") -> None:
        """Do what is given from now on after what ``stream`` was given by now."""
        self.give(stream.record_event())

    def synchronize(self) -> None:
        """Until all that was given is done."""
        with self.machine.lock:
            self.machine.force(Event(self.machine, self))


class Machine:
    """All streams, and the adversary. Has the functions of a device module.

    Args:
        seed: Of all its choices.
        mode: One of ``MODES``.
        lazy: Whether compute streams, too, do what they are given later.
        refusals: Of one event, at most, to say that it is passed when nothing forbids it: a client
            that polls would else wait for ever for what nobody forces.
    """

    def __init__(
        self, seed: int = 0, mode: str = "random", *, lazy: bool = False, refusals: int = 24
    ) -> None:
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.tolerates_shrunk = False
        """Whether a source may be resized under its copy: it is a violation otherwise."""
        self.waits = 0
        """How often a thread waited for an event."""
        self.mode = mode
        self._random = random.Random(seed)
        self._lazy = lazy
        self._refusals = refusals
        self._streams: list[Stream] = []
        self._default: dict[torch.device, Stream] = {}
        self._current = threading.local()
        self._running = False

    # As torch.get_device_module() has them

    def Stream(self, device: torch.device) -> Stream:
        """A side stream."""
        return self._new(device, eager=False)

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's."""
        with self.lock:
            if device not in self._default:
                self._default[device] = self.compute_stream(device)
        found: Stream = getattr(self._current, "streams", {}).get(device, self._default[device])
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make it the calling thread's, for a block."""
        before = dict(getattr(self._current, "streams", {}))
        self._current.streams = before | {stream.device: stream}
        try:
            yield
        finally:
            self._current.streams = before

    # For tests

    def compute_stream(self, device: torch.device = CPU) -> Stream:
        """One more stream for computation."""
        return self._new(device, eager=not self._lazy)

    def finish(self) -> None:
        """Do all that was given."""
        with self.lock:
            for stream in self._streams:
                stream.synchronize()

    @property
    def idle(self) -> bool:
        """Whether all is done."""
        return all(not stream.queue for stream in self._streams)

    # The adversary

    def patience(self) -> int:
        """How often an event may say that it is not passed though nothing forbids it."""
        if self.mode == "early":
            return 0
        return self._refusals if self.mode == "late" else self._random.randrange(self._refusals)

    def move(self) -> None:
        """Let streams go on, or not."""
        if self.mode == "late" or self._running:
            return
        steps = 1 << 30 if self.mode == "early" else self._random.choice((0, 0, 1, 1, 2, 5))
        while steps > 0:
            ready = [stream for stream in self._streams if self._may_go_on(stream)]
            if not ready:
                return
            self._step(self._random.choice(ready))
            steps -= 1

    def force(self, event: Event) -> None:
        """Do what ``event`` comes after, and no more."""
        stream = event.stream
        while stream.done < event.end:
            head = stream.queue[0]
            if isinstance(head, Event):
                self.force(head)
            self._step(stream)

    def _may_go_on(self, stream: Stream) -> bool:
        if not stream.queue:
            return False
        head = stream.queue[0]
        return not isinstance(head, Event) or head.stream.done >= head.end

    def _step(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        if not isinstance(operation, Event):
            collects = gc.isenabled()
            gc.disable()  # a finalizer may wait for a copy, and this one is half done
            self._running = True
            try:
                operation()
            finally:
                self._running = False
                if collects:
                    gc.enable()
        stream.done += 1

    def _new(self, device: torch.device, eager: bool) -> Stream:
        with self.lock:
            self._streams.append(Stream(self, device, eager))
            return self._streams[-1]


class _End:
    """One end of a copy: memory that the copy does not keep."""

    def __init__(self, tensor: torch.Tensor, arena: Arena, mapping: Any) -> None:
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self._mapping: Any = None
        self._storage: StorageWeakRef | None = None
        if arena.address <= self.address < arena.address + arena.size_bytes:
            self._mapping = mapping
        else:
            storage = tensor.untyped_storage()
            self._storage = StorageWeakRef(storage)
            self._place = storage.data_ptr(), storage.nbytes()

    def fault(self) -> str | None:
        """What has become of the memory, if it is not as it was."""
        if self._storage is None:
            return "the arena is unmapped" if self._mapping() is None else None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return "the memory is freed"
        if (storage.data_ptr(), storage.nbytes()) != self._place:
            return RESIZED
        return None


class SimulatedGpu(Streamed):
    """discod's device over a :class:`Machine`.

    Args:
        arena: Where to copy to and from.
        machine: Its streams.
        memory: Where memory comes from, in lazy mode.

    Attributes:
        out_of_memory: How many allocations fail from now on.
        shortages_so_far: What :meth:`shortages` tells.
        fail: Called in each copy; may raise.
    """

    def __init__(self, arena: Arena, machine: Machine, memory: "Memory | None" = None) -> None:
        super().__init__(arena, machine)
        self.machine = machine
        self.memory = memory
        self._whole = weakref.ref(arena.view.obj)
        self.limit_bytes = 1 << 30
        self.out_of_memory = 0
        self.shortages_so_far = 0
        self.copies = 0
        self.fail: Callable[[], None] = lambda: None

    def staging_bytes(self, device: torch.device) -> int:
        """The bound that the test has set."""
        return self.limit_bytes

    def shortages(self, device: torch.device) -> int:
        """What the test has set."""
        return self.shortages_so_far

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.out_of_memory:
            self.out_of_memory -= 1
            raise torch.OutOfMemoryError(f"simulated: no memory for {nbytes} bytes")
        if self.memory is not None:
            return self.memory.empty(nbytes)
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self.fail()
        self.copies += 1
        to, of = (_End(end, self._arena, self._whole) for end in (target, source))
        violations = self.machine.violations

        def copy() -> None:
            lost, missing = to.fault(), of.fault()
            tolerated = missing == RESIZED and self.machine.tolerates_shrunk
            if lost or (missing and not tolerated):
                violations.append(f"copy of {of.nbytes} bytes: target: {lost}, source: {missing}")
            if lost:
                return
            if missing:
                ctypes.memset(to.address, GARBAGE, to.nbytes)
            else:
                ctypes.memmove(to.address, of.address, of.nbytes)

        stream.give(copy)
        self.fail()

    def _ticket(
        self, stream: Any, lent: bool = False, arena: memoryview | None = None
    ) -> StreamTicket:
        return _Ticket(self.memory, self.machine, stream.record_event(), lent, arena)


class _Ticket(StreamTicket):
    """A ticket whose memory is a simulated allocator's, or nobody's in particular."""

    def __init__(self, memory: "Memory | None", *args: Any) -> None:
        super().__init__(*args)
        self._memory = memory

    def _lend(self, flat: torch.Tensor, stream: Any) -> None:
        if self._memory is not None:
            self._memory.record(flat, stream)


class _Block:
    """A piece of device memory, which is never given back."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self.bytes)
        self.stream = stream
        self.users: set[Stream] = set()
        self.passed: list[Event] = []


class Memory:
    """Device memory as torch's caching allocator gives it, and kernels that use it.

    A block that is freed goes to the next tensor of its size on the same stream, at once and
    whatever is queued; only those streams are waited for that :meth:`record` told of.

    Args:
        machine: Whose streams.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the calling thread's stream, which a kernel fills with rubbish."""
        stream = self.machine.current_stream(CPU)
        with self.machine.lock:
            block = self._take(nbytes, stream)
            # Its own object for each tensor, which tells when the tensor's storage is gone.
            lease = (ctypes.c_char * nbytes).from_buffer(block.bytes)
            weakref.finalize(lease, self._give_back, block).atexit = False
            tensor = torch.frombuffer(lease, dtype=torch.uint8)
        self.write(tensor, 0xFF)
        return tensor

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As ``Tensor.record_stream``."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.stream:
            block.users.add(stream)

    def write(self, tensor: torch.Tensor, value: int) -> None:
        """A kernel that fills a tensor, and does not keep it."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        stream = self.machine.current_stream(CPU)
        stream.give(lambda: (ctypes.memset(address, value, nbytes), None)[1])

    def read(self, tensor: torch.Tensor, into: list[bytes]) -> None:
        """A kernel that reads a tensor, and does not keep it."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        stream = self.machine.current_stream(CPU)
        stream.give(lambda: into.append(ctypes.string_at(address, nbytes)))

    def _take(self, nbytes: int, stream: Stream) -> _Block:
        for block in reversed(self._free):
            passed = all(event.stream.done >= event.end for event in block.passed)
            if len(block.bytes) == nbytes and block.stream is stream and passed:
                self._free.remove(block)
                block.passed = []
                return block
        block = _Block(nbytes, stream)
        self._blocks[block.address] = block
        return block

    def _give_back(self, block: _Block) -> None:
        block.passed = [Event(self.machine, user) for user in block.users]
        block.users = set()
        self._free.append(block)
