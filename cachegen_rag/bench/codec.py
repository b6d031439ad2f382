"""Rate and distortion of our codec and of its peers on real text, and its speed against the model's own prefill.

Sizes are bytes as stored: headers, token ids, checksums, lane states, sinks and the document's manifest for us;
payload alone for the peers. Distortion is what the coded KV does to the text that follows (see ``quality``). All texts
that are measured on are held out (see ``texts``); the peers' offline profile comes from the other half.

A document is measured where the cache puts it (``placement="document"``): computed behind the warm context, placed
behind a prompt's beginning, compared with the same KV uncoded. ``placement="start"`` is the setting that papers use:
the document begins the sequence, and holds its attention sinks.

Distortion is measured with the weights expanded to float32. With quantized weights llama.cpp rounds activations too,
which amplifies any change: for SmolLM2 in Q4_1 even an 8-bit cache shows a KL of 0.003, and all codecs look alike.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.bench import environment
from cachegen_rag.bench.baselines import Peer, peers
from cachegen_rag.bench.codec_speed import measure_memory, measure_speed
from cachegen_rag.bench.quality import Difference, Exact, changed_run, difference, exact_run, summarize
from cachegen_rag.bench.requantize import requantize
from cachegen_rag.bench.texts import Data, Passage, load, passages
from cachegen_rag.codec import Codec
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Profile, shipped_profile
from cachegen_rag.errors import ConfigError
from cachegen_rag.kv import KV
from cachegen_rag.library import CHUNK_TOKENS, Library, chunk_ranges
from cachegen_rag.models.base import KVModel, KVTarget
from cachegen_rag.models.demo import small_model_path
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.profiles import read_profile
from cachegen_rag.stores.memory import MemoryStore
from cachegen_rag.trial import place
from cachegen_rag.warm import WarmContext, context_ids

LEAST_CTX = 4096
TARGETS = (0.01, 0.03, 0.09)
PLACEMENTS = ("document", "start")
KEY = "0" * 64  # the bench keeps one document at a time; its key says nothing

Rows = list[dict[str, Any]]


class Contender(Protocol):
    """One codec at one setting: stores a KV as bytes, and fills an engine's memory from them."""

    family: str
    setting: str

    def store(self, kv: KV) -> int:
        """Encode, keep the result, and return its bytes."""

    def fill(self, target: KVTarget) -> None:
        """Write the KV kept last, rotated, into the target."""


class Ours:
    """The product's own way: a library in a memory store, chunk by chunk; everything in the store is counted."""

    family = "ours"

    def __init__(self, codec: Codec, level: int, chunk_tokens: int) -> None:
        self.codec, self.level, self.chunk_tokens = codec, level, chunk_tokens
        self.setting = f"level {level}"

    def store(self, kv: KV) -> int:
        self._store = MemoryStore()
        library = Library(self._store, self.codec)
        self._manifest = library.put(KEY, kv, [self.level], chunk_ranges(len(kv), self.chunk_tokens))
        return self._store.size()

    def fill(self, target: KVTarget) -> None:
        for chunk in self._manifest.chunks:
            (segment,) = chunk.level(self.level).segments
            data = self._store.get("cas", segment.sha256)
            assert data is not None
            segment.verify(data)
            self.codec.decode_into(data, target.rows(chunk.start, chunk.stop))


class Other:
    """A peer codec."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.family, self.setting = peer, peer.family, peer.setting

    def store(self, kv: KV) -> int:
        data = self.peer.encode(kv)
        self._kv = self.peer.decode(data, kv.token_ids, kv.positions)
        return len(data)

    def fill(self, target: KVTarget) -> None:
        place(self._kv)(target)


@dataclass
class Setting:
    """Where documents stand: how their KV is computed, and what precedes them in the prompt."""

    placement: str
    model: KVModel
    prefix: tuple[int, ...] = ()
    warm: WarmContext | None = None

    @staticmethod
    def of(model: KVModel, placement: str) -> Setting:
        """``placement`` is one of :data:`PLACEMENTS`; ConfigError otherwise."""
        if placement == "document":
            return Setting(placement, model, context_ids(model, []), WarmContext.for_model(model))
        if placement == "start":
            return Setting(placement, model)
        raise ConfigError(f"placement={placement!r} must be one of {', '.join(PLACEMENTS)}")

    def fingerprint(self) -> bytes:
        """The digest that bitstreams of such documents carry."""
        fingerprint = self.model.fingerprint
        if self.warm is not None:
            fingerprint = dataclasses.replace(fingerprint, context=self.warm.digest)
        return fingerprint.digest()

    def kv(self, document: NDArray[np.int32]) -> KV:
        """The document's KV before coding."""
        with self.model.session() as session:
            if self.warm is not None:
                return self.warm.compute(session, document.tolist())
            session.decode(document.tolist())
            return session.export(0, session.length)

    def exact(self, passage: Passage) -> Exact:
        """The run that coded ones are compared with."""
        if self.warm is None:
            return exact_run(self.model, passage.document, passage.continuation)
        kv = self.kv(passage.document)
        return Exact(kv, self.run(passage, place(kv)))

    def run(self, passage: Passage, write: Callable[[KVTarget], None]) -> NDArray[np.float32]:
        """Logits of the continuation when ``write`` provides the document's KV."""
        return changed_run(self.model, passage.document, passage.continuation, write, prefix=self.prefix)


