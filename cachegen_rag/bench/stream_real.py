"""The real half of ``bench stream``: a real model answers over shaped links. Also a program, for network namespaces."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cachegen_rag.bench.requantize import requantize
from cachegen_rag.bench.server import Link, ObjectServer
from cachegen_rag.bench.texts import shipped_text
from cachegen_rag.cache import KVCache
from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import KVModel, Sampling
from cachegen_rag.models.demo import small_model_path
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.stores import Store, open_store
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.parts import Event
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.streaming.policy import FixedLevel

QUESTION = "What does the text say? ({})"
MBIT = 125_000.0
LEAST_RATE = 0.2
"""Mbit/s below which the cross-over is not looked for: runs would take minutes."""
HOPELESS = 2.0
"""A level whose bytes alone take this many times as long as computing is fetched once at most, and no finer one is."""
SOONEST = 1e-3
"""Seconds to the first token that nobody can keep: asks for the earliest at any level."""
DISTURBED, RETRIES = 0.15, 6
"""Cores that other processes may take during a request before it is asked again, and how often it is asked at most."""
OVERLAP_RATES = (5.0, 20.0, 100.0)


class _Link:
    """The link between store and cache, shaped by the server or by ``tc`` on the loopback of this namespace."""

    def __init__(self, server: ObjectServer, tc: bool) -> None:
        self.server, self.tc = server, tc

    def set(self, mbit: float | None) -> None:
        """Connections made from now on pass ``mbit`` Mbit/s; None: as much as the machine can."""
        if not self.tc:
            self.server.link = Link() if mbit is None else Link(rate=mbit * MBIT)
            return
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
        if mbit is not None:
            burst = max(16_000, int(mbit * MBIT * 0.004))
            shape = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "400ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *shape], check=True)


def measure_links(
    model: str | KVModel | None,
    rates: Sequence[float | None],
    tokens: int,
    repeats: int,
    threads: int | None,
    tc: bool,
    weights: str | None = None,
    profile: Any = None,
) -> dict[str, Any]:
    """Requests at every rate: text, fixed levels fetched whole, and ours. See ``bench.stream.run``."""
    with ExitStack() as stack:
        engine = _engine(model, weights, tokens, threads, stack)
        document = engine.detokenize(engine.tokenize(shipped_text())[:tokens])
        server = stack.enter_context(ObjectServer())
        bench = _Bench(engine, server, document, _Link(server, tc), profile)
        bench.prepare()
        rows: list[dict[str, Any]] = []
        for rate in rates:
            rows += bench.contend(rate, repeats)
        rows += [bench.ask("overlap", rate) for rate in OVERLAP_RATES for _ in range(2)]
        cross = max(bench.sizes[bench.default] / bench.text_s / MBIT, LEAST_RATE)
        both = [row | {"cross_over": True} for row in bench.contend(cross, repeats, others=False)]
        summary = _summary(rows, both, bench.default, rates) | {"cross_over_mbit_s": cross}
        timeline = [dataclasses.asdict(event) for event in bench.events]
    return {"rows": rows + both, "summary": summary, "timeline": timeline, "model": engine.name}


def _engine(
    model: str | KVModel | None, weights: str | None, tokens: int, threads: int | None, stack: ExitStack
) -> KVModel:
    if model is not None and not isinstance(model, str):
        return model
    path = Path(model or small_model_path())
    if weights is not None:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="cachegen-stream-"))
        _say(f"making {weights} weights of {path.name}")
        path = requantize(path, Path(scratch) / f"{path.stem}-{weights}.gguf", weights)
    engine: KVModel = LlamaCppModel(path, n_ctx=2 * tokens + 1024, n_threads=threads)
    stack.callback(engine.close)
    return engine


def _summary(
    rows: list[dict[str, Any]], both: list[dict[str, Any]], default: int, rates: Sequence[float | None]
) -> dict[str, Any]:
    """Single requests of ours over the better median of text and fixed level, rate by rate; see ``bench.stream.run``.

    The better one's own requests over their median are what the machine's noise alone makes of it.
    """
    ratios: dict[str, list[float]] = {"ours": [], "soonest": [], "noise": []}
    for rate in rates:
        here = [row for row in rows if row["mbit_s"] == rate]
        fixed: dict[int, list[dict[str, Any]]] = {}
        for row in here:
            if row["mode"] == "level":
                fixed.setdefault(row["level"], []).append(row)
        for mode, levels in (("ours", [default]), ("soonest", list(fixed))):
            rivals = [[r for r in here if r["mode"] == "text"], *(fixed[level] for level in levels)]
            best = min(rivals, key=_median)
            ratios[mode] += [row["ttft_ms"] / _median(best) for row in here if row["mode"] == mode]
            ratios["noise"] += [row["ttft_ms"] / _median(best) for row in best]
    every = ratios["ours"] + ratios["soonest"]
    return {
        "ttft_vs_best_p95": float(np.percentile(every, 95)),
        "ttft_vs_best_median": float(np.median(every)),
        "ttft_vs_best_default_level_p95": float(np.percentile(ratios["ours"], 95)),
        "ttft_vs_best_any_level_p95": float(np.percentile(ratios["soonest"], 95)),
        "ttft_best_vs_itself_p95": float(np.percentile(ratios["noise"], 95)),
        "overlap_ratio": float(np.median([r["overlap"] for r in rows if r["mode"] == "overlap"])),
        "both_ends_speedup": min(_ttft(both, "text"), _ttft(both, "level")) / _ttft(both, "ours"),
    }


def _median(rows: list[dict[str, Any]]) -> float:
    return float(np.median([row["ttft_ms"] for row in rows]))


def _ttft(rows: list[dict[str, Any]], mode: str) -> float:
    return _median([row for row in rows if row["mode"] == mode])


class _Bench:
    """One model, one document, one store; each request is the first of a cache that has just been opened."""

    def __init__(self, engine: KVModel, server: ObjectServer, document: str, link: _Link, profile: Any) -> None:
        self.profile = profile
        self.engine, self.server, self.document, self.link = engine, server, document, link
        self.costs = Costs()
        self.asked = 0
        self.default = 0
        self.sizes: dict[int, int] = {}  # the document's bytes at each level
        self.text_s = 0.0
        self.events: list[Event] = []

    def prepare(self) -> None:
        """Index the document, and let the machine's costs be measured once."""
        _say("computing and storing the document")
        with self.cache("ours") as cache:
            report = cache.prefill([self.document])
            if report.skipped:
                raise ConfigError(f"the document was not stored: {report.skipped}")
            library = cache.library()
            assert library is not None
            self.default = cache.level(library.codec)
            levels = cache.stored_levels(library.codec)
        self.ask("ours", None)
        self.sizes = {level: self.ask("level", None, level)["bytes"] for level in levels}
        self.text_s = min(self.ask("text", None)["ttft_ms"] for _ in range(2)) / 1e3

    def contend(self, mbit: float | None, repeats: int, others: bool = True) -> list[dict[str, Any]]:
        """Everybody at one rate, ``repeats`` times in turns, so that the machine's moods hit all alike.

        ``others``: the other levels and the request for the earliest first token take part too.
        """
        network = {level: size / (mbit * MBIT) if mbit else 0.0 for level, size in self.sizes.items()}
        hopeless = {level for level, seconds in network.items() if seconds > HOPELESS * self.text_s}
        levels = [level for level in network if level not in hopeless and (others or level == self.default)]
        entrants: list[tuple[str, int | None]] = [("text", None), ("ours", None), *(("level", n) for n in levels)]
        if others:
            entrants.append(("soonest", None))
        rows = [self.ask("level", mbit, self.default)]  # the first tells the link's rate, as yesterday's requests did
        for turn in range(repeats):
            first = turn % len(entrants)
            rows += [self.ask(mode, mbit, level) for mode, level in entrants[first:] + entrants[:first]]
        return rows

    def cache(self, mode: str, level: int | None = None) -> KVCache:
        def loader(store: Store, name: str) -> Loader:
            if mode in ("level", "overlap"):
                return Loader(store, name, costs=self.costs, planner=FixedLevel(0), fill=False)
            return Loader(store, name, costs=self.costs)

        return KVCache(
            self.engine,
            open_store(self.server.url),
            profile=self.profile,
            level=level,
            loader=loader,
            recompute=0 if mode == "overlap" else None,
            slo=SOONEST if mode == "soonest" else None,
            exact_bytes=0,
        )

    def warm(self, cache: KVCache, levels: Iterable[int]) -> None:
        """What applications pay once, after they opened a cache, is no request's time: tables, the gate."""
        library, key = cache.library(), cache.key(self.document)
        cache.gate.refusal()
        assert library is not None and key is not None
        chunk = library.read_manifest(key, self.server.objects[f"/ac/{key}"]).chunks[0]
        for level in levels:
            library.codec.decode(self.server.objects[f"/cas/{chunk.level(level).segments[0].sha256}"])

    def ask(self, mode: str, mbit: float | None, level: int | None = None) -> dict[str, Any]:
        """One request; its row. It is asked again if other processes took the machine's time meanwhile."""
        for _ in range(RETRIES):
            began, others = time.monotonic(), _others_cpu()
            row = self._ask(mode, mbit, level)
            row["others_cpu"] = (_others_cpu() - others) / (time.monotonic() - began)
            _say(f"{mode} {'' if level is None else level} at {mbit or 'unshaped'} Mbit/s: {row['ttft_ms']:.0f} ms")
            if row["others_cpu"] < DISTURBED:
                break
            _say(f"other processes took {row['others_cpu']:.1f} cores: once more")
            time.sleep(1.0)
        return row

    def _ask(self, mode: str, mbit: float | None, level: int | None) -> dict[str, Any]:
        self.link.set(mbit)
        self.asked += 1
        with self.cache(mode, level) as cache:
            self.warm(cache, self.sizes if mode == "soonest" else [self.default if level is None else level])
            prompt = cache.prompt([{"role": "user", "content": QUESTION.format(self.asked)}], [self.document])
            gc.collect()  # the caches opened for the requests before are no application's garbage
            with cache.stream(prompt, Sampling(max_tokens=1), spliced=mode != "text") as stream:
                list(stream)
                record = stream.record
            loader = cache._base.loader
            transfer = loader.last if loader is not None else None
        (part,) = (s for s in record.segments if s.kind == "document")
        if mode in ("level", "overlap") and record.spliced_tokens < part.tokens:
            raise ConfigError(f"level {level} at {mbit} Mbit/s was not spliced whole: {part.reason}")
        row: dict[str, Any] = {"part": "real", "mode": mode, "mbit_s": mbit, "ttft_ms": record.ttft_ms}
        row |= {"tokens": part.tokens, "spliced": record.spliced_tokens, "bytes": part.bytes, "level": part.level}
        row["default"] = part.level == self.default
        row |= {"decode_ms": part.decode_ms, "splice_ms": part.splice_ms, "reason": part.reason}
        if transfer is not None:
            for what in ("fetch", "decode", "compute"):
                row[f"{what}_s"] = _covered(transfer.events, what)
            if mode == "ours":
                self.events = transfer.events
            if mode == "overlap" and mbit is not None:
                work = _covered(transfer.events, "decode") + _covered(transfer.events, "splice")
                end = max((event.stop for event in transfer.events if event.what == "splice"), default=0.0)
                row["overlap"] = end / max(part.bytes / (mbit * MBIT), work)
        return row


def _others_cpu() -> float:
    """Seconds of CPU that other processes have used so far; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    except (OSError, ValueError):
        return 0.0
    mine = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def _covered(events: list[Event], what: str) -> float:
    """Seconds during which at least one step of this kind was under way."""
    total, until = 0.0, 0.0
    for event in sorted((e for e in events if e.what == what), key=lambda e: e.start):
        total += max(0.0, event.stop - max(event.start, until))
        until = max(until, event.stop)
    return total


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    """Progress, on the error output: requests over a slow link take their time."""
    print(f"bench stream [{time.monotonic() - _BEGAN:5.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def shaped_namespace() -> Iterator[str]:
    """A network namespace whose loopback ``tc`` may shape; its name. Needs root."""
    name = f"cachegen-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        inside = ["ip", "netns", "exec", name]
        subprocess.run([*inside, "ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


if __name__ == "__main__":
    with open(os.devnull, "w") as quiet:
        out, sys.stdout = sys.stdout, quiet
        found = measure_links(**json.loads(sys.argv[1]))
    print(json.dumps(found), file=out)
