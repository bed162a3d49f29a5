"""A plot with logarithmic axes as SVG text, so that no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555", "#e69f00")


def log_log_plot(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return an SVG with one line a name through its points; x in powers of 4, y of 10."""
    points = [point for line in lines.values() for point in line]
    x_from, x_to = (math.log2(pick(x for x, _ in points)) for pick in (min, max))
    y_from = math.floor(math.log10(min(y for _, y in points)))
    y_to = math.ceil(math.log10(max(y for _, y in points)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - x_from) / (x_to - x_from)
        up = (math.log10(y) - y_from) / (y_to - y_from)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP / 2, title, "start"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label),
        _text(LEFT - 8, TOP - 8, y_label, "end"),
    ]
    for power in range(y_from, y_to + 1):
        x, y = place(2**x_from, 10.0**power)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x - 8, y + 4, f"{10.0**power:g}", "end"))
    for power in range(math.ceil(x_from), math.floor(x_to) + 1, 2):
        x, y = place(2**power, 10.0**y_from)
        parts.append(f'<path d="M{x:.1f} {y:.1f}V{TOP}" stroke="#dddddd"/>')
        parts.append(_text(x, y + 18, f"{2**power}"))
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        placed = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = placed[-1]
        parts.append(_text(x + 6, y + 4, name, "start", colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
