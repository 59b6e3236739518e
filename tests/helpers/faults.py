"""Faults of a running daemon's disks, by the file that ``DISCOD_FAULTS`` names."""

from pathlib import Path

from discod.faults import VARIABLE


class Rules:
    """The file; a daemon with ``environment`` reads it.

    Args:
        path: Where to make it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {VARIABLE: str(path)}
        self.clear()

    def set(self, *rules: str) -> None:
        """From now on these, each with its count from 0; delays under way end."""
        # By another name, so that a daemon never reads the half of it.
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(f"{rule}\n" for rule in rules))
        draft.rename(self.path)

    def clear(self) -> None:
        """No faults."""
        self.set()
