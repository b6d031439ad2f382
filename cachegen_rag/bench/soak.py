"""Soak: requests under random faults, for as long as asked. Counts wrong answers and looks for leaks.

A remote store misbehaves in every way the server knows (see ``server.py``) while several threads ask about its
documents. Each answer must be the one that some complete path gives without faults: spliced, or computed from the text.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cachegen_rag.bench import environment, quartiles
from cachegen_rag.bench.server import FAULTS, Fault, Link, ObjectServer
from cachegen_rag.cache import KVCache
from cachegen_rag.models.base import KVModel, Sampling
from cachegen_rag.stores import open_store
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.pipeline import Loader

DOCUMENT_TOKENS = 28
"""A document is computed in one step or taken whole, so that only few answers are right."""
ANSWER = Sampling(max_tokens=6)
UNDISTURBED = (None, "404", "silent", None, None, "404", None, None, None, "404", None, None)


def run(
    seconds: float = 60.0,
    model: str | Path | KVModel | None = None,
    threads: int = 3,
    documents: int = 6,
    fault_share: float = 0.5,
    seed: int = 0,
    profile: Any = None,
) -> dict[str, Any]:
    """Ask for ``seconds`` and return one JSON-ready object.

    model : a GGUF file or an engine; by default the small model of the demo extra. threads : that ask at once.
    documents : in the store. fault_share : of the server's answers that go wrong. profile : the codec's.

    summary: requests, wrong_answers (0), errors (0), spliced, computed, faults (by kind), leaked_threads,
    leaked_descriptors, leaked_transfers, memory_growth_mb (between the first quarter's end and the end), memory_mb (at
    the end of each quarter, what the allocator keeps given back), ttft_ms_median, plain_ttft_ms_median.
    """
    engine = model if model is not None and not isinstance(model, str | Path) else _engine(model)
    chosen, count, wrong, errors = random.Random(seed), Counter[str](), [0], list[str]()
    sources, ttft, done = Counter[str](), list[float](), [0]
    with ObjectServer() as server:
        store = open_store(server.url, timeout=1.0)
        lock, costs = threading.Lock(), Costs()
        cache = KVCache(
            engine, store, profile=profile, exact_bytes=0, loader=lambda s, name: Loader(s, name, costs=costs)
        )
        texts = [_document(engine, i) for i in range(documents)]
        cache.prefill(texts)

        def ask(i: int, spliced: bool = True) -> tuple[str, Any]:
            prompt = cache.prompt([{"role": "user", "content": "What does it say?"}], [texts[i]])
            stream = cache.stream(prompt, ANSWER, spliced=spliced)
            return stream.text(), stream.record

        plain, right = list[float](), [set[str]() for _ in texts]
        for i in range(documents):
            # Several times: with quantized weights near-ties fall differently with the state of the engine's cache.
            for kind in UNDISTURBED:
                server.fault = _on_bitstreams(kind)
                right[i].add(ask(i)[0])
            answer, record = ask(i, spliced=False)
            right[i].add(answer)
            plain.append(record.ttft_ms)

        def fault(method: str, path: str, number: int) -> Fault | None:
            with lock:
                if chosen.random() >= fault_share:
                    return None
                kind = chosen.choice(FAULTS)
                count[kind] += 1
                return Fault(kind, chosen.random())

        def worker(number: int, end: float) -> None:
            mine = random.Random(seed + number + 1)
            while time.monotonic() < end:
                i = mine.randrange(documents)
                try:
                    answer, record = ask(i)
                except Exception as error:  # a failing network must never fail a request
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                with lock:
                    done[0] += 1
                    ttft.append(record.ttft_ms - record.wait_ms)
                    sources["spliced" if record.spliced_tokens else "computed"] += 1
                    wrong[0] += answer not in right[i]

        def work(duration: float) -> dict[str, float]:
            end = time.monotonic() + duration
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(worker, range(threads), [end] * threads))
            return _resources()

        server.fault, server.link = fault, Link(rate=5e6)
        quarters = [work(seconds / 4) for _ in range(4)]
        quarter, after = quarters[0], quarters[-1]
        loader = cache._base.loader
        leaked = loader.bytes_in_flight() + len(loader.flying) if loader is not None else 0
        server.fault = None
        cache.close()
    time.sleep(0.2)
    final = _resources()
    summary = {
        "requests": done[0],
        "wrong_answers": wrong[0],
        "errors": len(errors),
        "spliced": sources["spliced"],
        "computed": sources["computed"],
        "faults": dict(sorted(count.items())),
        "leaked_threads": after["threads"] - quarter["threads"],
        "threads_after_close": final["threads"],
        "leaked_descriptors": after["descriptors"] - quarter["descriptors"],
        "leaked_transfers": leaked,
        "memory_growth_mb": after["rss_mb"] - quarter["rss_mb"],
        "memory_mb": [one["rss_mb"] for one in quarters],
        "ttft_ms_median": quartiles(ttft)["median"] if ttft else None,
        "plain_ttft_ms_median": quartiles(plain)["median"],
    }
    rows = [{"error": error} for error in errors[:20]]
    return {"benchmark": "soak", "environment": environment(engine), "rows": rows, "summary": summary}


def _engine(model: str | Path | None) -> KVModel:
    from cachegen_rag.models.demo import small_model_path
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    engine: KVModel = LlamaCppModel(model or small_model_path(), n_ctx=2048)
    return engine


def _on_bitstreams(kind: str | None) -> Callable[[str, str, int], Fault | None]:
    return lambda method, path, number: Fault(kind) if kind is not None and "/cas/" in path else None


def _document(engine: KVModel, number: int) -> str:
    words = "river city king science stone name passage cache key answer water light".split()
    text = " ".join(words[(number * 5 + i * (number + 2)) % len(words)] for i in range(3 * DOCUMENT_TOKENS))
    return engine.detokenize(engine.tokenize(text)[:DOCUMENT_TOKENS])


def _resources() -> dict[str, float]:
    """Threads, file descriptors and resident memory of this process now."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    rss = 0.0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return {"threads": threading.active_count(), "descriptors": descriptors, "rss_mb": rss}
