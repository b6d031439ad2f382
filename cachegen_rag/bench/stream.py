"""Streaming: time to first token over links of all speeds, simulated on traces and with a real model and store.

The simulation plays text, every fixed level, CacheGen's rule and our planner against recorded and generated bandwidth
traces, beside the clairvoyant optimum. The real runs read a real store through a shaped link (a token bucket in the
server, or ``tc tbf`` in a network namespace of its own) with everything else as an application has it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachegen_rag.bench import environment
from cachegen_rag.bench.link_sim import Trace, optimum, simulate
from cachegen_rag.bench.stream_real import measure_links, shaped_namespace
from cachegen_rag.errors import ConfigError
from cachegen_rag.streaming.policy import CacheGenRule, FixedLevel, Link, Planner, Policy, Work

RATES: tuple[float | None, ...] = (1, 5, 20, 100, 1000, None)
"""Mbit/s; None: not shaped."""
CHUNKS, CHUNK_TOKENS = 16, 256
LEVELS = ((1.80, 0.006), (1.30, 0.013), (1.00, 0.022), (0.75, 0.05), (0.55, 0.12))
"""Bits an element and KL a token of the simulated levels, finest first: a codec like ours on the small model."""
ELEMENTS, PREFILL, DEFAULT = 11_520, 100.0, 2
"""Elements a token and tokens a second of the simulated model; index of its default level."""
FACTORS = (0.3, 1.0, 3.0, 10.0)
"""Mean bandwidths, in units of that at which fetching and computing everything take equally long."""
SLACKS = (1.5, 2.0, 3.0)
"""Targets, in units of the earliest first token that is possible at any level."""
RESERVES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the target that CacheGen's rule is given less, until it misses no more targets than ours."""


def run(
    model: str | Path | None = None,
    data: str | Path | None = None,
    rates: Sequence[float | None] | float | None = RATES,
    tokens: int = 1024,
    repeats: int = 5,
    shaping: str = "server",
    real: bool = True,
    simulated: bool = True,
    threads: int | None = None,
    weights: str | None = "q8_0",
    seed: int = 0,
) -> dict[str, Any]:
    """Measure and return one JSON-ready object.

    model : a GGUF file; by default the small model of the demo extra. tokens : of the document that is asked about.
    weights : format that the model is converted to, the one that prefills fastest; None leaves it as it is.
    data : bandwidth traces (a .jsonl file with ``{"bw": [Gbit/s, ...]}`` lines, or the folder that holds
        bandwidth_traces_gbps.jsonl); without it a few of the same kind are drawn.
    rates : Mbit/s of the real links (a list, or one of them), None for unshaped. repeats : of each kind at each.
    shaping : "server" (a token bucket), or "tc" (``tc tbf`` in a network namespace; wants root and Linux).
    real, simulated : which halves to run. threads : of the engine. seed : of generated traces.

    summary:
        ttft_vs_best_p95    : 95th percentile over real requests of ours / min(fixed level, text) at that rate: without
            a target against the default level, asked for the earliest at any level against the best of all levels.
            ttft_best_vs_itself_p95 is the same of the better one's own requests over their median: noise
        regret_mean         : mean excess of our simulated TTFT over the clairvoyant optimum's, no target
        target_miss_excess  : share of simulated requests that miss a target the optimum meets
        kl_vs_cachegen_rule : our expected KL over that of CacheGen's rule at equal misses: the rule plans for the
            largest share of the target at which it misses no more than ours, or else as few as it can. by_traces has
            the same for each set, misses of the rule so tightened, and kl_vs_published_rule for the rule as it is
        overlap_ratio       : median of total time / max(network, decode + splice), real, everything fetched; decode and
            splice are the time during which either is under way, whatever runs side by side
        both_ends_speedup   : min(text, fixed level) / ours at the bandwidth where both take equally long, real
        decision_us         : median time of a decision for 64 chunks, microseconds
    """
    chosen = [rates] if rates is None or isinstance(rates, int | float) else list(rates)
    for name, right, accepted in (
        ("rates", all(rate is None or rate > 0 for rate in chosen), "Mbit/s above 0, or null for an unshaped link"),
        ("tokens", tokens > 0, "above 0"),
        ("repeats", repeats > 0, "above 0"),
        ("shaping", shaping in ("server", "tc"), "server or tc"),
    ):
        if not right:
            raise ConfigError(f"--{name} must be {accepted}")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"decision_us": decision_us()}
    if simulated:
        rows += simulation(trace_sets(data, seed))
        summary.update(summarize_simulation(rows))
    timeline: list[dict[str, Any]] = []
    engine = None
    if real:
        options: dict[str, Any] = {"model": str(model) if model else None, "rates": chosen}
        options |= {"tokens": tokens, "repeats": repeats}
        options |= {"threads": threads, "tc": shaping == "tc", "weights": weights}
        found = _in_namespace(options) if shaping == "tc" else measure_links(**options)
        rows += found["rows"]
        summary.update(found["summary"])
        timeline, engine = found["timeline"], found["model"]
    result: dict[str, Any] = {"benchmark": "stream", "environment": environment(), "rows": rows, "summary": summary}
    result["environment"]["model"] = engine
    result["timeline"] = timeline
    return result


