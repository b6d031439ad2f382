"""Time to first token: text prefill, our hit from disk, and llama.cpp's own ways of keeping a prompt, in one run.

Cases: one document of 256, 1,024 and 4,096 tokens, and 4 documents of 512. For every case the contenders take turns;
each gets a prompt whose documents are known and whose question is new. The small model's Q4_1 weights prefill slowly
and flatter every ratio, so all rows are measured for a Q8_0 made from the same file too, and the summary takes the
worse of the two.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from cachegen_rag.bench import environment, peak_rss_mb, quartiles
from cachegen_rag.bench.peers import peers
from cachegen_rag.bench.requantize import requantize
from cachegen_rag.bench.texts import shipped_text
from cachegen_rag.cache import KVCache
from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import KVModel, Sampling
from cachegen_rag.models.demo import small_model_path
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.prompt import Prompt

CASES: dict[str, tuple[int, int]] = {"256": (1, 256), "1024": (1, 1024), "4096": (1, 4096), "4x512": (4, 512)}
"""Name: number of documents, tokens of each."""

QUESTIONS = (
    "What is this text about?",
    "Which format is described here?",
    "What should a reader remember?",
    "Who is this text written for?",
    "Which numbers does the text give?",
    "What does the text warn about?",
    "How does the text begin?",
)
ANSWER_TOKENS = 32


def run(
    model: str | Path | None = None,
    cases: Sequence[str] = tuple(CASES),
    formats: Sequence[str] = ("q4_1", "q8_0"),
    repeats: int = 5,
    text_repeats: int = 2,
    level: int | None = None,
    threads: int | None = None,
    with_peers: bool = True,
    engine: str = "llama.cpp",
    recompute: int | None = 0,
) -> dict[str, Any]:
    """Measure and return one JSON-ready object.

    model : a GGUF file; by default the small model of the demo extra.
    cases : names of :data:`CASES`. formats : weight formats; the first is the file as it is, others are made from it.
    repeats : hits of each case. text_repeats : text prefills of each case (they take longest).
    level : level that is stored and read. threads : of llama.cpp. with_peers : measure llama.cpp's own caches too.
    engine : ``llama.cpp``, or ``transformers``, which has one weight format (float32) and no such peers.
    recompute : leading tokens of each document that are computed anew; None for what the model's gate asks for.
    """
    if engine not in ("llama.cpp", "transformers"):
        raise ConfigError(f"there is no engine {engine!r}; there are llama.cpp and transformers")
    if engine == "transformers":
        formats, with_peers = ("float32",), False
    source = Path(model) if model is not None else small_model_path()
    rows: list[dict[str, Any]] = []
    name = None
    with tempfile.TemporaryDirectory(prefix="cachegen-ttft-") as scratch:
        for number, weights in enumerate(formats):
            path = source if number == 0 else requantize(source, Path(scratch) / f"{weights}.gguf", weights)
            with closing(load(engine, path, threads)) as loaded:
                name = name or loaded.name
                for case in cases:
                    folder = Path(scratch) / f"{weights}-{case}"
                    rows.append(
                        {"case": case, "weights": weights}
                        | measure(
                            loaded, path, folder, CASES[case], repeats, text_repeats, level, recompute, with_peers
                        )
                    )
    return {
        "benchmark": "ttft",
        "environment": environment() | {"model": name, "engine": engine},
        "rows": rows,
        "summary": summarize(rows),
    }


def load(engine: str, path: Path, threads: int | None) -> KVModel:
    """The model on one of the engines."""
    if engine == "transformers":
        from cachegen_rag.models.transformers import TransformersModel

        return TransformersModel(path, n_ctx=8192)
    return LlamaCppModel(path, n_ctx=8192, n_threads=threads)


def measure(
    engine: KVModel,
    path: Path,
    folder: Path,
    case: tuple[int, int],
    repeats: int,
    text_repeats: int,
    level: int | None,
    recompute: int | None,
    with_peers: bool,
) -> dict[str, Any]:
    """One case with one set of weights: all contenders in turn, then the answers compared."""
    documents = cut_documents(engine, *case)
    with ExitStack() as stack:
        cache = stack.enter_context(KVCache(engine, folder / "ours", level=level, recompute=recompute))
        report = cache.prefill(documents)
        if report.skipped:
            raise RuntimeError(f"documents were not stored: {report.skipped}")
        prompts = [cache.prompt([{"role": "user", "content": q}], documents) for q in QUESTIONS]
        contenders: dict[str, tuple[int, Callable[[Prompt], float]]] = {
            "text": (text_repeats, lambda prompt: ttft(cache, prompt, spliced=False)),
            "disk": (repeats, lambda prompt: ttft(cache, prompt, spliced=True)),
        }
        if with_peers and isinstance(engine, LlamaCppModel):
            for peer in peers(path, n_ctx=engine.n_ctx, n_threads=engine.n_threads, folder=folder):
                stack.callback(peer.close)
                peer.prepare(prompts[0].token_ids, len(prompts[0]) - len(prompts[0].segments[-1]))
                contenders[peer.name] = (repeats, lambda prompt, peer=peer: peer.ttft(prompt.token_ids))  # type: ignore[misc]
        ttft(cache, prompts[0], spliced=True)  # compile kernels, map files: once a process
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(max(repeats, text_repeats)):
            for name, (count, measure_one) in contenders.items():
                if turn < count:
                    times[name].append(measure_one(prompts[(turn + 1) % len(prompts)]))
        answers = [compare(cache, prompt) for prompt in prompts[1:3]]
        stored = cache.store.size()
        tokens = sum(len(prompts[0].segments[i]) for i in prompts[0].documents)
        record = cache.stream(prompts[1], Sampling(max_tokens=1))
        list(record)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "documents": case[0],
        "prompt_tokens": len(prompts[1]),
        "document_tokens": tokens,
        "spliced_tokens": record.record.spliced_tokens,
        "recomputed_tokens": record.record.recomputed_tokens,
        "ttft_s": {name: quartiles(values) for name, values in times.items()},
        "ratio": {name: value / medians["text"] for name, value in medians.items() if name != "text"},
        "stored_bytes": stored,
        "fp16_bytes": tokens * engine.shape.fp16_bytes_per_token,
        "bytes_ratio": stored / (tokens * engine.shape.fp16_bytes_per_token),
        "prefill_tokens_per_s": report.tokens / report.seconds,
        "agreement": float(np.mean([a["agreement"] for a in answers])),
        "same_answer": float(np.mean([a["same"] for a in answers])),
    }


def cut_documents(engine: KVModel, count: int, tokens: int) -> list[str]:
    """``count`` different documents of about ``tokens`` tokens, from text shipped with the package."""
    text = shipped_text()
    ids = engine.tokenize(text)
    while len(ids) < count * tokens:
        ids = ids + ids
    return [engine.detokenize(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]


def ttft(cache: KVCache, prompt: Prompt, *, spliced: bool) -> float:
    """Seconds from the request to its first token."""
    began = time.perf_counter()
    with cache.stream(prompt, Sampling(max_tokens=2), spliced=spliced) as stream:
        next(stream)
        spent = time.perf_counter() - began
    if spliced and not stream.record.spliced_tokens:
        raise RuntimeError(f"not a hit: {stream.record.as_dict()}")
    return spent


def compare(cache: KVCache, prompt: Prompt) -> dict[str, float]:
    """Share of the text answer's tokens that the spliced path would choose too; whether its own answer is the same."""
    sampling = Sampling(max_tokens=ANSWER_TOKENS)
    text = [token.id for token in cache.stream(prompt, sampling, spliced=False)]
    ours = [token.id for token in cache.stream(prompt, sampling)]
    chosen = cache.logits(prompt, text).argmax(axis=1)
    return {"agreement": float(np.mean(chosen == np.asarray(text))), "same": float(text == ours)}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The issue's summary: for every figure the less flattering of the weight formats."""

    def worst(case: str) -> float | None:
        values = [row["ratio"]["disk"] for row in rows if row["case"] == case]
        return max(values) if values else None

    return {
        "ttft_ratio_disk_1024": worst("1024"),
        "ttft_ratio_disk_4096": worst("4096"),
        "ttft_ratio_4x512": worst("4x512"),
        "bytes_ratio_fp16": max(row["bytes_ratio"] for row in rows),
        "greedy_agreement": min(row["agreement"] for row in rows),
        "peak_rss_mb": peak_rss_mb(),
    }


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Bars of the median TTFT of every contender, one group a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    names = list(rows[0]["ttft_s"])
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    places = np.arange(len(rows))
    for number, name in enumerate(names):
        values = [row["ttft_s"][name]["median"] for row in rows]
        axes.bar(places + number / (len(names) + 1), values, 1 / (len(names) + 1), label=name)
    axes.set_xticks(places + 0.4, [f"{row['case']}\n{row['weights']}" for row in rows])
    axes.set_yscale("log")
    axes.set_ylabel("TTFT, seconds (log)")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
