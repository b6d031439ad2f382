"""Speed of encoding and decoding against the prefill that it replaces, alternated in one run; memory while decoding."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cachegen_rag.bench import quartiles
from cachegen_rag.codec import Codec
from cachegen_rag.kv import KV
from cachegen_rag.library import chunk_ranges
from cachegen_rag.manifest import Segment
from cachegen_rag.models.base import KVModel, KVTarget


def measure_speed(
    engines: Mapping[str, KVModel], codec: Codec, kv: KV, chunk_tokens: int, repeats: int, threads: int | None
) -> dict[str, Any]:
    """Seconds (median and quartiles) of prefill, encoding and decoding of one document, taking turns.

    Decoding is what a hit does with its bytes: verify (SHA-256 too), parse, decode, rotate, into rows that the engine
    handed out; ``commit_s`` is what the engine then does with them. Chunks are spread over ``threads`` threads.
    """
    cores = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ranges = list(chunk_ranges(len(kv), chunk_tokens))
    ids, level = kv.token_ids.tolist(), codec.default_level
    times: dict[str, list[float]] = {"encode_s": [], "decode_s": [], "commit_s": []}
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    rates: list[float] = []
    engine = next(iter(engines.values()))
    with ThreadPoolExecutor(cores) as pool:

        def encode() -> list[bytes]:
            return list(pool.map(lambda r: codec.encode(kv[r[0] : r[1]], level), ranges))

        def hit(segment: Segment, data: bytes, rows: KVTarget) -> None:
            segment.verify(data)
            codec.decode_into(data, rows)

        chunks = encode()
        segments = [Segment.of(chunk) for chunk in chunks]
        for turn in range(repeats + 1):  # the first turn warms up and is not counted
            for name, other in engines.items():
                with other.session() as session:
                    seconds, _ = timed(lambda: session.decode(ids))
                prefill[name] += [seconds] * bool(turn)
            seconds, chunks = timed(encode)
            times["encode_s"] += [seconds] * bool(turn)
            with engine.session() as session:
                target = session.stage(np.arange(len(kv), dtype=np.int32))

                def decode() -> None:
                    list(pool.map(hit, segments, chunks, [target.rows(*r) for r in ranges]))  # noqa: B023

                seconds, _ = timed(decode)
                times["decode_s"] += [seconds] * bool(turn)
                seconds, _ = timed(lambda: session.commit(target, ids))  # noqa: B023
                times["commit_s"] += [seconds] * bool(turn)
            seconds, symbols = timed(lambda: sum(codec.decode_symbols(chunk) for chunk in chunks))  # noqa: B023
            rates += [symbols / seconds / 1e6] * bool(turn)
    return {
        "document_tokens": len(kv),
        "bytes": sum(map(len, chunks)),
        "threads": cores,
        "prefill_s": {name: quartiles(values) for name, values in prefill.items()},
        "decode_msym_per_s_core": quartiles(rates),
    } | {name: quartiles(values) for name, values in times.items()}


def measure_memory(engine: KVModel, codec: Codec, kv: KV) -> float:
    """Peak extra memory while one chunk is decoded, over the chunk's fp16 KV; bitstream and target not counted.

    The larger of two views: what numpy allocated, and how far the process's resident memory rose (Linux).
    """
    data = codec.encode(kv, codec.default_level)
    with engine.session() as session:
        target = session.stage(np.arange(len(kv), dtype=np.int32))
        codec.decode_into(data, target)  # compiled and warm; the target's pages are there
        tracemalloc.start()
        before = resident_reset()
        codec.decode_into(data, target)
        rise = resident_peak() - before if before else 0
        extra = max(tracemalloc.get_traced_memory()[1], rise)
        tracemalloc.stop()
        session.commit(target, kv.token_ids.tolist())
    return extra / (len(kv) * kv.shape.fp16_bytes_per_token)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call took, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def resident_reset() -> int:
    """Start a new peak of resident memory; returns the present size, bytes (0 where the system cannot tell)."""
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:
        return 0
    return _status("VmRSS")


def resident_peak() -> int:
    """Peak resident memory since :func:`resident_reset`, bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        with open("/proc/self/status") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))
    except (OSError, StopIteration):
        return 0
