"""What discod was asked to do in this process, counted for explaining why it did nothing."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts since the process began; the reasons are since :meth:`forget_reasons`.

    Attributes:
        calls: Checkpointed calls, and ``offload()`` blocks, that ran with gradients.
        offloaded: Saves that went to the session, shared ones included.
        largest_small_bytes: The largest tensor that stayed in memory for its size.
        its_min_bytes: What it would have had to reach.
        unsupported: Names of tensor types that stayed in memory.
    """

    calls: int = 0
    offloaded: int = 0
    largest_small_bytes: int = 0
    its_min_bytes: int = 0
    unsupported: set[str] = field(default_factory=set)

    def forget_reasons(self) -> None:
        """Look for them anew, since a patch was just enabled."""
        self.largest_small_bytes = self.its_min_bytes = 0
        self.unsupported.clear()


tally = Tally()
