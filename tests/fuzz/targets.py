"""All targets by name, and where their corpora are."""

from collections.abc import Callable
from pathlib import Path

from tests.fuzz import codec, conversation, tenant

TARGETS: dict[str, Callable[[bytes], None]] = {
    "bytes": codec.any_bytes,
    "near": codec.near_messages,
    "tenant": tenant.requests,
    "conversation": conversation.packets,
}

CORPUS = Path(__file__).parent / "corpus"
