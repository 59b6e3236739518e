"""Other users of the machine: commands that run as them."""

import subprocess
import sys
from collections.abc import Sequence


def as_user(uid: int, gid: int | None = None, groups: Sequence[int] = ()) -> list[str]:
    """A prefix that runs a command as this user, in these groups alone."""
    more = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}", more]


def python_as(prefix: Sequence[str], code: str, *args: object, timeout: float = 30) -> str:
    """What Python code prints, run with a prefix; it fails when the code does."""
    command = [*prefix, sys.executable, "-c", code, *map(str, args)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
