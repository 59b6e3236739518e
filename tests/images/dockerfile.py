"""Reads a Dockerfile: the few instructions that ``docker/`` uses, and an error at any other.

How they are carried out is in :mod:`tests.images.build`.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

METADATA = {"HEALTHCHECK", "STOPSIGNAL"}
KNOWN = METADATA | {"ARG", "COPY", "ENTRYPOINT", "ENV", "RUN", "USER", "WORKDIR"}


class DockerfileError(ValueError):
    """It has what this program does not know; the text names it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its word, and the rest of its line, continuation lines joined."""

    word: str
    rest: str


@dataclass(slots=True)
class Stage:
    """What begins with a FROM.

    Attributes:
        base: The image that it starts from.
        name: As in ``FROM ... AS name``; empty for none.
    """

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def read(path: Path, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages of a Dockerfile. Raises :class:`DockerfileError`.

    Args:
        path: The file.
        arguments: Values for its ARGs, as ``--build-arg`` gives them.
    """
    values: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text()):
        if instruction.word == "FROM":
            words = substitute(instruction.rest, values).split()
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
                raise DockerfileError(f"FROM {instruction.rest}")
            stages.append(Stage(words[0], words[2] if len(words) == 3 else ""))
        elif instruction.word == "ARG" and not stages:
            name, _, default = instruction.rest.partition("=")
            values[name] = (arguments or {}).get(name, default)
        elif instruction.word not in KNOWN or not stages:
            raise DockerfileError(f"{path.name}: {instruction.word} {instruction.rest}")
        else:
            stages[-1].instructions.append(instruction)
    return stages


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` replaced; what has no value is empty."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), text)


def command(text: str) -> list[str]:
    """The words of an ENTRYPOINT, or of a CMD: the exec form only. Raises ``DockerfileError``."""
    try:
        words = json.loads(text)
    except ValueError:
        raise DockerfileError(f"{text}: the shell form would put a shell in between") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DockerfileError(f"{text} is no list of words")
    return words


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """The names and values of an ENV."""
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise DockerfileError(f"ENV {text}: write NAME=VALUE")
        yield name, value


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        yield Instruction(word.upper(), rest.strip())
