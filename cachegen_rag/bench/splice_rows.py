"""Rows of the splice benchmark: one measurement, many questions pooled, the figures that it is judged by, the plot."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cachegen_rag.recompute import Method
from cachegen_rag.trial import Outcome

RESAMPLES = 2000


@dataclass(frozen=True)
class Case:
    """One row of the table: which documents, which method, how much, in which precision.

    stored : ``naive``, ``warm``, ``exact`` (the whole run of documents as one prefix) or ``absent`` (no documents).
    """

    stored: str
    method: Method
    budget: float
    coded: bool = False
    whole: bool = False  # separators stored with their documents
    permuted: bool = False

    @property
    def name(self) -> str:
        """``method`` of the row."""
        if self.stored != "warm":
            return {"naive": "naive", "exact": "exact prefix", "absent": "no documents"}[self.stored]
        return self.method.name + ("+" if self.whole else "") + (", permuted" if self.permuted else "")


def figures(outcome: Outcome, answer: str | None, accepted: Sequence[str], text: str) -> dict[str, Any]:
    """One measurement, JSON-ready but for the arrays."""
    out: dict[str, Any] = {
        "kl": outcome.kl,
        "agree": outcome.agree,
        "nll": outcome.nll,
        "seconds": outcome.seconds,
        "recomputed": outcome.recomputed,
        "calls": outcome.calls,
    }
    if answer is not None:
        out |= {"f1": f1(answer, accepted), "f1_text": f1(answer, (text,))}
    return out


def summarize_case(case: Case, measured: Sequence[dict[str, Any]], seconds: Sequence[float] = ()) -> dict[str, Any]:
    """Pool the questions; 95 % intervals by resampling whole questions; the median of what was timed."""
    totals = np.array([(m["kl"].sum(), m["agree"].sum(), len(m["kl"])) for m in measured])
    draws = np.random.default_rng(0).integers(len(totals), size=(RESAMPLES, len(totals)))
    samples = totals[draws].sum(axis=1)
    row: dict[str, Any] = {"method": case.name, "budget": case.budget, "kv": "level" if case.coded else "fp16"}
    for column, name in ((0, "kl"), (1, "top1")):
        low, high = np.percentile(samples[:, column] / samples[:, 2], [2.5, 97.5])
        value = totals[:, column].sum() / totals[:, 2].sum()
        row |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    for name in ("recomputed", "nll", "calls", "f1", "f1_text"):
        if name in measured[0]:
            row[name] = float(np.mean([m[name] for m in measured]))
    return row | ({"seconds": float(np.median(seconds))} if seconds else {})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures by which the splice is judged: of the fp16 rows, except where a key says ``level``."""
    fp16 = [row for row in rows if row["kv"] == "fp16" and "permuted" not in row["method"]]
    by_name = {(row["method"], row["kv"]): row for row in rows}
    text, naive = by_name["text", "fp16"], by_name["naive", "fp16"]
    ours = [row for row in fp16 if row["method"] not in ("text", "naive", "no documents", "exact prefix")]

    def best(limit: float) -> dict[str, Any]:
        return min((row for row in ours if row["recomputed"] <= limit + 0.005), key=lambda row: row["kl"])

    at_15 = best(0.15)
    timed = min((row for row in ours if row["budget"] == 0.15), key=lambda row: row["kl"], default=at_15)
    out = {
        "kl_naive": naive["kl"],
        "kl_gap_left_at_15": at_15["kl"] / naive["kl"],
        "kl_gap_left_at_8": best(0.08)["kl"] / naive["kl"],
        "kl_gap_left_at_0": best(0.0)["kl"] / naive["kl"],
        "prefix_exact_kl": by_name["exact prefix", "fp16"]["kl"],
        "top1_at_15": at_15["top1"],
        "f1_text": text["f1"],
        "f1_at_15": timed.get("f1"),
        "ttft_ratio_at_15": timed["seconds"] / text["seconds"] if "seconds" in timed else None,
        "best_at_15": at_15["method"],
        "best_at_8": best(0.08)["method"],
    }
    if ("exact prefix", "level") in by_name:
        out["prefix_exact_kl_level"] = by_name["exact prefix", "level"]["kl"]
    return out


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Token F1 of an answer against the best of the accepted ones, as SQuAD and MuSiQue count it."""

    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    def score(gold: str) -> float:
        a, b = words(answer), words(gold)
        common = sum((Counter(a) & Counter(b)).values())
        return 2 * common / (len(a) + len(b)) if a and b else float(a == b)

    return max(score(gold) for gold in accepted)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """KL against the fraction recomputed, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in result["rows"]:
        if row["kv"] == "fp16" and row["method"] not in ("text", "no documents", "exact prefix"):
            point = (100 * row["recomputed"], row["kl"], row["kl_low"], row["kl_high"])
            lines.setdefault(row["method"], []).append(point)
    for name, points in lines.items():
        x, y, low, high = np.array(sorted(points)).T
        axes.errorbar(x, y, yerr=[y - low, high - y], marker="o", capsize=2, label=name)
    axes.set(xlabel="recomputed (%)", ylabel="KL against full prefill (nats per token)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
