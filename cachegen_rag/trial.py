"""One prompt, computed in full and spliced, compared token by token: what the gate and the benchmark are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec import Codec
from cachegen_rag.correction import Correction, Fit
from cachegen_rag.kv import KV, as_numpy
from cachegen_rag.models.base import KVModel, KVTarget, Session
from cachegen_rag.prompt import Prompt
from cachegen_rag.recompute import Method, Scene, look, recompute_runs
from cachegen_rag.rope import from_interleaved, rotate
from cachegen_rag.splice import Decode, Plan, between, execute, is_gap, leading_text, plan
from cachegen_rag.warm import WarmContext

Fill = Callable[[KVTarget], None]
"""Writes a document's KV into memory that the engine handed out: from a KV, or decoded from a bitstream."""


def place(kv: KV) -> Fill:
    """A fill that writes ``kv``, rotated to the target's positions."""

    def fill(target: KVTarget) -> None:
        keys = from_interleaved(rotate(as_numpy(kv.keys), target.positions, target.rope), target.rope)
        for layer, (k, v) in enumerate(zip(target.keys, target.values, strict=True)):
            for rows, array in ((k, keys[layer]), (v, as_numpy(kv.values[layer]))):
                rows[...] = array if isinstance(rows, np.ndarray) else rows.new_tensor(array)

    return fill


def coded(codec: Codec, level: int) -> Callable[[KV], Fill]:
    """Documents as requests read them: encoded at ``level``, decoded into the engine."""

    def coder(kv: KV) -> Fill:
        data = codec.encode(kv, level)
        return lambda target: codec.decode_into(data, target)

    return coder


@dataclass(frozen=True, eq=False)
class Reference:
    """The prompt computed in full.

    logits : float32 ``[question + answer, vocabulary]``; seconds : to the first token of the answer.
    kv : of the whole prompt (for deviations and exact prefixes).
    """

    logits: NDArray[np.float32]
    kv: KV
    seconds: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """The prompt spliced. ``kl`` nats and ``agree`` (0 or 1) per token; ``seconds`` to the first token.

    recomputed : fraction of the tokens between prefix and question that were decoded.
    nll : of the answer, nats per token. calls : decode calls before the one of the question that answers.
    """

    kl: NDArray[np.float64]
    agree: NDArray[np.float64]
    nll: float
    seconds: float
    recomputed: float
    calls: int


