"""Splicing against full prefill: KL, agreement, answers and time to the first token, by method and budget.

A prompt is a prefix, six documents behind separators, and a question. It is computed in full, and again from documents
computed beforehand; the two distributions are compared on every token of the question and of the gold answer.
``naive`` is the yardstick: documents and their separators computed behind the prompt's own prefix, nothing recomputed.
All other rows use documents computed in the warm context. Recomputed tokens are counted as a fraction of everything
between prefix and question, separators included. In the row ``none+`` nothing at all is recomputed: the separators are
stored with their documents. In all other rows the separators are decoded, and counted. Time is measured apart, in the
weights that applications run, for the rows that recompute nothing or 15 %.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.bench import environment
from cachegen_rag.bench.requantize import requantize
from cachegen_rag.bench.splice_rows import Case, f1, figures, plot, summarize_case, summary
from cachegen_rag.codec import Codec
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import shipped_profile
from cachegen_rag.errors import ConfigError
from cachegen_rag.kv import KV, concatenate
from cachegen_rag.models.base import KVModel, Sampling
from cachegen_rag.models.demo import small_model_path
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.prompt import Document, Message, Prompt, build_prompt
from cachegen_rag.recompute import Nothing, method
from cachegen_rag.trial import Fill, Reference, Trial, joined, place
from cachegen_rag.warm import WarmContext, passages

__all__ = ["Bench", "Question", "all_cases", "f1", "load_questions", "plot", "run"]

SEPARATOR = "\n\nPassage:\n\n"
"""Six tokens: a separator as applications have them, in the prompts and in the warm context."""

SYSTEM = "You answer questions from the documents that you are given, as briefly as you can."
BUDGETS = (0.05, 0.08, 0.10, 0.15, 0.30)
METHODS = ("heads", "deviation", "query", "heads+query")


@dataclass(frozen=True)
class Question:
    """A question with its passages and accepted answers."""

    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]


def run(
    model: str | Path | None = None,
    data: str | Path | None = None,
    questions: int = 8,
    skip: int = 0,
    documents: int = 6,
    document_tokens: int = 200,
    separator: str = SEPARATOR,
    methods: Sequence[str] = METHODS,
    budgets: Sequence[float] = BUDGETS,
    weights: str = "f32",
    timed: str = "q8_0",
    coded: bool = True,
    threads: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure and return one JSON-ready object.

    model : a GGUF file; by default the small model of the demo extra. weights : the format that distortion is measured
        in (f32 is free of the noise of rounded activations); timed : the one that time is, as applications run it.
        ``as is`` leaves the file alone.
    data : a JSON list of ``{question, answers, ctxs: [{text}]}`` (MuSiQue); by default the questions shipped.
    questions, skip : how many questions, after leaving out so many. documents, document_tokens : of each prompt.
    separator : text before each document, in the prompt and in the warm context.
    methods, budgets : of the recompute. coded : also measure with the codec's default level.
    threads : of the engine. seed : of the order in which the rows of a question are measured.
    """
    asked = load_questions(data)[skip : skip + questions]
    if not asked:
        raise ConfigError(f"there are no questions left after skipping {skip}")
    source = Path(model) if model is not None else small_model_path()
    cases = list(all_cases(methods, budgets, coded))
    clocked = [case for case in cases if case.budget in (0.0, 0.15) and not case.permuted]
    collected: dict[Case, list[dict[str, Any]]] = {}
    seconds: dict[Case, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="cachegen-splice-") as scratch, ExitStack() as engines:

        def opened(weights: str) -> LlamaCppModel:
            path = source if weights == "as is" else requantize(source, Path(scratch) / f"{weights}.gguf", weights)
            engine = LlamaCppModel(path, n_ctx=4096, n_threads=threads, keep_tokens=2048, name=source.stem)
            return engines.enter_context(engine)

        engine, clock = opened(weights), opened(timed)
        profile = (
            (shipped_profile(LlamaCppModel(source).fingerprint) or calibrate(engine, passages())) if coded else None
        )
        codec = Codec(profile) if profile is not None else None
        bench, timer = (Bench(each, codec, document_tokens, separator) for each in (engine, clock))
        for number, question in enumerate(asked):
            rng = np.random.default_rng([seed, number])
            for case, found in bench.measure(question, documents, [cases[i] for i in rng.permutation(len(cases))]):
                collected.setdefault(case, []).append(found)
            for case, found in timer.measure(question, documents, [clocked[i] for i in rng.permutation(len(clocked))]):
                seconds.setdefault(case, []).append(found["seconds"])
    rows = [bench.text_row() | {"seconds": timer.text_row()["seconds"]}]
    rows += [summarize_case(case, collected[case], seconds.get(case, ())) for case in cases]
    about = {"model": engine.name, "weights": weights, "timed": timed, "questions": len(asked)}
    return {"benchmark": "splice", "environment": environment() | about, "rows": rows, "summary": summary(rows)}