def run(
    *,
    model: str | Path | KVModel | None = None,
    data: Data = None,
    profile: str | Path | Profile | None = None,
    documents: int = 8,
    tokens: int = 1024,
    short_tokens: int = 200,
    continuation: int = 192,
    levels: Sequence[int] | None = None,
    placement: str = "document",
    weights: str | None = "f32",
    chunk_tokens: int = CHUNK_TOKENS,
    calibration: int = 6,
    with_peers: bool = True,
    with_speed: bool = True,
    repeats: int = 5,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure; returns one JSON-ready object with ``benchmark``, ``environment``, ``rows`` and ``summary``.

    model : a GGUF file or a loaded model; None: the small model of the ``demo`` extra.
    data : files or a directory to take texts from (see ``texts.load``); None: shipped texts.
    profile : the codec profile; None: the shipped one, else one calibrated on the texts that are not held out.
    documents, tokens, continuation : passages measured, tokens of each, tokens of the text that follows.
    short_tokens : length of the short documents, of which as many are measured; 0 leaves them out.
    levels : of ours; None: all lossy ones. placement : ``document`` or ``start``. chunk_tokens : as in KVCache.
    weights : the format (see ``requantize``) in which distortion is measured; None: as they are.
    calibration : documents of the other half that the peers' offline profile is made from.
    with_peers, with_speed : leave out what takes long. repeats : rounds of the speed measurement.
    threads : of the engine and of the decoder; None: as many as this process may use cores.
    progress : called with a line of text now and then; None: lines go to standard error if that is a terminal.

    Raises
    ------
    ConfigError
        An option is wrong, or the texts do not yield so many passages.
    """
    say = progress or _to_terminal
    with ExitStack() as stack:
        engine = _engine(model, threads, max(LEAST_CTX, tokens + continuation + 1024), stack)
        texts = load(data)
        codec_profile = _profile(engine, profile, texts.tuned, say)
        measured = engine if weights is None else _requantized(engine, weights, threads, stack)
        setting = Setting.of(measured, placement)
        codec = Codec(codec_profile, setting.fingerprint(), sinks=placement == "start")
        long = passages(measured, texts.held_out, tokens=tokens, continuation=continuation, count=documents)
        ours = [Ours(codec, level, chunk_tokens) for level in (codec.lossy_levels if levels is None else levels)]
        fitted: list[KV] = []
        if with_peers:
            say("profiling the peers")
            sample = passages(measured, texts.tuned, tokens=tokens, continuation=0, count=calibration)
            fitted = [setting.kv(p.document) for p in sample]
        rows: Rows = []
        for length in filter(None, (tokens, short_tokens)):
            contenders: list[Contender] = [*ours]
            if with_peers:
                contenders += [Other(p) for p in peers(engine.shape, engine.fingerprint.rope, fitted, tokens=length)]
            rows += rate_distortion(setting, [_cut(p, length, continuation) for p in long], contenders, say)
        summary = summarize_rows(rows, tokens, short_tokens, codec.default_level)
        if with_speed:
            say("measuring speed")
            kv = setting.kv(long[0].document)
            engines = {"as given": engine, "q8_0": _requantized(engine, "q8_0", threads, stack)}
            rows.append(speed_row(engines, codec, kv, chunk_tokens, repeats, threads, summary))
    return {"benchmark": "codec", "environment": environment(engine), "rows": rows, "summary": summary}


def rate_distortion(
    setting: Setting, measured: Sequence[Passage], contenders: Sequence[Contender], say: Callable[[str], None]
) -> Rows:
    """One row a contender: bytes and what they do, over all passages."""
    sizes: list[list[int]] = [[] for _ in contenders]
    changes: list[list[Difference]] = [[] for _ in contenders]
    for number, passage in enumerate(measured, 1):
        exact = setting.exact(passage)
        for index, contender in enumerate(contenders):
            sizes[index].append(contender.store(exact.kv))
            logits = setting.run(passage, contender.fill)
            changes[index].append(difference(exact.logits, logits, passage.continuation))
        say(f"{number} of {len(measured)} documents of {len(passage.document)} tokens")
    rows = []
    for contender, size, change in zip(contenders, sizes, changes, strict=True):
        tokens = len(measured[0].document)
        bits = 8 * float(np.mean(size)) / (tokens * setting.model.shape.elements_per_token)
        rows.append(
            {
                "kind": "rate_distortion",
                "codec": contender.family,
                "setting": contender.setting,
                "placement": setting.placement,
                "document_tokens": tokens,
                "bytes": float(np.mean(size)),
                "bits_per_element": bits,
                "ratio_fp16": 16 / bits,
            }
            | summarize(change).as_dict()
        )
    return rows


def summarize_rows(rows: Rows, tokens: int, short_tokens: int, default_level: int) -> dict[str, Any]:
    """The figures of the summary that come from rate and distortion."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["document_tokens"] == tokens:
            curves.setdefault(row["codec"], []).append((row["bits_per_element"], row["kl"]))
    ours = curves.pop("ours", [])
    summary: dict[str, Any] = {f"bits_at_kl_{kl:g}": bits_at(ours, kl) for kl in TARGETS}
    summary["peers"] = {
        name: {f"bits_at_kl_{kl:g}": bits_at(curve, kl) for kl in TARGETS} for name, curve in curves.items()
    }
    per_token = {
        row["document_tokens"]: row["bytes"] / row["document_tokens"]
        for row in rows
        if row["codec"] == "ours" and row["setting"] == f"level {default_level}"
    }
    short, long = per_token.get(short_tokens), per_token.get(tokens)
    summary["short_doc_ratio_200"] = short / long if short and long else None
    return summary


def bits_at(curve: Iterable[tuple[float, float]], kl: float) -> float | None:
    """The fewest bits at which a curve of ``(bits, kl)`` points has at most this KL, linear in log KL between points.

    None where no measured point is that good. Nothing is extrapolated: a codec whose coarsest point is better than
    asked for is given the bits of that point.
    """
    points = sorted(curve)
    good = [bits for bits, distortion in points if distortion <= kl]
    if not good:
        return None
    best = good[0]
    for (low_bits, low_kl), (high_bits, high_kl) in pairwise(points):
        if low_kl > kl >= high_kl:
            floor = 1e-9  # a KL of zero, or just below by rounding, has no logarithm
            a, b, c = (np.log(max(value, floor)) for value in (low_kl, high_kl, kl))
            best = min(best, low_bits + (high_bits - low_bits) * float((a - c) / (a - b)))
    return best


def speed_row(
    engines: dict[str, KVModel],
    codec: Codec,
    kv: KV,
    chunk_tokens: int,
    repeats: int,
    threads: int | None,
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Speed at the default level against the prefill of each engine; the summary compares with the fastest."""
    row = measure_speed(engines, codec, kv, chunk_tokens, repeats, threads)
    fastest = min(prefill["median"] for prefill in row["prefill_s"].values())
    summary["decode_msym_per_s_core"] = row["decode_msym_per_s_core"]["median"]
    summary["decode_over_prefill"] = fastest / row["decode_s"]["median"]
    summary["encode_over_prefill"] = row["encode_s"]["median"] / fastest
    summary["decode_extra_memory_ratio"] = measure_memory(engines["as given"], codec, kv[:chunk_tokens])
    return {"kind": "speed", "codec": "ours", "setting": f"level {codec.default_level}"} | row


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Draw KL against bits per element, one line a codec, with intervals, for the longest documents measured.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed (extra ``plot``).
    """
    from cachegen_rag.bench.plots import rate_distortion_plot

    rows = [row for row in result["rows"] if row["kind"] == "rate_distortion"]
    longest = max(row["document_tokens"] for row in rows)
    rate_distortion_plot([row for row in rows if row["document_tokens"] == longest], path)


def _to_terminal(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _cut(passage: Passage, tokens: int, continuation: int) -> Passage:
    """The passage's first ``tokens`` tokens, and what follows them."""
    ids = np.append(passage.document, passage.continuation)
    return Passage(ids[:tokens], ids[tokens : tokens + continuation])


def _engine(model: str | Path | KVModel | None, threads: int | None, n_ctx: int, stack: ExitStack) -> KVModel:
    if model is None or isinstance(model, (str, Path)):
        engine = LlamaCppModel(model or small_model_path(), n_ctx=n_ctx, n_threads=threads)
        stack.callback(engine.close)
        return engine
    return model


def _requantized(engine: KVModel, kind: str, threads: int | None, stack: ExitStack) -> KVModel:
    """The same model with other weights; the model itself where that is not possible."""
    if not isinstance(engine, LlamaCppModel):
        return engine
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cachegen-codec-"))
    path = requantize(engine.path, Path(folder) / f"{engine.path.stem}.{kind}.gguf", kind)
    other = LlamaCppModel(path, n_ctx=engine.n_ctx, n_threads=engine.n_threads)
    stack.callback(other.close)
    return other


def _profile(
    engine: KVModel, given: str | Path | Profile | None, tuned: Sequence[str], say: Callable[[str], None]
) -> Profile:
    if isinstance(given, Profile):
        return given
    if given is not None:
        return read_profile(Path(given))
    shipped = shipped_profile(engine.fingerprint)
    if shipped is not None:
        return shipped
    say("calibrating a profile: none is shipped for this model")
    return calibrate(engine, tuned)
