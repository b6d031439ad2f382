"""One self-contained HTML page of benchmark results and request records: nothing is loaded, no script runs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from cachegen_rag import charts
from cachegen_rag.errors import ConfigError
from cachegen_rag.observability import STAGES, reason_class

MAX_TIMELINE = 120
"""Requests drawn in the timeline: the last ones."""
MAX_RUN_BYTES = 256 << 20
RATE_KEYS = ("bits_per_element", "bytes_per_token", "bytes", "recomputed", "share")
DISTORTION_KEYS = ("kl", "kl_mean", "dppl", "delta_ppl")


@dataclass
class Runs:
    """What was read: records of requests (as dicts) and results of benchmarks."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def load_runs(paths: Iterable[str | Path]) -> Runs:
    """Read JSON objects or JSON lines: results of ``bench``, ``ask`` and ``demo``, records of a RequestLog.

    Raises
    ------
    ConfigError
        A file cannot be read or holds neither; the message names it.
    """
    runs = Runs()
    for path in map(Path, paths):
        try:
            if path.stat().st_size > MAX_RUN_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_RUN_BYTES >> 20} MiB")
            text = path.read_text(encoding="utf-8")
            values = _values(text)
        except (OSError, ValueError, RecursionError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"cannot read {path}: {error}") from None
        before = len(runs.requests) + len(runs.benchmarks)
        for value in values:
            _sort_in(runs, value)
        if len(runs.requests) + len(runs.benchmarks) == before:
            raise ConfigError(f"{path} holds neither a benchmark's result nor records of requests")
        runs.sources.append(path.name)
    return runs