def load_questions(data: str | Path | None = None) -> list[Question]:
    """Questions of a MuSiQue-like file, or those shipped. Raises ConfigError if the file is not such a list."""
    if data is None:
        shipped = json.loads(files("cachegen_rag").joinpath("data/splice_questions.json").read_text(encoding="utf-8"))
        texts = shipped["passages"]
        return [
            Question(q["question"], tuple(q["answers"]), tuple(texts[name] for name in q["passages"]))
            for q in shipped["questions"]
        ]
    try:
        items = json.loads(Path(data).read_text(encoding="utf-8"))
        return [Question(i["question"], tuple(i["answers"]), tuple(c["text"] for c in i["ctxs"])) for i in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read questions from {data}: {error}; wanted: a JSON list of question, answers, ctxs with text"
        ) from error


def all_cases(methods: Sequence[str], budgets: Sequence[float], coded: bool) -> Iterator[Case]:
    """Every row but the text prefill, which is what the others are compared with."""
    yield Case("absent", Nothing(), 0.0)
    for in_code in (False, True) if coded else (False,):
        yield Case("naive", Nothing(), 0.0, in_code)
        yield Case("exact", Nothing(), 0.0, in_code)
        yield Case("warm", Nothing(), 0.0, in_code, whole=True)
        yield Case("warm", Nothing(), 0.0, in_code)
        for name in methods:
            for budget in budgets:
                yield Case("warm", method(name), budget, in_code)
    for budget in (0.0, 0.15):
        yield Case("warm", method("query") if budget else Nothing(), budget, permuted=True)


