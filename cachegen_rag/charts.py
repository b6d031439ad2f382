"""Small charts as SVG text, for pages that must not load anything: bars, stacked timelines, scatter lines.

Colours are CSS classes ``s0`` .. ``s5`` of the page. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 760
LEFT = 150
NAMES = 310
RIGHT = 20


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Horizontal bars of ``(name, value, shown value)``."""
    top = max((value for _, value, _ in rows), default=0) or 1
    body = []
    for n, (name, value, shown) in enumerate(rows):
        y = 22 * n
        width = (WIDTH - NAMES - RIGHT - 70) * value / top
        body.append(
            f'<text x="{NAMES - 8}" y="{y + 14}" class="end">{escape(name[:52])}<title>{escape(name)}</title></text>'
            f'<rect x="{NAMES}" y="{y + 2}" width="{width:.1f}" height="16" class="s0"/>'
            f'<text x="{NAMES + width + 6:.1f}" y="{y + 14}">{escape(shown)}</text>'
        )
    return _svg(22 * len(rows) + 4, label, "".join(body))


def timeline(rows: Sequence[tuple[str, float, Sequence[tuple[float, str]]]], label: str, unit: str = "s") -> str:
    """One row a request: ``(name, start, [(length, class), ...])``, lengths and starts in one unit."""
    begin = min((start for _, start, _ in rows), default=0.0)
    end = max((start + sum(length for length, _ in parts) for _, start, parts in rows), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / ((end - begin) or 1.0)
    body = [_ticks(begin, end, lambda v: LEFT + (v - begin) * scale, 14 * len(rows) + 4, unit, begin)]
    for n, (name, start, parts) in enumerate(rows):
        x, y = LEFT + (start - begin) * scale, 14 * n
        body.append(f'<text x="{LEFT - 8}" y="{y + 10}" class="end small">{escape(name[:28])}</text>')
        for length, kind in parts:
            body.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{max(length * scale, 0.5):.2f}" height="10" class="{kind}"/>'
            )
            x += length * scale
    return _svg(14 * len(rows) + 24, label, "".join(body))


def lines(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], label: str, x_name: str, y_name: str) -> str:
    """Points joined by lines on logarithmic axes; values at or below 0 are left out."""
    kept = [(name, sorted(p for p in points if p[0] > 0 and p[1] > 0)) for name, points in series]
    every = [p for _, points in kept for p in points]
    if not every:
        return ""
    height, bottom = 340, 40
    x_low, x_high = _span([p[0] for p in every])
    y_low, y_high = _span([p[1] for p in every])

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (math.log(point[0]) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT - 130)
        y = 10 + (y_high - math.log(point[1])) / (y_high - y_low) * (height - bottom - 10)
        return x, y

    body = []
    for decade in range(math.floor(y_low / math.log(10)), math.ceil(y_high / math.log(10)) + 1):
        if y_low <= decade * math.log(10) <= y_high:
            _, y = at((every[0][0], 10.0**decade))
            body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT - 130}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="end small">{10.0**decade:g}</text>')
    for power in range(math.floor(x_low / math.log(2)), math.ceil(x_high / math.log(2)) + 1):
        if x_low <= power * math.log(2) <= x_high:
            x, _ = at((2.0**power, every[0][1]))
            body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - bottom}" class="grid"/>')
            body.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" class="mid small">{2.0**power:g}</text>')
    for n, (name, points) in enumerate(kept):
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, points))
        body.append(f'<polyline points="{path}" class="line l{n % 6}"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="s{n % 6}"/>' for x, y in map(at, points)]
        y = 20 + 16 * n
        body.append(f'<rect x="{WIDTH - RIGHT - 118}" y="{y - 9}" width="10" height="10" class="s{n % 6}"/>')
        body.append(f'<text x="{WIDTH - RIGHT - 102}" y="{y}" class="small">{escape(name[:22])}</text>')
    middle = (LEFT + WIDTH - RIGHT - 130) / 2
    body.append(f'<text x="{middle}" y="{height - 6}" class="mid">{escape(x_name)}</text>')
    body.append(
        f'<text x="12" y="{height / 2}" class="mid" transform="rotate(-90 12 {height / 2})">{escape(y_name)}</text>'
    )
    return _svg(height, label, "".join(body))


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log(min(values)), math.log(max(values))
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(begin: float, end: float, at, height: float, unit: str, zero: float) -> str:  # type: ignore[no-untyped-def]
    span = (end - begin) or 1.0
    step = 10 ** math.floor(math.log10(span))
    step = next(s for s in (step / 5, step / 2, step, step * 2, step * 5) if span / s <= 8)
    out = []
    for n in range(int(span / step) + 1):
        x = at(begin + n * step)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" class="grid"/>')
        out.append(f'<text x="{x:.1f}" y="{height + 14}" class="mid small">{begin + n * step - zero:g} {unit}</text>')
    return "".join(out)


def _svg(height: float, label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">{body}</svg>'
