"""The real half of ``bench stream``: a real model answers over shaped links. Also a program, for network namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cachegen_rag.bench.server import Link, ObjectServer
from cachegen_rag.bench.texts import shipped_text
from cachegen_rag.cache import KVCache
from cachegen_rag.models.base import KVModel, Sampling
from cachegen_rag.models.demo import small_model_path
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.prompt import Prompt
from cachegen_rag.stores import Store, open_store
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.streaming.policy import FixedLevel

QUESTION = "What does the text say? ({})"
MBIT = 125_000.0
LEAST_RATE = 0.2
"""Mbit/s below which the cross-over is not looked for: runs would take minutes."""


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
    rates: list[float | None],
    tokens: int,
    repeats: int,
    threads: int | None,
    tc: bool,
    profile: Any = None,
) -> dict[str, Any]:
    """Requests at every rate: text, the default level fetched whole, and ours. See ``bench.stream.run``."""
    engine: KVModel
    if model is None or isinstance(model, str):
        engine = LlamaCppModel(model or small_model_path(), n_ctx=2 * tokens + 1024, n_threads=threads)
    else:
        engine = model
    document = engine.detokenize(engine.tokenize(shipped_text())[:tokens])
    rows: list[dict[str, Any]] = []
    with ObjectServer() as server:
        bench = _Bench(engine, server, document, _Link(server, tc), profile)
        bench.prepare()
        text = [bench.ask("text", None) for _ in range(max(2, repeats - 1))]
        rows += text
        text_ms = float(np.median([row["ttft_ms"] for row in text]))
        for rate in rates:
            rows += [bench.ask("level", rate) for _ in range(max(1, repeats - 1))]
            rows += [bench.ask("ours", rate) for _ in range(repeats)]
        rows += [bench.ask("overlap", rate) for rate in (5, 20, 100) for _ in range(2)]
        cross = max(bench.bytes / (text_ms / 1e3) / MBIT, LEAST_RATE)
        both = [bench.ask(mode, cross) | {"cross_over": True} for mode in ("level", "ours", "ours")]
        timeline = [dataclasses.asdict(event) for event in bench.events]
        rows += both
        ratios = []
        for rate in rates:
            level = np.median([r["ttft_ms"] for r in rows if r["mode"] == "level" and r["mbit_s"] == rate])
            ours = [r["ttft_ms"] for r in rows if r["mode"] == "ours" and r["mbit_s"] == rate]
            ratios += [value / min(float(level), text_ms) for value in ours]
        whole = min(text_ms, both[0]["ttft_ms"])
        summary = {
            "ttft_vs_best_p95": float(np.percentile(ratios, 95)),
            "ttft_vs_best_median": float(np.median(ratios)),
            "overlap_ratio": float(np.median([r["overlap"] for r in rows if r["mode"] == "overlap"])),
            "both_ends_speedup": whole / float(np.median([r["ttft_ms"] for r in both[1:]])),
            "cross_over_mbit_s": cross,
        }
    return {"rows": rows, "summary": summary, "timeline": timeline, "model": engine.name}


class _Bench:
    """One model, one document, one store; each request opens its own connection, as after a pause."""

    def __init__(self, engine: KVModel, server: ObjectServer, document: str, link: _Link, profile: Any) -> None:
        self.profile = profile
        self.engine, self.server, self.document, self.link = engine, server, document, link
        self.costs = Costs()
        self.asked = 0
        self.bytes = 0
        self.events: list[Any] = []

    def prepare(self) -> None:
        """Index the document, and let the machine's costs be measured once."""
        with self.cache("ours") as cache:
            cache.prefill([self.document])
        self.ask("ours", None)
        self.bytes = self.ask("level", None)["bytes"]
        self.ask("ours", 2.0)

    def cache(self, mode: str) -> KVCache:
        def loader(store: Store, name: str) -> Loader:
            if mode in ("level", "overlap"):
                return Loader(store, name, costs=self.costs, planner=FixedLevel(0), fill=False)
            return Loader(store, name, costs=self.costs)

        recompute = 0 if mode == "overlap" else None
        return KVCache(
            self.engine,
            open_store(self.server.url),
            profile=self.profile,
            loader=loader,
            recompute=recompute,
            exact_bytes=0,
        )

    def ask(self, mode: str, mbit: float | None) -> dict[str, Any]:
        """One request; its row."""
        self.link.set(mbit)
        self.asked += 1
        with self.cache(mode) as cache:
            prompt: Prompt = cache.prompt([{"role": "user", "content": QUESTION.format(self.asked)}], [self.document])
            with cache.stream(prompt, Sampling(max_tokens=1), spliced=mode != "text") as stream:
                list(stream)
                record = stream.record
            loader = cache._loader
            transfer = loader.last if loader is not None else None
        (part,) = (s for s in record.segments if s.kind == "document")
        row: dict[str, Any] = {"part": "real", "mode": mode, "mbit_s": mbit, "ttft_ms": record.ttft_ms}
        row |= {"tokens": part.tokens, "spliced": record.spliced_tokens, "bytes": part.bytes, "level": part.level}
        row |= {"decode_ms": part.decode_ms, "splice_ms": part.splice_ms, "reason": part.reason}
        if transfer is not None:
            self.events = transfer.events
            if mode == "overlap" and mbit is not None:
                spliced = [event.stop for event in transfer.events if event.what == "splice"]
                network = part.bytes / (mbit * MBIT)
                row["overlap"] = max(spliced, default=0.0) / max(network, (part.decode_ms + part.splice_ms) / 1e3)
        return row


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
