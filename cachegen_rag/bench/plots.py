"""Plots of benchmark results. The only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachegen_rag.errors import MissingDependencyError


def rate_distortion_plot(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """KL (logarithmic, nats per token, 95 % intervals) against stored bits per element; one line a codec."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 'cachegen-rag[plot]'") from error
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["codec"], []).append(row)
    for name, points in sorted(families.items(), key=lambda item: item[0] != "ours"):
        points.sort(key=lambda row: row["bits_per_element"])
        floor = [max(row["kl"], 1e-6) for row in points]
        below = [max(kl - max(row["kl_low"], 1e-6), 0) for kl, row in zip(floor, points, strict=True)]
        above = [max(row["kl_high"] - kl, 0) for kl, row in zip(floor, points, strict=True)]
        style = {"color": "black", "linewidth": 2.5} if name == "ours" else {"linewidth": 1.2}
        bits = [row["bits_per_element"] for row in points]
        axes.errorbar(bits, floor, yerr=[below, above], marker="o", capsize=3, label=name, **style)
    axes.set(
        xscale="log", yscale="log", xlabel="stored bits per element", ylabel="KL(uncoded || coded), nats per token"
    )
    ticks = [0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"Documents of {rows[0]['document_tokens']} tokens, {rows[0]['documents']} of them")
    figure.savefig(path, dpi=150)
