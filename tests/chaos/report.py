"""What a run gave, as JSON and as a short page."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.rounds import Outcome
from tests.chaos.world import Counts


def results(outcome: Outcome, counts: Counts, settings: dict[str, Any]) -> dict[str, Any]:
    """All figures."""
    reclaims = sorted(counts.reclaim_seconds)
    return {
        "settings": settings,
        **asdict(outcome),
        "kills": dict(counts.kills),
        "errors": dict(counts.errors),
        "retried_steps": counts.retried_steps,
        "reclaims": len(reclaims),
        "slowest_reclaim_seconds": max(reclaims, default=0.0),
        "median_reclaim_seconds": reclaims[len(reclaims) // 2] if reclaims else 0.0,
        "slowest_start_seconds": max(counts.ready_seconds, default=0.0),
    }


def page(figures: dict[str, Any]) -> str:
    """The same as Markdown."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"

    grown = max(figures["slopes"].values(), default=0.0)
    rows = {
        "seed": figures["seed"],
        "rounds in which all held": figures["rounds"],
        "failure": figures["failure"] or "none",
        "steps, each bit-equal": figures["steps"],
        "read and written": f"{figures['disk_bytes'] / 2**30:.1f} GiB",
        "actions": listed(figures["actions"]),
        "signals": listed(figures["kills"]),
        "clients resumed": figures["resumes"],
        "errors raised": listed(figures["errors"]),
        "steps made again": figures["retried_steps"],
        "reclaim of a killed rank": (
            f"{figures['reclaims']} times, slowest {figures['slowest_reclaim_seconds']:.3f} s, "
            f"median {figures['median_reclaim_seconds']:.3f} s"
        ),
        "bytes leaked": figures["leaked_bytes"],
        "most growth of own memory": f"{grown / 1024:.1f} KiB a round",
        "time": f"{figures['seconds']:.0f} s",
    }
    return "| what | figure |\n|---|---|\n" + "".join(f"| {k} | {v} |\n" for k, v in rows.items())


def write(folder: Path, name: str, figures: dict[str, Any], text: str) -> None:
    """The figures as JSON and the page, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)
