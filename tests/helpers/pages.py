"""The code blocks of the documentation's pages, run as a reader would paste them."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

MOST_LINES = 10
"""What a reader is willing to copy."""


def run_page(page: str, **names: Any) -> dict[str, Any]:
    """Run the one Python block of ``docs/<page>`` with ``names`` defined; the names it leaves.

    ``names`` is what the page says that the reader has already, such as ``model``.
    """
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"{page} has {len(blocks)} Python blocks"
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert 2 <= len(lines) <= MOST_LINES, f"{page}: {len(lines)} lines to copy"
    exec(compile(blocks[0], str(DOCS / page), "exec"), names)
    return names
