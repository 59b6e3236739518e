"""A limit in bytes that all clients share: of scratch space, or of arena memory."""

import threading


class Budget:
    """A counter of bytes in use that reservations cannot drive over its limit. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self._used_bytes)

    def reserve(self, size_bytes: int) -> bool:
        """Take ``size_bytes``, or take nothing and return False when they do not fit."""
        with self._lock:
            if self._used_bytes + size_bytes > self.limit_bytes:
                return False
            self._used_bytes += size_bytes
            return True

    def reserve_over(self, size_bytes: int) -> None:
        """Take ``size_bytes`` even over the limit: for what exists already."""
        with self._lock:
            self._used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give ``size_bytes`` back. Raises ``ValueError`` when that is more than is in use."""
        with self._lock:
            if size_bytes > self._used_bytes:
                raise ValueError(f"{size_bytes} bytes released of {self._used_bytes} in use")
            self._used_bytes -= size_bytes
