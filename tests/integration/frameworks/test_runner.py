"""``python -m disco_client``: the script is unchanged, and so is all that it can see."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

import disco_client
from disco_client.__main__ import command
from disco_client.patches import torch as torch_patch
from tests.helpers.daemon import Daemon, eventually
from tests.helpers.pages import run_page
from tests.helpers.plain_script import LAYERS, STEPS, Model
from tests.helpers.scripts import (
    PAGE,
    RUNNER,
    SCRIPT,
    by_the_page,
    ended,
    equal,
    plain_gradients,
    run,
    start,
    summary_of,
)

REPORT = """\
import os, pickle, sys
class Thing: pass
main = sys.modules["__main__"]
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path[0], main.__dict__ is globals(), main.__builtins__ is __builtins__)
"""

ENDS = {
    "exit code": "import sys\nsys.exit(3)\n",
    "exit message": "raise SystemExit('no data')\n",
    "error": "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n"
    "    raise ValueError('bad') from e\n",
    "syntax": "def f(:\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "hook": "import sys\nsys.excepthook = lambda kind, error, frames: print('mine', kind)\n1 / 0\n",
    "thread": "import pickle, threading\nclass Thing: pass\n"
    "def late():\n    threading.main_thread().join()\n    print(len(pickle.dumps(Thing())))\n"
    "threading.Thread(target=late).start()\n",
}

FORK_EACH = """\
import os, sys
from pathlib import Path
import disco_client.__main__
children = {}
for script in map(Path, sys.argv[1:]):
    child = os.fork()
    if not child:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(script.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["disco_client", str(script)]
        break
    children[child] = script.with_suffix(".code")
else:
    for child, file in children.items():
        file.write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    sys.exit()
disco_client.__main__.main()
"""
"""Each script by the runner, in a process of its own that need not import torch again."""


def test_the_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    """Else a script that looks at argv, its path or __main__ would work differently, or not."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "report.py").write_text(REPORT)
    link = tmp_path / "link.py"
    link.symlink_to(package / "report.py")
    args = ["--scratch", "x", "--help", "-m", "--", "--arena=1"]
    forms: list[list[str | Path]] = [[link, *args], ["-m", "package.report", *args]]
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        (start(*form, **environment), start(*RUNNER, *form, **environment)) for form in forms
    ]
    for plain, ours in processes:
        assert ended(ours) == ended(plain)


def test_it_ends_as_it_would(tmp_path: Path) -> None:
    """Else a scheduler would read a failed run as a good one, or a traceback would show discod."""
    scripts = []
    for name, source in ENDS.items():
        scripts.append(tmp_path / f"{name.replace(' ', '_')}.py")
        scripts[-1].write_text(source)
    forked = ended(start("-c", FORK_EACH, *scripts))
    assert forked == (0, "", "")
    for script in scripts:
        code, out, err = ended(start(script))
        assert script.with_suffix(".code").read_text() == str(code), script.stem
        assert script.with_suffix(".out").read_text() == out
        assert script.with_suffix(".err").read_text() == err


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradients of the script without discod."""
    return plain_gradients(tmp_path_factory.mktemp("plain") / "plain")


def test_an_unchanged_script_trains(shared_daemon: Daemon, tmp_path: Path, plain: Path) -> None:
    """Else the shortest way in would give other gradients, offload nothing, or take options."""
    command = by_the_page("python", tmp_path)
    command[2:2] = ["--arena", "2MiB"]
    args = ["--out", tmp_path / "ours", "--scratch", "mine", "--arena", "none"]
    err = run(*command, *args, DISCOD_SOCKET_DIR=str(shared_daemon.socket_dir))
    assert equal(plain, tmp_path / "ours0")
    assert summary_of(err) == [str(LAYERS * STEPS)]
    assert "(2.0 MiB arena)" in err


def test_everything_that_autograd_saves(shared_daemon: Daemon, tmp_path: Path, plain: Path) -> None:
    """Else --offload-all would offload nothing of a model that does not recompute."""
    environment = {"DISCOD_SOCKET_DIR": str(shared_daemon.socket_dir), "DISCOD_ARENA": "8MiB"}
    ours = [*RUNNER, "--offload-all", SCRIPT, "--no-recompute", "--out", tmp_path / "ours"]
    err = run(*ours, **environment)
    assert equal(plain, tmp_path / "ours0")
    (blobs,) = summary_of(err)
    assert int(blobs) >= STEPS * LAYERS * 2


def test_a_run_that_offloads_nothing_says_so(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Else one would believe in an offload that never was; --min-bytes must reach the client."""
    environment = {"DISCOD_SOCKET_DIR": str(shared_daemon.socket_dir), "DISCOD_ARENA": "2MiB"}
    options = ["--min-bytes", "2MiB"]
    err = run(*RUNNER, *options, SCRIPT, "--out", tmp_path / "ours", **environment)
    assert err.count("nothing was offloaded") == 1
    assert "1.0 MiB, and min_bytes is 2.0 MiB" in err
    assert summary_of(err) == []


