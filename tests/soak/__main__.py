"""``python -m tests.soak``: run it, print the table, exit with 1 when something was not flat."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.report import as_json, picture, problems, table
from tests.soak.run import Plan, soak


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=0.0,
        help="restart the daemon (SIGTERM) this often; 0: never",
    )
    parser.add_argument("--out", type=Path, help="write soak.json and soak.svg into this directory")
    arguments = parser.parse_args()
    plan = Plan(arguments.minutes * 60, arguments.seed, restart_seconds=arguments.restart_seconds)
    folder = Path(tempfile.mkdtemp(prefix="discod-soak-"))
    print(f"seed {plan.seed}, {arguments.minutes:g} minutes; logs in {folder}", flush=True)
    outcome = soak(plan, folder)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "soak.json").write_text(as_json(plan, outcome))
        (arguments.out / "soak.svg").write_text(picture(outcome))
    print(table(outcome))
    for name, done in outcome.done.items():
        print(f"{name}: {done}")
    print(f"{outcome.visits} visitors, {outcome.kills} of them killed; {outcome.restarts} restarts")
    found = problems(outcome)
    for problem in found:
        print(f"NOT FLAT: {problem}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
