"""What a check has found."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """discod works, but slower, or less of it."""
    FAIL = "fail"
    """discod does not work with this, or what it is for is not reached."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        check: What was looked at, in few words; together with ``subject`` it is unique.
        level: How it ended.
        found: What is there, with values.
        remedy: What to do; empty when that is nothing.
        subject: Which of several: a directory. Empty when there is one.
    """

    check: str
    level: Level
    found: str
    remedy: str = ""
    subject: str = ""


def ok(check: str, found: str, subject: str = "") -> Finding:
    """All is well."""
    return Finding(check, Level.OK, found, "", subject)


def warn(check: str, found: str, remedy: str, subject: str = "") -> Finding:
    """It works, with a disadvantage."""
    return Finding(check, Level.WARN, found, remedy, subject)


def fail(check: str, found: str, remedy: str, subject: str = "") -> Finding:
    """It does not work."""
    return Finding(check, Level.FAIL, found, remedy, subject)