def test_two_ranks_share_the_daemon_that_they_start(short_dir: Path, tmp_path: Path) -> None:
    """Else each rank would start its own, print its own line, or leave something behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "DISCOD_SOCKET_DIR": str(short_dir),
        "DISCOD_ARENA": "2MiB",
    }
    alone = [*torchrun, "--nproc-per-node=2", SCRIPT, "--out", tmp_path / "plain"]
    plain = start(*alone, **environment)
    command = by_the_page("torchrun", scratch, *torchrun)
    err = run(*command, "--out", tmp_path / "ours", **environment)
    assert ended(plain)[0] == 0
    for rank in (0, 1):
        assert equal(tmp_path / f"plain{rank}", tmp_path / f"ours{rank}")
    assert summary_of(err) == [str(LAYERS * STEPS)]
    assert "rank 0 of 2" in err
    eventually(lambda: not daemons_in(short_dir), 20, "the daemon's end")
    assert os.listdir(short_dir) == []
    assert os.listdir(scratch) == []


def daemons_in(socket_dir: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(socket_dir) in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["nothere.py"], "no file 'nothere.py'"),
        (["-m", "no_such_module"], "no module 'no_such_module'"),
        (["--arena", "much", str(SCRIPT)], "'much' is no size"),
        (["--arenas", "1", str(SCRIPT)], "No such option"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: Sequence[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a typo would show up as an error of the training, or hours later."""
    from disco_client import __main__

    monkeypatch.setattr(sys, "argv", ["disco_client", *arguments])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Else one would have to find the page to learn how torchrun and this go together."""
    from disco_client import __main__

    monkeypatch.setattr(sys, "argv", ["disco_client", "--help"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "torchrun --nproc-per-node 8 -m disco_client --scratch /nvme train.py" in text
    for option in command.params:
        assert option.opts[0] in text or option.name in text.lower()


def test_the_page_has_every_option() -> None:
    """Else an option would be known to readers of --help alone, or be gone and still promised."""
    rows = PAGE.partition("| option |")[2].partition("\n\n")[0].splitlines()[2:]
    table = {name for row in rows for name in re.findall(r"`(--[a-z-]+)", row.split("|")[1])}
    assert table == {o for option in command.params for o in option.opts if o.startswith("--")}


def test_the_page_on_pytorch(attach_to: Callable[..., None], shared_daemon: Daemon) -> None:
    """Else the lines that the page on plain PyTorch has one copy would not run or not offload."""
    attach_to(shared_daemon, arena="16MiB")
    layer, head = torch.nn.Linear(256, 256), torch.nn.Sequential(torch.nn.Linear(256, 1))
    reached = Model(recompute=True)
    try:
        run_page(
            "frameworks/torch.md",
            model=lambda batch: reached(batch).sum(),
            batch=torch.randn(1024, 256),
            layer=layer,
            hidden=torch.randn(1024, 256, requires_grad=True) * 1.0,
            head=lambda hidden: head(hidden).sum(),
        )
    finally:
        torch_patch.disable()
    assert disco_client.stats().saved_blobs == LAYERS + 2
