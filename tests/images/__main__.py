"""Builds both images of ``docker/`` and runs them: ``python -m tests.images --folder DIR``.

Needs root, debootstrap and the package registries, and no container engine. It takes some minutes;
the base system in DIR is kept for the next time. Prints what ``docker/README.md`` states.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.daemon import eventually
from tests.images.build import Builder, Image
from tests.images.run import Container

TOP = Path(__file__).parents[2]
DAEMON_UID = 10001
IN_NAMESPACE = "--in-namespace"
START_ROUNDS = 5
HEALTH_CHECKS = 10
STEPS = 60


def size_mib(*directories: Path) -> float:
    """What the files take, hard links once."""
    seen: dict[tuple[int, int], int] = {}
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in names:
                status = os.lstat(os.path.join(folder, name))
                seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return round(sum(seen.values()) / (1 << 20), 1)


def volume(image: Image, place: str, path: Path) -> Path:
    """A new volume, with owner and mode of the directory that it is mounted on."""
    path.mkdir()
    there = (image.root / place.lstrip("/")).stat()
    os.chown(path, there.st_uid, there.st_gid)
    os.chmod(path, there.st_mode & 0o7777)
    return path


def clients(container: Container) -> list[object]:
    """Those that the daemon in it serves; none while it starts."""
    said = container.execute("discod", "status", "--json").stdout
    found: list[object] = json.loads(said)["clients"] if said else []
    return found


def check(daemon: Image, trainer: Image, folder: Path) -> dict[str, object]:
    """Run them, and fail where they do not do what the README says."""
    sockets = volume(daemon, "/run/discod", folder / "sockets")
    scratch = volume(daemon, "/scratch", folder / "scratch")
    log = folder / "daemon.log"
    found: dict[str, object] = {}

    def start() -> Container:
        volumes = {"/run/discod": sockets, "/scratch": scratch}
        return Container(daemon, volumes, ["--ram", "1GiB"], log=log)

    def until_ready() -> tuple[Container, float]:
        began = time.monotonic()
        container = start()
        eventually(lambda: (sockets / "io.sock").exists(), 30, f"the start ({log})")
        return container, time.monotonic() - began

    seconds = []
    for _ in range(START_ROUNDS):
        container, took = until_ready()
        seconds.append(took)
        began = time.monotonic()
        code = container.stop()
        if code or time.monotonic() - began > 5 or os.listdir(sockets):
            sys.exit(f"SIGTERM to process 1: exit {code}, {os.listdir(sockets)}: {log.read_text()}")
    found["seconds until it listens"] = [round(one, 2) for one in sorted(seconds)]

    container, _ = until_ready()
    if not all(container.healthy() for _ in range(HEALTH_CHECKS)):
        sys.exit(f"unhealthy: {container.execute('discod', 'status')}")
    found["zombies after health checks"] = container.zombies()
    trainers = [
        Container(
            trainer,
            {"/run/discod:ro": sockets},
            [str(STEPS)],
            {"DISCOD_ARENA": "4MiB", "OMP_NUM_THREADS": "1"},
            groups=[DAEMON_UID],
            log=folder / f"trainer-{number}.log",
        )
        for number in range(2)
    ]
    eventually(lambda: all("step 0" in one.log.read_text() for one in trainers), 120, "steps")
    status = json.loads(container.execute("discod", "status", "--json").stdout)
    if len(status["clients"]) != len(trainers):
        sys.exit(f"the trainers ended too early: {status}")
    found["clients, by uid and arena"] = sorted(
        (one["uid"], one["arena_bytes"]) for one in status["clients"]
    )
    found["scratch"] = {name: status["scratch"][0][name] for name in ("fs_type", "direct")}
    container.kill()  # as an engine that replaces it under the trainers
    container = start()
    eventually(lambda: len(clients(container)) == len(trainers), 60, "the trainers' return")
    for one in trainers:
        if one.process.wait(120):
            sys.exit(f"a trainer failed: {one.log.read_text()}")
    said = [one.log.read_text().splitlines()[-1] for one in trainers]
    found["trainers"] = said
    found["resumed with another daemon"] = log.read_text().count(" resumed, ")
    found["exit code at the end"] = container.stop()
    found["left in the volumes"] = os.listdir(sockets) + os.listdir(scratch)
    return found


def main() -> None:
    """Build, run, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.images", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for roots; some GB")
    parser.add_argument(
        "--bind", type=Path, action="append", default=[], help="a directory that RUN steps see too"
    )
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.in_namespace:
        again = [sys.executable, "-m", "tests.images", *sys.argv[1:], IN_NAMESPACE]
        # All mounts and processes end with it.
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount"]
        os.execvp("unshare", [*alone, *again])
    options.folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(options.folder.resolve(), TOP, options.bind)
    daemon = builder.build(TOP / "docker/Dockerfile")
    found: dict[str, object] = {
        "base MiB": size_mib(options.folder / "base-bookworm"),
        "added by the daemon's image, MiB": size_mib(daemon.added),
        "of which discod and its dependencies, MiB": size_mib(daemon.root / "opt/discod"),
    }
    trainer = builder.build(TOP / "docker/trainer.Dockerfile")
    found["added by the trainer's image, MiB"] = size_mib(trainer.added)
    runs = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        found |= check(daemon, trainer, runs)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
