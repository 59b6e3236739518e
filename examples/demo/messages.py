"""What the demo and its ranks tell each other, as lines of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Self

PLAIN = "plain"
DISCOD = "discod"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train, the same for all ranks of both variants."""

    layers: int
    width: int
    length: int
    rows: int
    threads: int
    arena_bytes: int
    socket_dir: str

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state (float32): what checkpointing keeps per layer."""
        return self.rows * self.length * self.width * 4

    @property
    def activation_bytes(self) -> int:
        """Bytes that plain checkpointing keeps until backward, per rank."""
        return self.layers * self.hidden_bytes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One rank's traffic with discod in one step."""

    saved_bytes: int
    written_bytes: int
    elided_bytes: int
    read_bytes: int
    save_wait_seconds: float
    load_wait_seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's step: its results as fingerprints of their bytes, and what they cost.

    Attributes:
        gradients: Fingerprint of each parameter's gradient after the all-reduce, by name.
        parameters: Fingerprint of all parameters after the optimizer's step.
        random_state: Fingerprint of torch's random state after the step.
        seconds: Forward, backward and optimizer; without the fingerprints.
        cpu_seconds: The process's CPU time in them, all threads.
        peak_bytes: Most resident memory of the process during the step, all of its arena included.
        offloaded: None for plain checkpointing.
    """

    rank: int
    step: int
    loss: float
    gradients: dict[str, str]
    parameters: str
    random_state: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    offloaded: Offloaded | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        if fields["offloaded"] is not None:
            fields["offloaded"] = Offloaded(**fields["offloaded"])
        return cls(**fields)
