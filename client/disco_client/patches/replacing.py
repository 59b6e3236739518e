"""``Patch``: attributes of other packages, replaced once and put back exactly."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from disco_client import summary
from disco_client.errors import UsageError
from disco_client.patches.proof import Proof


class Replacement(NamedTuple):
    """One attribute to replace.

    Attributes:
        owner: The module, class or object that has it.
        name: The attribute.
        make: Gives the new value from the original one.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


class Patch:
    """What one framework's module replaces.

    Args:
        name: For messages: ``"torch"``.
        replacements: Gives the replacements; asked at each :meth:`enable`, so that the framework
            need not be imported before.
        remedy: What to check when nothing was offloaded, as a sentence for the warning.
        works: Tells, once they are in place, whether the replacements are what the framework calls.
    """

    def __init__(
        self,
        name: str,
        replacements: Callable[[], Sequence[Replacement]],
        remedy: str,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self._works = works
        self._replacements = replacements
        self._proof = Proof(name, remedy)
        self._applied: list[_Applied] = []

    @property
    def enabled(self) -> bool:
        """Whether the replacements are in place."""
        return bool(self._applied)

    def enable(self, remedy: str | None = None) -> None:
        """Replace everything; nothing happens when that is done already.

        Args:
            remedy: In place of the patch's own, for who enables it on a framework's behalf.

        Raises:
            UsageError: The framework has no such attribute, or does not use it: its version is not
                supported. Nothing is changed then.
        """
        if self.enabled:
            return
        applied = []
        for owner, name, make in self._replacements():
            if not hasattr(owner, name):
                raise self._unknown(f"{_path(owner)} has no {name}")
            own = vars(owner).get(name, _INHERITED)
            applied.append(_Applied(owner, name, own, make(getattr(owner, name))))
        for one in applied:
            setattr(one.owner, one.name, one.new)
        self._applied = applied
        if not self._works():
            self._put_back()
            raise self._unknown(f"it does not call what was replaced ({applied[0].name}, ...)")
        self._proof.begin(remedy)
        summary.show_at_end()

    def check(self) -> None:
        """The first backward is over: warn if nothing was offloaded, unless that was looked at."""
        self._proof.check()

    def disable(self) -> None:
        """Put the originals back; nothing happens when that is done already.

        Raises:
            UsageError: Somebody replaced an attribute again in the meantime. Putting the original
                back would undo that too, so nothing is changed.
        """
        for one in self._applied:
            if vars(one.owner).get(one.name) is not one.new:
                raise UsageError(
                    f"{_path(one.owner)}.{one.name} was replaced by something else after the "
                    f"{self.name} patch of discod; undo that first"
                )
        self._put_back()
        self._proof.end()

    def _unknown(self, fact: str) -> UsageError:
        return UsageError(
            f"the {self.name} patch does not know this version of {self.name}: {fact}; nothing was "
            "changed. Call disco_client.checkpoint or disco_client.offload directly, or install "
            "a version that the documentation names"
        )

    def _put_back(self) -> None:
        for one in reversed(self._applied):
            if one.original is _INHERITED:
                delattr(one.owner, one.name)
            else:
                setattr(one.owner, one.name, one.original)
        self._applied = []


class _Applied(NamedTuple):
    owner: Any
    name: str
    original: Any
    new: Any


_INHERITED = object()
"""Stands for the original of an attribute that the owner only inherits."""


def _path(owner: Any) -> str:
    named = owner if hasattr(owner, "__name__") else type(owner)
    module = getattr(named, "__module__", None)
    name: str = getattr(named, "__qualname__", None) or named.__name__
    return f"{module}.{name}" if module else name
