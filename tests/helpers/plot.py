"""Line charts as SVG, by hand: they need nothing that may not be installed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 420, 300, 50
COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e")
TICKS = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line through points ``(x, y)``."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart; both axes begin at 0."""

    title: str
    x_label: str
    curves: Sequence[Curve]


def svg(panels: Sequence[Panel]) -> str:
    """The panels side by side."""
    body = [
        f'<g transform="translate({index * WIDTH} 0)">{"".join(_panel(panel))}</g>'
        for index, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{chr(10).join(body)}\n</svg>\n'
    )


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    x_most = max([x for x, _ in points], default=0.0) or 1.0
    y_most = max([y for _, y in points], default=0.0) or 1.0
    left, bottom, right, top = MARGIN, HEIGHT - MARGIN, WIDTH - 15, 35

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / x_most, bottom - (bottom - top) * y / y_most

    yield _text((left + right) / 2, 20, panel.title, "middle")
    yield _text((left + right) / 2, HEIGHT - 12, panel.x_label, "middle")
    for tick in range(TICKS + 1):
        x, y = x_most * tick / TICKS, y_most * tick / TICKS
        _, height = at(0, y)
        yield f'<path d="M{left} {height:.1f}H{right}" stroke="#ddd"/>'
        yield _text(left - 6, height + 4, f"{y:.3g}", "end")
        yield _text(at(x, 0)[0], bottom + 16, f"{x:.3g}", "middle")
    for index, curve in enumerate(panel.curves):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve.points)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield f'<rect x="{left + 8}" y="{top + 4 + 16 * index}" width="10" height="10" '
        yield f'fill="{colour}"/>{_text(left + 24, top + 13 + 16 * index, curve.name, "start")}'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
