"""The documents say what is true: commands, options, environment, files and the version exist."""

import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from torch.distributed.run import parse_args as parse_torchrun

import disco_client
import discod
from disco_client import environment
from disco_client.__main__ import command as disco_client_command
from discod.cli import main
from discod.commands import SUMMARIES
from discod.exits import Exit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    path
    for directory in (".", "docs", "docs/frameworks", "systemd", "docker")
    for path in (ROOT / directory).glob("*.md")
)


def commands() -> list[click.Command]:
    """``discod`` and its subcommands."""
    context = click.Context(main)
    subcommands = (main.get_command(context, name) for name in main.list_commands(context))
    return [main, *(command for command in subcommands if command is not None)]


def options() -> Iterator[click.Option]:
    """Every option of every command."""
    for command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield parameter


def shell_lines(text: str) -> list[str]:
    """The lines of all shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_option_is_documented() -> None:
    """Else users would not learn of an option, or read of it under another name."""
    missing = [name for option in options() for name in option.opts if f"`{name}" not in README]
    assert missing == []


def test_documented_options_exist() -> None:
    """Else the README would promise an option that is gone."""
    table = README.partition("## Options of the daemon")[2].partition("## Options of the client")[0]
    known = {name for option in options() for name in option.opts} | {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", table)) - known == set()


def test_every_option_has_its_environment_variable() -> None:
    """Else "each option is also an environment variable" would be untrue."""
    for option in main.params:
        if option.name != "version":
            assert option.envvar == f"DISCOD_{option.name}".upper()


def test_the_client_knows_the_daemons_environment() -> None:
    """Else it would warn of a variable that a daemon started by it does read."""
    assert {str(option.envvar) for option in main.params if option.envvar} - environment.CLIENT == (
        environment.DAEMON
    )


def test_documented_environment_exists() -> None:
    """Else someone would set a variable that nothing reads."""
    known = {str(option.envvar) for option in options()} | environment.CLIENT
    for path in DOCUMENTS:
        found = set(re.findall(r"DISCOD_[A-Z_]*[A-Z]", path.read_text()))
        assert found - known - environment._TESTS == set(), path.name


def test_every_argument_of_connect_is_documented() -> None:
    """Else the client's options would be known to readers of the source alone."""
    section = README.partition("## Options of the client")[2]
    for name in inspect.signature(disco_client.connect).parameters:
        assert f"| `{name}` |" in section


def test_exit_codes_are_documented() -> None:
    """Else a service manager's rules would be guesswork."""
    text = README.partition("Exit codes:")[2].partition("\n\n")[0]
    spans = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?: to (\d+))?", text)]
    documented = {code for first, last in spans for code in range(first, last + 1)}
    assert documented == {code.value for code in Exit} - {Exit.OK, Exit.CRASHED}


@pytest.mark.parametrize("line", shell_lines(README))
def test_readme_command_exists(line: str) -> None:
    """Else the first thing that a reader types fails."""
    for part in line.split(" && "):
        words = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]
        check_command(words[0], words[1:])


def check_command(program: str, arguments: list[str]) -> None:
    """``program`` is one that we know, and takes ``arguments``; nothing is run."""
    match program, arguments:
        case "make", targets:
            check_make_targets(targets)
        case "discod", _:
            main.make_context("discod", arguments)
        case "torchrun", _:
            assert parse_torchrun(arguments).training_script == "train.py"
        case "pip", ["install", what]:
            pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
            extras = re.findall(r"\[(\w+)\]", what)
            assert set(extras) <= set(pyproject["project"]["optional-dependencies"])
        case "python", ["-m", "disco_client", *rest]:
            disco_client_command.make_context("disco_client", rest)
        case "python3", ["-m", "venv", _]:
            pass
        case "python", [script]:
            assert f"as `{script}`" in README
        case ".", [script]:
            made = re.findall(r"-m venv (\S+)", README)
            assert script in [f"{directory}/bin/activate" for directory in made]
        case _:
            pytest.fail(f"{program} is no program that this test knows")


def test_commands_in_the_text_exist() -> None:
    """Else the documents would name targets, modules or subcommands that are gone."""
    for path in DOCUMENTS:
        text = path.read_text()
        check_make_targets(re.findall(r"\bmake ([a-z-]+)[` ]+ *(?:#|`|$)", text, re.MULTILINE))
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert importlib.util.find_spec(module), f"{path.name}: python -m {module}"
        for subcommand in re.findall(r"`discod ([a-z]+)", text):
            assert subcommand in SUMMARIES, f"{path.name}: discod {subcommand}"


def check_make_targets(targets: list[str]) -> None:
    """Each is a target of the Makefile."""
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    """Else a reader would follow a link to nothing."""
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_changelog_has_this_version_on_top() -> None:
    """Else a release would go out without its changes, or with another one's."""
    first = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == discod.__version__


def test_every_test_named_for_a_fault_exists() -> None:
    """Else a fault would be said to be tested by a test that was renamed or deleted."""
    rows = re.findall(r"^\| (DC-\d+) \|.*\|(.*)\|$", (ROOT / "docs/faults.md").read_text(), re.M)
    assert len(rows) > 50
    for fault, cell in rows:
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert names, fault
        for file, name in names:
            path = ROOT / "tests" / (file if file.startswith("unit/") else f"integration/{file}")
            assert f"def {name}(" in path.read_text(), f"{fault}: {file}::{name}"