def trace_sets(data: str | Path | None, seed: int = 0) -> dict[str, list[np.ndarray]]:
    """Traces by kind, each scaled to a mean of 1."""
    rng = np.random.default_rng(seed)
    recorded = [np.asarray(bw, float) for bw in _recorded(data)] or [rng.uniform(0.1, 10, 10) for _ in range(10)]
    at = np.arange(20)
    sets = {
        "recorded" if _recorded(data) else "flicker": recorded,
        "steps": [np.where(at < rng.integers(3, 15), 1.0, f) for f in (0.1, 0.2, 0.5, 2, 5)],
        "outages": [np.where((at >= a) & (at < a + 3), 0.01, 1.0) for a in (1, 3, 6, 9, 12)],
        "ramps": [np.linspace(a, 2 - a, 20) for a in (0.1, 0.3, 1.0, 1.7, 1.9)],
    }
    return {kind: [trace / trace.mean() for trace in traces] for kind, traces in sets.items()}


def _recorded(data: str | Path | None) -> list[list[float]]:
    if data is None:
        return []
    path = Path(data)
    path = path / "bandwidth_traces_gbps.jsonl" if path.is_dir() else path
    return [json.loads(line)["bw"] for line in path.read_text().splitlines() if line.strip()]


def simulated_work() -> Work:
    """A document of 4,096 tokens in 16 chunks on the simulated model."""
    bits, kl = np.array(LEVELS).T[:, :, None]
    one = np.ones(CHUNKS)
    sizes = bits * ELEMENTS * CHUNK_TOKENS / 8 * one
    text = CHUNK_TOKENS / PREFILL
    return Work(sizes, kl * CHUNK_TOKENS * one, np.full(sizes.shape, 0.03), text * one, 0.02 * one, 0.3, DEFAULT)


def simulation(sets: dict[str, list[np.ndarray]]) -> list[dict[str, Any]]:
    """Every policy on every trace at every mean bandwidth, without a target and with three."""
    rows = []
    levels: dict[str, Policy] = {f"level {bits} bit": FixedLevel(i) for i, (bits, _) in enumerate(LEVELS)}
    for kind, traces in sets.items():
        for number, shape in enumerate(traces):
            for factor in FACTORS:
                work = simulated_work()
                rate = float(work.sizes[DEFAULT].sum() / work.text.sum()) * factor
                trace = Trace(list(shape * rate), float(work.sizes[DEFAULT].sum()) / rate / len(shape))
                base = {"part": "simulation", "traces": kind, "trace": number, "factor": factor}
                best = optimum(work, trace).ttft
                contenders: dict[str, Policy] = {"text": FixedLevel(None), **levels, "ours": Planner()}
                for name, policy in contenders.items():
                    got = simulate(work, trace, policy, prior=rate)
                    row = {"policy": name, "target_s": None, "ttft_s": got.ttft, "optimum_s": best}
                    rows.append(base | row | {"kl": got.loss / (CHUNKS * CHUNK_TOKENS)})
                earliest = optimum(work, trace, target=1e-9).ttft
                for slack in SLACKS:
                    target = slack * earliest
                    if target > work.text.sum() + work.tail:
                        continue  # text meets it, and nothing is lost
                    least = optimum(work, trace, target=target, grid=200)
                    tried: list[tuple[str, float | None, Policy]]
                    tried = [("CacheGen's rule", reserve, CacheGenRule(reserve)) for reserve in RESERVES]
                    for name, reserve, policy in (*tried, ("ours", None, Planner())):
                        got = simulate(work, trace, policy, target=target, prior=rate)
                        row = {"policy": name, "reserve": reserve, "target_s": target, "slack": slack}
                        row |= {"ttft_s": got.ttft}
                        row |= {"missed": bool(got.ttft > target * 1.0001), "optimum_missed": bool(least.ttft > target)}
                        row |= {"kl": got.loss / (CHUNKS * CHUNK_TOKENS)}
                        row |= {"optimum_kl": least.loss / (CHUNKS * CHUNK_TOKENS)}
                        rows.append(base | row)
    return rows


