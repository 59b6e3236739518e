"""The files of ``docker/``: linted, valid by the schemas of what reads them, true to the code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from disco_client import environment
from discod.cli import main
from tests.helpers.tools import needs
from tests.images import dockerfile

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*Dockerfile"))
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((DOCKER / "slurm").glob("*.sh"))
GROUP = "10001"


def tool(name: str) -> str:
    """A program of the environment that runs the tests, or of the machine."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    needs(name, found is not None)
    return str(found)


def check(*command: str | Path) -> None:
    """Run a linter; what it says is the failure."""
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def documents(path: Path) -> list[dict[str, Any]]:
    """All of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def test_all_are_looked_at() -> None:
    """A file that was renamed would be left out in silence."""
    assert len(DOCKERFILES) == 2
    assert len(MANIFESTS) == 2
    assert len(SCRIPTS) == 3


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(path: Path) -> None:
    """An image would not build, or be built in a way that is known to be bad."""
    check(tool("hadolint"), path)
    stage = dockerfile.read(path)[-1]
    words = {one.word: one.rest for one in stage.instructions}
    assert words["USER"].partition(":")[0] not in ("0", "root")
    assert dockerfile.command(words["ENTRYPOINT"])


def test_what_images_are_made_of_is_sent_and_is_there() -> None:
    """A build would fail for want of a file, or send gigabytes of an environment to the engine."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = set()
    for path in DOCKERFILES:
        for stage in dockerfile.read(path):
            for one in stage.instructions:
                if one.word == "COPY" and not one.rest.startswith("--from"):
                    copied |= set(one.rest.split()[:-1])
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_images_agree_on_the_group() -> None:
    """The daemon would refuse the trainers of the examples."""
    text = "".join(path.read_text() for path in (*DOCKERFILES, *MANIFESTS, DOCKER / "compose.yaml"))
    assert f"DISCOD_ALLOW_GROUP={GROUP}" in text
    assert f'group_add: ["{GROUP}"]' in text
    assert f"supplementalGroups: [{GROUP}]" in text
    assert set(re.findall(r"--gid (\d+)", text)) == {GROUP}


def test_compose() -> None:
    """Compose would refuse its file, or start trainers that share more than the sockets."""
    path = DOCKER / "compose.yaml"
    check(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", path)
    services = documents(path)[0]["services"]
    daemon = services.pop("discod")
    assert len(services) == 2
    shared = {volume.split(":")[0] for volume in daemon["volumes"]}
    for trainer in services.values():
        assert {volume.split(":")[0] for volume in trainer["volumes"]} & shared == {"sockets"}
        assert not {"ipc", "pid", "shm_size", "privileged"} & set(trainer)
    assert_takes(daemon["command"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes(path: Path) -> None:
    """The API server would refuse a manifest, or ignore what is spelt wrong."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_daemonset() -> None:
    """The pods would crash at a wrong option, or run with more rights than they need."""
    pod = documents(DOCKER / "kubernetes" / "daemonset.yaml")[0]["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    (container,) = pod["containers"]
    assert_takes(container["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == ["discod", "status"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script(path: Path) -> None:
    """A prolog would fail on a node whose variables nobody had thought of."""
    check(tool("shellcheck"), path)
    assert path.stat().st_mode & 0o111 == 0o111


def test_environment() -> None:
    """A variable that nothing reads would be set."""
    known = {str(option.envvar) for option in main.params} | environment.CLIENT
    for path in (*DOCKERFILES, *MANIFESTS, *SCRIPTS, DOCKER / "compose.yaml"):
        assert set(re.findall(r"DISCOD_[A-Z_]*[A-Z]", path.read_text())) <= known, path.name


@pytest.mark.parametrize("line", ["FROM a b", "SHELL x", "ENTRYPOINT discod"])
def test_what_the_reader_does_not_know_is_an_error(tmp_path: Path, line: str) -> None:
    """An image that is checked here would be another one than an engine builds."""
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM debian:bookworm-slim\n{line}\n")
    with pytest.raises(dockerfile.DockerfileError):
        [dockerfile.command(one.rest) for one in dockerfile.read(path)[-1].instructions]


def test_reader(tmp_path: Path) -> None:
    """Arguments, stages and continued lines would be read in another way than an engine does."""
    path = tmp_path / "Dockerfile"
    path.write_text(
        "# a comment\nARG TAG=one\nFROM debian:${TAG} AS first\nRUN a \\\n    # within\n    && b\n"
        "FROM debian:$TAG\nENV A=1 B='2 3'\n"
    )
    first, last = dockerfile.read(path, {"TAG": "two"})
    assert (first.base, first.name, last.base, last.name) == (
        "debian:two",
        "first",
        "debian:two",
        "",
    )
    assert first.instructions == [dockerfile.Instruction("RUN", "a && b")]
    assert dict(dockerfile.pairs(last.instructions[0].rest)) == {"A": "1", "B": "2 3"}


def assert_takes(arguments: list[str]) -> None:
    """``discod`` takes these options."""
    main.make_context("discod", list(arguments), parent=click.Context(main))
