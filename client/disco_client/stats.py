"""What this process has offloaded, as numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over some span of time. Bytes are whole pages as they stand in the arena.

    Attributes:
        saved_blobs: Tensors copied into the arena; one that is saved again unchanged counts once.
        saved_bytes: Copied into the arena.
        written_bytes: Written to the scratch.
        elided_bytes: Freed without ever having been written.
        read_bytes: Read back from the scratch.
        prefetch_hits: Loads of blobs that had left RAM and were back in time.
        prefetch_misses: Loads that had to wait for a read.
        device_hits: Loads of tensors that their GPU still had, or had back in time.
        save_wait_seconds: Time that saves waited for room in the arena, or for earlier copies off
            the GPU.
        load_wait_seconds: Time that loads waited for a read, or for room to read into.
    """

    saved_blobs: int = 0
    saved_bytes: int = 0
    written_bytes: int = 0
    elided_bytes: int = 0
    read_bytes: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    device_hits: int = 0
    save_wait_seconds: float = 0.0
    load_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats(Counters):
    """The totals of this process since it attached, and what it holds now.

    Attributes:
        live_blobs: Blobs that are saved and not yet released.
        arena_bytes: Size of this process's arena.
        last_cycle: The counters of the last finished cycle: in training, of the last step.
        attached_seconds: Since this process attached.
    """

    live_blobs: int = 0
    arena_bytes: int = 0
    last_cycle: Counters = Counters()
    attached_seconds: float = 0.0

    @property
    def written_bytes_per_day(self) -> int:
        """What a day like the time since this process attached writes: what the disk endures."""
        if not self.attached_seconds:
            return 0
        return int(self.written_bytes * 86_400 / self.attached_seconds)