def _values(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _sort_in(runs: Runs, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _sort_in(runs, item)
    elif isinstance(value, dict):
        if "benchmark" in value and isinstance(value.get("rows", []), (list, dict)):
            runs.benchmarks.append(value)
        elif "ttft_ms" in value and isinstance(value.get("segments"), list):
            runs.requests.append(value)
        for key in ("record", "records", "requests", "cachegen"):
            _sort_in(runs, value.get(key))


def render(runs: Runs) -> str:
    """The page."""
    parts = [f"<h1>cachegen-rag report</h1><p class=dim>{escape(', '.join(runs.sources))}</p>"]
    if runs.requests:
        parts += _requests(runs.requests)
    for result in runs.benchmarks:
        parts += _benchmark(result)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>cachegen-rag report</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


# ---- requests ----


def _requests(records: Sequence[dict[str, Any]]) -> list[str]:
    documents = [s for r in records for s in r["segments"] if s.get("kind") == "document"]
    misses = [s for s in documents if s.get("source") == "text"]
    first = sorted(r["ttft_ms"] for r in records if r.get("completion_tokens"))
    cards = {
        "requests": f"{len(records)}",
        "documents hit": f"{1 - len(misses) / len(documents):.0%}" if documents else "-",
        "median time to first token": f"{statistics.median(first):.0f} ms" if first else "-",
        "tokens spliced": f"{sum(r.get('spliced_tokens', 0) for r in records):,}",
        "tokens recomputed": f"{sum(r.get('recomputed_tokens', 0) for r in records):,}",
        "read from the store": _bytes(sum(r.get("bytes_fetched", 0) for r in records)),
    }
    parts = ["<h2>Requests</h2><div class=cards>"]
    parts += [f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cards.items()]
    parts.append("</div>")
    parts += _timeline(records)
    parts += _distribution(first)
    parts += _hits(documents)
    parts += _sizes(documents)
    return parts


def _timeline(records: Sequence[dict[str, Any]]) -> list[str]:
    shown = sorted(records, key=lambda r: r.get("started_at", 0.0))[-MAX_TIMELINE:]
    if not all(r.get("started_at") for r in shown):  # records of another origin have no clock: one after the other
        at = 0.0
        shown = [dict(r) for r in shown]
        for record in shown:
            record["started_at"] = at
            at += record.get("total_ms", 0.0) / 1e3
    rows = []
    for number, record in enumerate(shown, 1):
        wait = record.get("wait_ms", 0.0)
        prompt = max(0.0, record["ttft_ms"] - wait)
        rest = max(0.0, record.get("total_ms", 0.0) - record["ttft_ms"])
        spliced = record.get("spliced_tokens", 0)
        lengths = ((wait / 1e3, "s5"), (prompt / 1e3, "s0" if spliced else "s1"), (rest / 1e3, "s2"))
        rows.append((f"{number}: {record.get('prompt_tokens', 0)} tokens", record["started_at"], lengths))
    legend = _legend({"s5": "waiting", "s0": "prompt, spliced", "s1": "prompt, computed", "s2": "answering"})
    return ["<h3>Timeline</h3>", legend, charts.timeline(rows, "timeline of requests")]


def _distribution(first: Sequence[float]) -> list[str]:
    if not first:
        return []
    edges = [0.0, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, float("inf")]
    counts = [sum(low <= value < high for value in first) for low, high in pairwise(edges)]
    used = [n for n, count in enumerate(counts) if count]
    rows: list[tuple[str, float, str]] = []
    for n in range(used[0], used[-1] + 1):
        name = f"{edges[n]:g} - {edges[n + 1]:g} ms" if edges[n + 1] != float("inf") else f"over {edges[n]:g} ms"
        rows.append((name, counts[n], str(counts[n])))
    share = {q: first[min(len(first) - 1, round(q * (len(first) - 1)))] for q in (0.5, 0.9, 0.95, 0.99)}
    table = _table(["quantile", "ms"], [[f"{q:.0%}", f"{value:.0f}"] for q, value in share.items()])
    return ["<h3>Time to first token</h3>", charts.bars(rows, "distribution of the time to first token"), table]


def _hits(documents: Sequence[dict[str, Any]]) -> list[str]:
    if not documents:
        return []
    hits = Counter(str(s.get("source")) for s in documents if s.get("source") != "text")
    reasons = Counter(reason_class(s.get("reason")) for s in documents if s.get("source") == "text")
    rows = [(f"hit: {name}", float(n), str(n)) for name, n in hits.most_common()]
    rows += [(f"miss: {name}", float(n), str(n)) for name, n in reasons.most_common(20)]
    stages = [[stage, f"{sum(s.get(f'{stage}_ms', 0.0) for s in documents):.0f}"] for stage in STAGES]
    return ["<h3>Documents</h3>", charts.bars(rows, "hits and miss reasons"), _table(["stage", "ms in all"], stages)]


def _sizes(documents: Sequence[dict[str, Any]]) -> list[str]:
    levels: dict[int, list[dict[str, Any]]] = {}
    for segment in documents:
        if segment.get("level") is not None and segment.get("bytes"):
            levels.setdefault(segment["level"], []).append(segment)
    rows = []
    for level, segments in sorted(levels.items()):
        size, tokens = sum(s["bytes"] for s in segments), sum(s["tokens"] for s in segments)
        rows.append(
            [str(level), str(len(segments)), f"{tokens:,}", _bytes(size), f"{size / tokens:.0f}" if tokens else "-"]
        )
    if not rows:
        return []
    return ["<h3>Sizes</h3>", _table(["level", "documents", "tokens", "bytes read", "bytes a token"], rows)]


# ---- benchmarks ----


def _benchmark(result: dict[str, Any]) -> list[str]:
    environment = result.get("environment") or {}
    about = ", ".join(f"{k}: {v}" for k, v in environment.items() if isinstance(v, (str, int, float)))
    parts = [f"<h2>Benchmark: {escape(str(result['benchmark']))}</h2><p class=dim>{escape(about)}</p>"]
    summary = result.get("summary")
    if isinstance(summary, dict) and summary:
        parts.append(_table(["summary", ""], [[k, _figure(v)] for k, v in summary.items()]))
    rows = [row for row in result.get("rows") or [] if isinstance(row, dict)]
    parts.append(_curve(rows))
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        parts.append("<details><summary>all rows</summary>")
        parts.append(_table(columns, [[_figure(row.get(c, "")) for c in columns] for row in rows]) + "</details>")
    return parts


def _curve(rows: Sequence[dict[str, Any]]) -> str:
    """Distortion against rate, one line a contender, where the rows have both."""
    for rate in RATE_KEYS:
        for distortion in DISTORTION_KEYS:
            points = [r for r in rows if _number(r.get(rate)) and _number(r.get(distortion))]
            if len(points) < 2:
                continue
            series: dict[str, list[tuple[float, float]]] = {}
            for row in points:
                name = str(row.get("codec") or row.get("method") or row.get("name") or "measured")
                series.setdefault(name, []).append((float(row[rate]), float(row[distortion])))
            drawn = charts.lines(list(series.items()), f"{distortion} against {rate}", rate, distortion)
            return f"<h3>Rate and distortion</h3>{drawn}" if drawn else ""
    return ""


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_figure(v)}" for k, v in value.items())
    return "" if value is None else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _legend(kinds: dict[str, str]) -> str:
    items = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect width="10" height="10" class="{k}"/></svg> {v}</span>'
        for k, v in kinds.items()
    )
    return f"<p class=legend>{items}</p>"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


STYLE = """
:root{--ink:#1a1a1a;--dim:#666;--paper:#fff;--rule:#ddd;--c0:#1b6ca8;--c1:#c8553d;--c2:#8aa29e;--c3:#7a4fa3;--c4:#b8860b;--c5:#c9c9c9}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--dim:#999;--paper:#161616;--rule:#3a3a3a;--c0:#5aa9e6;--c1:#f08a70;--c2:#5f7a76;--c3:#b18ad6;--c4:#d9a520;--c5:#555}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:860px;margin:2em auto;padding:0 1em}
h1,h2,h3{line-height:1.2}h2{margin-top:2em;border-bottom:1px solid var(--rule)}.dim{color:var(--dim)}
.cards{display:flex;flex-wrap:wrap;gap:1.5em}.cards div{display:flex;flex-direction:column}.cards b{font-size:1.4em}.cards span{color:var(--dim)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9em;margin:.5em 0}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid var(--rule)}td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .small{font-size:10px}svg .end{text-anchor:end}svg .mid{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.line{fill:none;stroke-width:2}.legend span{margin-right:1.2em}.legend svg{width:10px;height:10px}
.s0{fill:var(--c0)}.s1{fill:var(--c1)}.s2{fill:var(--c2)}.s3{fill:var(--c3)}.s4{fill:var(--c4)}.s5{fill:var(--c5)}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}.l3{stroke:var(--c3)}.l4{stroke:var(--c4)}.l5{stroke:var(--c5)}
"""  # noqa: E501