def summarize_simulation(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary's figures, and the same for each set of traces."""
    ours = [r for r in rows if r["policy"] == "ours"]
    rule = [r for r in rows if r["policy"] == "CacheGen's rule"]

    def regret(of: list[dict[str, Any]]) -> float:
        return float(np.mean([r["ttft_s"] / r["optimum_s"] - 1 for r in of if r["target_s"] is None]))

    def misses(of: list[dict[str, Any]]) -> float:
        met = [r["missed"] for r in of if r["target_s"] is not None and not r["optimum_missed"]]
        return float(np.mean(met)) if met else 0.0

    def kl(of: list[dict[str, Any]]) -> float:
        return float(np.mean([r["kl"] for r in of if r["target_s"] is not None]))

    def compare(mine: list[dict[str, Any]], its: list[dict[str, Any]]) -> dict[str, float]:
        tried = [[r for r in its if r["reserve"] == reserve] for reserve in RESERVES]
        # Misses are compared first: the first reserve that suffices, or else the first of those that miss least.
        equal = min(tried, key=lambda of: max(misses(of), misses(mine)))
        return {
            "regret": regret(mine),
            "misses": misses(mine),
            "rule_misses": misses(equal),
            "rule_reserve": equal[0]["reserve"],
            "kl_vs_rule": kl(mine) / kl(equal),
            "published_rule_misses": misses(tried[0]),
            "kl_vs_published_rule": kl(mine) / kl(tried[0]),
        }

    whole = compare(ours, rule)
    kinds = dict.fromkeys(r["traces"] for r in ours)
    return {
        "regret_mean": whole["regret"],
        "target_miss_excess": whole["misses"],
        "target_miss_cachegen_rule": whole["rule_misses"],
        "kl_vs_cachegen_rule": whole["kl_vs_rule"],
        "all_traces": whole,
        "by_traces": {
            kind: compare(*([r for r in of if r["traces"] == kind] for of in (ours, rule))) for kind in kinds
        },
    }


def decision_us(chunks: int = 64, count: int = 400) -> float:
    """Median time of a decision with a target, microseconds."""
    one = np.ones(chunks)
    sizes = np.geomspace(4e5, 8e4, 6)[:, None] * one
    work = Work(sizes, np.geomspace(0.5, 30, 6)[:, None] * one, np.full((6, chunks), 0.03), 1.5 * one, 0.02 * one, 0.2)
    planner, link, times = Planner(), Link(2e6, 0.02, 0.3), []
    for _ in range(count):
        began = time.perf_counter()
        planner.decide(work, link, 5.0)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6


def _in_namespace(options: dict[str, Any]) -> dict[str, Any]:
    """Run the real half in a network namespace, where ``tc`` may shape the loopback."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise ConfigError("--shaping tc needs the programs ip and tc (iproute2)")
    try:
        with shaped_namespace() as name:
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "cachegen_rag.bench.stream_real"]
            done = subprocess.run([*command, json.dumps(options)], stdout=subprocess.PIPE, text=True, check=True)
    except subprocess.CalledProcessError as error:
        what = " ".join(map(str, error.cmd[:6]))
        raise ConfigError(f"--shaping tc: `{what} ...` ended with {error.returncode}; it needs root") from None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(result: dict[str, Any], path: str | Path) -> None:
    """The timeline of one request, and TTFT over the link's rate. Needs the ``plot`` extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7))
    lanes = {"fetch": 2, "decode": 1, "splice": 0, "compute": 0}
    colours = {"fetch": "tab:blue", "decode": "tab:green", "splice": "tab:orange", "compute": "tab:red"}
    for event in result.get("timeline", ()):
        width = max(event["stop"] - event["start"], 0.002)
        top.barh(lanes[event["what"]], width, left=event["start"], color=colours[event["what"]], edgecolor="white")
        if event["what"] in ("fetch", "compute"):
            top.text(event["start"], lanes[event["what"]] + 0.42, str(event["part"]), fontsize=7)
    top.set_yticks([0, 1, 2], ["model: splice, compute", "decode", "network"])
    top.set_xlabel("seconds since the request; numbers are chunks")
    top.set_title("One request at the bandwidth where fetching and computing take equally long")
    top.legend(handles=[Patch(color=colour, label=what) for what, colour in colours.items()], fontsize=8)
    for kind, name in (("text", "text"), ("level", "default level"), ("ours", "ours")):
        points: dict[float, list[float]] = {}
        for row in result["rows"]:
            shown = row.get("part") == "real" and row["mode"] == kind and not row.get("cross_over")
            if shown and (kind != "level" or row["default"]):
                points.setdefault(row["mbit_s"] or 1e4, []).append(row["ttft_ms"] / 1e3)
        if points:
            bottom.loglog(sorted(points), [np.median(points[r]) for r in sorted(points)], "o-", label=name)
    bottom.set_xlabel("Mbit/s (10,000: not shaped)")
    bottom.set_ylabel("seconds to first token")
    bottom.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