@dataclass(frozen=True)
class Trial:
    """A prompt whose last segment is the question, and the answer that is read behind it.

    prefix : tokens in front of the first separator or document; by default the first segment.
    """

    prompt: Prompt
    answer: tuple[int, ...]
    prefix: int | None = None

    def reference(self, session: Session) -> Reference:
        """Compute everything, segment by segment as a spliced prompt is, but for a beginning that the engine kept."""
        began = time.perf_counter()
        at = self._reuse(session)
        for start, stop in pairwise(self.prompt.offsets[:-1]):
            if max(at, start) < stop:
                session.decode(self.prompt.token_ids[max(at, start) : stop])
        self._keep(session)
        question = session.decode(self.prompt.segments[-1].token_ids, logits=True)
        seconds = time.perf_counter() - began
        kv = session.export(0, session.length)
        return Reference(self._read_answer(session, question), kv, seconds)

    def spliced(
        self,
        session: Session,
        fills: Mapping[int, Fill],
        method: Method,
        budget: int,
        reference: Reference,
        *,
        model: KVModel,
        deviation: NDArray[np.float32] | None = None,
        exact: tuple[int, Fill] | None = None,
    ) -> Outcome:
        """Splice the documents in ``fills`` (by segment) and recompute ``budget`` tokens of them by ``method``.

        exact : number of leading segments and the KV of them together, for exact prefix reuse.
        """
        prompt, question = self.prompt, self.prompt.offsets[-2]
        leading = exact[0] if exact else 0
        began = time.perf_counter()
        if exact:
            self._stage(session, 0, prompt.offsets[leading], exact[1])
        for index, fill in fills.items():
            if index >= leading:
                self._stage(session, prompt.offsets[index], prompt.offsets[index + 1], fill)
        looks = method.looks and budget > 0
        steps = plan(prompt, fills, exact=leading)
        if not looks:
            again = method.choose(Scene(prompt, steps.spliced, budget, None, deviation))
            steps = plan(prompt, fills, again, exact=leading)
        ahead = list(between(steps.steps, self._reuse(session) if not leading else 0, question))
        gaps = execute(ahead, prompt, session)
        calls = sum(isinstance(step, Decode) and not is_gap(step, prompt) for step in ahead)
        if looks:
            scores = look(session, prompt, model.shape.layers)
            again = method.choose(Scene(prompt, steps.spliced, budget, scores, deviation))
            steps = plan(prompt, fills, again, exact=leading)
            gaps = [
                (step.start, step.stop)
                for step in between(steps.steps, leading_text(prompt), question)
                if isinstance(step, Decode)
            ]
            calls += 1
        if gaps:
            calls += recompute_runs(session, gaps)
        logits = session.decode(prompt.segments[-1].token_ids, logits=True)
        seconds = time.perf_counter() - began
        changed = self._read_answer(session, logits)
        return self.outcome(reference, changed, seconds, self._recomputed(steps, leading), calls)

    def outcome(
        self,
        reference: Reference,
        logits: NDArray[np.float32],
        seconds: float,
        recomputed: float = 0.0,
        calls: int = 0,
    ) -> Outcome:
        """Compare logits ``[question + answer, vocabulary]`` of a run with the reference."""
        kl, agree = compare(reference.logits, logits)
        return Outcome(kl, agree, self.nll(logits), seconds, recomputed, calls)

    def nll(self, logits: NDArray[np.float32]) -> float:
        """Negative log likelihood of the answer's tokens, nats per token."""
        rows = _log_softmax(logits[-len(self.answer) - 1 : -1])
        return float(-rows[np.arange(len(self.answer)), list(self.answer)].mean())

    def _reuse(self, session: Session) -> int:
        """Begin with the text before the first document, as requests do, if the engine kept it; its length."""
        return session.reuse(self.prompt.token_ids[: leading_text(self.prompt)])

    def _keep(self, session: Session) -> None:
        session.keep(leading_text(self.prompt))

    def _recomputed(self, steps: Plan, leading: int) -> float:
        first = self.prompt.offsets[1] if self.prefix is None else self.prefix
        question = self.prompt.offsets[-2]
        parts = between(steps.steps, max(first, self.prompt.offsets[leading]), question)
        return sum(len(step) for step in parts if isinstance(step, Decode)) / max(1, question - first)

    def _read_answer(self, session: Session, question: NDArray[np.float32] | None) -> NDArray[np.float32]:
        answer = session.decode(self.answer, logits=True)
        assert question is not None and answer is not None
        return np.concatenate([question, answer])

    def _stage(self, session: Session, start: int, stop: int, fill: Fill) -> None:
        target = session.stage(np.arange(start, stop, dtype=np.int32))
        fill(target)
        session.commit(target, self.prompt.token_ids[start:stop])


def learn_correction(model: KVModel, warm: WarmContext, prompts: Sequence[Prompt], **options: Any) -> Correction:
    """Learn a model's correction from prompts of related documents (see ``cachegen_rag.correction``).

    A handful of prompts of six documents is enough. ``options`` are those of ``Fit.solve``. Every prompt is computed
    in full and its documents in the warm context: minutes on a CPU.
    """
    fit = Fit(model.shape)
    plain = replace(warm, correction=None)
    for prompt in prompts:
        documents = [i for i in prompt.documents if len(prompt.segments[i])]
        with model.session() as session:
            stored = list(plain.compute_many(session, [prompt.segments[i].token_ids for i in documents]))
        with model.session() as session:
            session.decode(prompt.token_ids)
            full = session.export(0, session.length)
        for index, kv in zip(documents, stored, strict=True):
            fit.add(kv, full[prompt.offsets[index] : prompt.offsets[index + 1]])
    return fit.solve(**options)


def joined(prompt: Prompt, separator: int) -> Prompt:
    """The same tokens with every separator as the beginning of its document: nothing between documents is decoded.

    separator : tokens of the first segment that stand between prefix and first document.
    """
    first = prompt.segments[0]
    cut = len(first) - separator
    out = [replace(first, token_ids=first.token_ids[:cut]), replace(first, token_ids=first.token_ids[cut:])]
    for segment in prompt.segments[1:-1]:
        if segment.kind == "document" and out[-1].kind == "text":
            out[-1] = replace(segment, token_ids=out[-1].token_ids + segment.token_ids)
        else:
            out.append(segment)
    return Prompt((*out, prompt.segments[-1]))


def compare(
    exact: NDArray[np.float32], changed: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """KL(exact || changed) in nats and agreement of the most likely token, per row of logits ``[rows, vocabulary]``."""
    p, q = _log_softmax(exact), _log_softmax(changed)
    kl = np.sum(np.exp(p) * (p - q), axis=1)
    return kl, (exact.argmax(axis=1) == changed.argmax(axis=1)).astype(np.float64)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