class Bench:
    """Measures the rows of one question after another on one engine."""

    def __init__(self, engine: KVModel, codec: Codec | None, document_tokens: int, separator: str) -> None:
        self._engine, self._codec, self._document_tokens = engine, codec, document_tokens
        self._separator, self._separator_ids = separator, engine.tokenize(separator)
        warm = WarmContext.for_model(engine, separator=separator)
        # Behind a context without its last separator, a document and its separator can be computed together.
        contexts = tuple(c[: -len(self._separator_ids)] for c in warm.contexts)
        self._warm, self._correction = replace(warm, contexts=contexts, correction=None), warm.correction
        self._text: list[dict[str, Any]] = []

    def measure(
        self, question: Question, documents: int, cases: Sequence[Case]
    ) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Every case of one question."""
        texts = list(question.passages[:documents])
        if len(texts) < 2:
            raise ConfigError(f"a question needs two passages or more: {question.text}")
        warm = dict(zip(texts, self._warm_kv(texts), strict=True))
        for permuted in (False, True):
            chosen = [case for case in cases if case.permuted is permuted]
            if chosen:
                yield from self._measure(question, texts[::-1] if permuted else texts, warm, chosen)

    def text_row(self) -> dict[str, Any]:
        """The row of the text prefill."""
        row = {"method": "text", "budget": 1.0, "kv": "fp16", "recomputed": 1.0, "kl": 0.0, "top1": 1.0}
        seconds = {"seconds": float(np.median([t["seconds"] for t in self._text]))}
        return row | {name: float(np.mean([t[name] for t in self._text])) for name in self._text[0]} | seconds

    def _trial(self, question: Question, texts: Sequence[str]) -> Trial:
        parts: list[str | Document] = []
        for text in texts:
            parts += [self._separator, Document(text)]
        messages = [Message.of("system", SYSTEM), Message.of("user", *parts, f"\n\nQuestion: {question.text}")]
        prompt = build_prompt(self._engine, messages, max_document_tokens=self._document_tokens)
        prefix = prompt.offsets[1] - len(self._separator_ids)
        return Trial(prompt, tuple(self._engine.tokenize(question.answers[0])), prefix)

    def _warm_kv(self, texts: Sequence[str]) -> list[KV]:
        """Separator and document of each text, in the warm context."""
        chunks = [self._separator_ids + self._engine.tokenize(text)[: self._document_tokens] for text in texts]
        with self._engine.session() as session:
            computed = list(self._warm.compute_many(session, chunks))
        if self._correction is None:
            return computed
        head = len(self._separator_ids)
        return [concatenate([kv[:head], self._correction.apply(kv[head:])]) for kv in computed]

    def _measure(
        self, question: Question, texts: Sequence[str], warm: dict[str, KV], cases: Sequence[Case]
    ) -> Iterator[tuple[Case, dict[str, Any]]]:
        trial = self._trial(question, texts)
        prompt = trial.prompt
        whole = replace(trial, prompt=joined(prompt, len(self._separator_ids)))
        with self._engine.session() as session:
            reference = trial.reference(session)
            text = self._answer(session, trial)
        self._text.append(
            {
                "seconds": reference.seconds,
                "nll": trial.nll(reference.logits),
                "f1": f1(text, question.answers),
                "f1_text": 1.0,
            }
        )
        kv: dict[tuple[str, bool], dict[int, KV]] = {
            ("warm", False): {
                i: _last(warm[t], len(prompt.segments[i])) for i, t in zip(prompt.documents, texts, strict=True)
            },
            ("warm", True): {
                i: _last(warm[t], len(whole.prompt.segments[i]))
                for i, t in zip(whole.prompt.documents, texts, strict=True)
            },
            ("naive", True): self._behind_prefix(whole.prompt),
        }
        fills: dict[tuple[str, bool, bool], dict[int, Fill]] = {}
        for case in cases:
            with_separators = case.whole or case.stored == "naive"
            stored = "naive" if case.stored == "naive" else "warm"
            key = (stored, with_separators, case.coded)
            if key not in fills:
                fills[key] = {i: self._fill(part, case.coded) for i, part in kv[stored, with_separators].items()}
            used = whole if with_separators else trial
            yield case, self._one(used, case, fills[key], kv[stored, with_separators], reference, question, text)

    def _one(
        self,
        trial: Trial,
        case: Case,
        fills: dict[int, Fill],
        kv: dict[int, KV],
        reference: Reference,
        question: Question,
        text: str,
    ) -> dict[str, Any]:
        exact: tuple[int, Fill] | None = None
        prompt = trial.prompt
        start, stop = trial.prefix or 0, prompt.offsets[-2]
        if case.stored == "exact":
            leading = len(prompt.segments) - 2  # behind the last document stands the question
            exact = (leading + 1, self._fill(reference.kv[:stop], case.coded, sinks=True))
            fills = {}
        if case.stored == "absent":
            short = Trial(Prompt((prompt.segments[0], prompt.segments[-1])), trial.answer)
            with self._engine.session() as session:
                alone = short.reference(session)
                answer = self._answer(session, short)
            return figures(short.outcome(reference, alone.logits, alone.seconds), answer, question.answers, text)
        separators = (
            0 if case.whole or case.stored == "naive" else stop - start - sum(len(prompt.segments[i]) for i in kv)
        )
        budget = max(0, round(case.budget * (stop - start)) - separators)
        deviation = _deviation(prompt, kv, reference.kv) if case.method.name == "deviation" else None
        with self._engine.session() as session:
            outcome = trial.spliced(
                session, fills, case.method, budget, reference, model=self._engine, deviation=deviation, exact=exact
            )
            said = self._answer(session, trial) if case.budget in (0.0, 0.15) else None
        return figures(outcome, said, question.answers, text)

    def _answer(self, session: Any, trial: Trial, tokens: int = 16) -> str:
        """The greedy answer from a session that holds the prompt and the gold answer."""
        question = len(trial.prompt)
        session.truncate(question - 1)
        session.decode(trial.prompt.token_ids[question - 1 :])
        return "".join(token.text for token in session.generate(Sampling(max_tokens=tokens)))

    def _behind_prefix(self, prompt: Prompt) -> dict[int, KV]:
        """Documents computed behind the prompt's own prefix, whose rows are dropped."""
        out = {}
        with self._engine.session() as session:
            session.decode(prompt.segments[0].token_ids)
            start = session.length
            for index in prompt.documents:
                session.decode(prompt.segments[index].token_ids)
                out[index] = session.export(start, session.length)
                session.truncate(start)
        return out

    def _fill(self, kv: KV, coded: bool, *, sinks: bool = False) -> Fill:
        if not coded:
            return place(KV(kv.keys.astype(np.float16), kv.values.astype(np.float16), kv.token_ids, kv.positions))
        assert self._codec is not None
        codec = Codec(self._codec.profile, sinks=True) if sinks else self._codec
        data = codec.encode(kv, codec.default_level)
        return lambda target: codec.decode_into(data, target)


def _last(kv: KV, tokens: int) -> KV:
    return kv[len(kv) - tokens :]


def _deviation(prompt: Prompt, kv: dict[int, KV], full: KV) -> NDArray[np.float32]:
    """CacheBlend's measure, |K - K in place| at layer 1; here from the full prefill, an engine would run two layers."""
    out = np.zeros(len(prompt), dtype=np.float32)
    for index, part in kv.items():
        start, stop = prompt.offsets[index], prompt.offsets[index + 1]
        difference = np.asarray(part.keys[1], np.float32) - np.asarray(full.keys[1, start:stop], np.float32)
        out[start:stop] = np.square(difference).sum(axis=(1, 2))
    return out
