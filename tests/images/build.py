"""Carries a Dockerfile out in a directory: its own RUN and COPY steps, over debootstrap's base.

What differs from a container engine: the base is Debian's minimal system instead of
``debian:*-slim``, which is the same packages less documentation; and RUN steps have this machine's
network, name service and settings for pip. Must run as root, in a mount namespace of its own.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.images.dockerfile import (
    METADATA,
    DockerfileError,
    Instruction,
    Stage,
    command,
    pairs,
    read,
    substitute,
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_CACHES = """\
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };
"""
"""As in Debian's images for containers, so that what RUN steps leave is what they leave there."""
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(slots=True)
class Image:
    """A root directory, and what is said of how to run it.

    Attributes:
        root: The merged root.
        added: The upper layers' directory: what the last stage adds to the base.
    """

    root: Path
    added: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"


class Builder:
    """Builds images in ``folder``.

    Args:
        folder: Where roots are made; its ``base-*`` are kept for the next time.
        context: What COPY copies from.
        binds: Directories of this machine that RUN steps see too, such as a package mirror.
    """

    def __init__(self, folder: Path, context: Path, binds: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._context = context
        self._binds = binds

    def build(self, dockerfile: Path, arguments: Mapping[str, str] | None = None) -> Image:
        """The image of the last stage. Raises ``DockerfileError``, ``CalledProcessError``."""
        images: dict[str, Image] = {}
        stages = read(dockerfile, arguments)
        for number, stage in enumerate(stages):
            image = self._start(stage, f"{dockerfile.name}-{number}")
            for instruction in stage.instructions:
                self._carry_out(image, instruction, images, arguments or {})
            images[stage.name] = image
        return images[stages[-1].name]

    def _start(self, stage: Stage, name: str) -> Image:
        layers = {part: self._folder / name / part for part in ("upper", "work", "root")}
        if layers["root"].is_mount():
            raise RuntimeError(f"{layers['root']} is mounted: it was built already")
        shutil.rmtree(self._folder / name, ignore_errors=True)
        for layer in layers.values():
            layer.mkdir(parents=True)
        options = f"lowerdir={self._base(stage.base)},upperdir={layers['upper']}"
        options += f",workdir={layers['work']}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, layers["root"])
        return Image(layers["root"], layers["upper"])

    def _base(self, image: str) -> Path:
        """Debian's minimal system of the release that ``debian:RELEASE-slim`` has."""
        distribution, _, tag = image.partition(":")
        if distribution != "debian" or not tag.endswith("-slim"):
            raise DockerfileError(f"FROM {image}: only debian:*-slim can be made here")
        release = tag.removesuffix("-slim")
        base = self._folder / f"base-{release}"
        if not base.exists():
            half = base.with_suffix(".part")
            shutil.rmtree(half, ignore_errors=True)
            _run("debootstrap", "--variant=minbase", release, half)
            (half / "etc/apt/apt.conf.d/no-caches").write_text(_NO_CACHES)
            for packages in (half / "var/cache/apt").rglob("*.*"):
                packages.unlink()
            half.rename(base)
        return base

    def _carry_out(
        self,
        image: Image,
        instruction: Instruction,
        images: Mapping[str, Image],
        arguments: Mapping[str, str],
    ) -> None:
        word, rest = instruction.word, substitute(instruction.rest, image.environment)
        if word == "RUN":
            self._execute(image, instruction.rest)
        elif word == "COPY":
            self._copy(image, rest.split(), images)
        elif word == "ARG":
            name, _, default = rest.partition("=")
            value = arguments.get(name, default)
            if value:
                image.environment[name] = value
        elif word == "ENV":
            image.environment |= dict(pairs(rest))
        elif word == "WORKDIR":
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            image.directory = rest
        elif word == "USER":
            image.user = rest
        elif word == "ENTRYPOINT":
            image.entrypoint = command(rest)
        elif word == "STOPSIGNAL":
            image.stop_signal = rest
        elif word == "HEALTHCHECK":
            image.healthcheck = command(rest.partition("CMD ")[2])
        elif word not in METADATA:
            raise DockerfileError(f"{word} {rest}")

    def _copy(self, image: Image, words: list[str], images: Mapping[str, Image]) -> None:
        source = self._context
        if words[0].startswith("--from="):
            source = images[words.pop(0).partition("=")[2]].root
        elif words[0].startswith("--"):
            raise DockerfileError(f"COPY {' '.join(words)}")
        *paths, last = words
        target = image.root / last.lstrip("/") if last[0] == "/" else self._inside(image) / last
        for path in paths:
            one = source / path.lstrip("/")
            if one.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    one,
                    target,
                    symlinks=True,
                    dirs_exist_ok=True,
                    ignore=ignored if source is self._context else None,
                )
            elif last.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(one, target / one.name)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(one, target)

    def _inside(self, image: Image) -> Path:
        return image.root / image.directory.lstrip("/")

    def _execute(self, image: Image, text: str) -> None:
        made: list[Path] = []
        mounted: list[Path] = []
        try:
            _run("mount", "-t", "proc", "proc", image.root / "proc")
            mounted.append(image.root / "proc")
            for source in (_RESOLVER, *self._binds):
                target = image.root / str(source).lstrip("/")
                made += _make_place(source, target)
                _run("mount", "--bind", "-o", "ro", source, target)
                mounted.append(target)
            of_host = {n: v for n, v in os.environ.items() if n.startswith(("PIP_", "SSL_"))}
            subprocess.run(
                ["chroot", str(image.root), "/bin/sh", "-c", f"cd {image.directory} && {text}"],
                env=of_host | {"DEBIAN_FRONTEND": "noninteractive"} | image.environment,
                stdin=subprocess.DEVNULL,
                check=True,
            )
        finally:
            for target in reversed(mounted):
                _run("umount", target)
            for place in reversed(made):
                with contextlib.suppress(OSError):  # the step has put something there
                    place.rmdir() if place.is_dir() else place.unlink()


def _make_place(source: Path, target: Path) -> list[Path]:
    """Make ``target`` to mount ``source`` on; what had to be made, outermost first."""
    missing = [path for path in (target, *target.parents) if not path.exists()]
    for path in reversed(missing):
        if path == target and not source.is_dir():
            path.touch()
        else:
            path.mkdir()
    return list(reversed(missing))


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL)
