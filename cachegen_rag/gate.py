"""The gate: whether a model may be spliced at all, and with how much recompute, by measurement on that model.

Quality of splicing depends on the model, so it is measured once per model: a few questions over documents shipped
with the package are computed in full and spliced; the least budget whose KL meets the threshold is what the model
needs. A model that meets it at no budget is not spliced: exact prefix reuse only. In service a :class:`Shadow`
recomputes a sampled fraction of requests in full and counts the agreement.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from typing import Any

import numpy as np

from cachegen_rag.errors import (
    CacheGenError,
    ConfigError,
    ContextOverflowError,
    CorruptBitstreamError,
    DeadlineExceededError,
    FingerprintMismatchError,
    ProfileError,
    StoreUnavailableError,
)
from cachegen_rag.fingerprint import ModelFingerprint, document_key
from cachegen_rag.kv import KV
from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Chunk, Level, Manifest, Segment
from cachegen_rag.models.base import KVModel
from cachegen_rag.prompt import Document, Message, build_prompt, document_tokens, with_documents
from cachegen_rag.recompute import Method, Nothing, QueryAware, Recompute
from cachegen_rag.stores.base import Store
from cachegen_rag.trial import Fill, Outcome, Reference, Trial, place
from cachegen_rag.warm import WarmContext

log = logging.getLogger(__name__)

THRESHOLD = 0.1
"""KL per token, in nats, that a spliced prompt may have against the full prefill."""

BUDGETS = (0.0, 0.05, 0.10, 0.15, 0.30)
"""Fractions of the documents' tokens that are tried, cheapest first."""

QUESTIONS = 4
MAX_GATE_BYTES = 1 << 16

RETRY_SECONDS = 30.0
"""How long a gate that could not be read counts as unreadable before the store is asked again."""

SYSTEM = "You answer questions from the documents that you are given, as briefly as you can."


@dataclass(frozen=True)
class Gate:
    """What was measured for one model.

    fingerprint : hex digest of the model's fingerprint, warm context included.
    budget : least fraction of the documents' tokens to recompute; None: the model is not spliced.
    kl : budgets (as text, for JSON) and the KL measured at each, nats per token.
    """

    fingerprint: str
    threshold: float
    budget: float | None
    kl: dict[str, float] = field(default_factory=dict)
    questions: int = 0

    @property
    def open(self) -> bool:
        """Whether the model may be spliced."""
        return self.budget is not None

    @property
    def refusal(self) -> str | None:
        """Why the model is not spliced, or None."""
        if self.open:
            return None
        least = min(self.kl.values(), default=float("nan"))
        return (
            f"spliced answers differ too much on this model: KL {least:.2f} per token at best where "
            f"{self.threshold:g} is allowed; only exact prefixes are reused"
        )

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Gate:
        """Read what :meth:`to_bytes` wrote. Raises ProfileError if it is anything else."""
        if len(data) > MAX_GATE_BYTES:
            raise ProfileError(f"a gate of {len(data)} bytes; at most {MAX_GATE_BYTES} are read")
        try:
            fields = json.loads(data)
            budget = fields["budget"]
            gate = Gate(
                str(fields["fingerprint"]),
                float(fields["threshold"]),
                None if budget is None else float(budget),
                {str(k): float(v) for k, v in fields["kl"].items()},
                int(fields["questions"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProfileError(f"not a gate: {error}") from error
        for name, right, accepted in (  # written so that NaN is in no range
            ("threshold", gate.threshold >= 0, "0 or more"),
            ("budget", gate.budget is None or 0 <= gate.budget <= 1, "between 0 and 1, or null"),
            ("questions", 0 <= gate.questions < 1 << 31, "0 or more"),
        ):
            if not right:
                raise ProfileError(f"not a gate: {name} = {getattr(gate, name)!r:.40} must be {accepted}")
        return gate


def measure(
    model: KVModel,
    *,
    warm: WarmContext | None = None,
    coder: Callable[[KV], Fill] = place,
    threshold: float = THRESHOLD,
    budgets: Sequence[float] = BUDGETS,
    questions: int = QUESTIONS,
    document_length: int = 200,
    method: Method | None = None,
) -> Gate:
    """Find the least budget whose mean KL per token meets ``threshold``, trying ``budgets`` in their order.

    coder : how a document's KV is stored and read back; by default not at all. Pass one that encodes and decodes, so
        that the gate sees what requests will see.
    A model with a ``refusal`` of its own gets a closed gate at once; so does one whose context is too short.
    """
    if not budgets:
        raise ConfigError("the gate needs at least one budget to try")
    warm = warm or WarmContext.for_model(model)
    digest = fingerprint_of(model.fingerprint, warm).digest().hex()
    if model.refusal is not None:
        return Gate(digest, threshold, None)
    try:
        cases = [_Case.of(model, warm, coder, trial) for trial in _trials(model, questions, document_length)]
    except ContextOverflowError:
        return Gate(digest, threshold, None)
    kl: dict[str, float] = {}
    for budget in budgets:
        outcomes = [case.spliced(model, method or QueryAware(), budget) for case in cases]
        kl[f"{budget:g}"] = value = float(np.concatenate([o.kl for o in outcomes]).mean())
        if value <= threshold:
            return Gate(digest, threshold, float(budget), kl, len(cases))
    return Gate(digest, threshold, None, kl, len(cases))


def fingerprint_of(fingerprint: ModelFingerprint, warm: WarmContext) -> ModelFingerprint:
    """The fingerprint that documents computed in this warm context are stored under."""
    return replace(fingerprint, context=warm.digest)


class _Case:
    """One question: its trial, reference and stored documents."""

    def __init__(self, trial: Trial, reference: Reference, fills: dict[int, Fill]) -> None:
        self.trial, self.reference, self.fills = trial, reference, fills

    @staticmethod
    def of(model: KVModel, warm: WarmContext, coder: Callable[[KV], Fill], trial: Trial) -> _Case:
        prompt = trial.prompt
        prompt.require_fits(model.n_ctx, len(trial.answer))
        with model.session() as session:
            stored = list(warm.compute_many(session, [prompt.segments[i].token_ids for i in prompt.documents]))
        fills = {i: coder(kv) for i, kv in zip(prompt.documents, stored, strict=True)}
        with model.session() as session:
            reference = trial.reference(session)
        return _Case(trial, reference, fills)

    def spliced(self, model: KVModel, method: Method, budget: float) -> Outcome:
        tokens = int(budget * sum(len(self.trial.prompt.segments[i]) for i in self.fills))
        with model.session() as session:
            return self.trial.spliced(
                session, self.fills, method if tokens else Nothing(), tokens, self.reference, model=model
            )


def _trials(model: KVModel, count: int, length: int) -> list[Trial]:
    """Trials over the questions shipped with the package."""
    shipped = json.loads(files("cachegen_rag").joinpath("data/splice_questions.json").read_text(encoding="utf-8"))
    trials = []
    for question in shipped["questions"][:count]:
        messages = [Message.of("system", SYSTEM), Message.of("user", f"Question: {question['question']}")]
        documents = [Document(shipped["passages"][name]) for name in question["passages"]]
        prompt = build_prompt(model, with_documents(messages, documents), max_document_tokens=length)
        answer, _ = document_tokens(model, question["answers"][0])
        trials.append(Trial(prompt, answer))
    return trials


def key(fingerprint: ModelFingerprint, salt: str = "") -> str:
    """Where a store keeps a model's gate: a manifest of one object."""
    return document_key(fingerprint.digest(), [], profile="gate", salt=salt)


def save(store: Store, fingerprint: ModelFingerprint, gate: Gate, salt: str = "") -> None:
    """Keep a gate in the store; ``fingerprint`` with the warm context in it. Raises StoreError."""
    data, name = gate.to_bytes(), key(fingerprint, salt)
    segment = Segment.of(data)
    store.put("cas", segment.sha256, data)
    chunk = Chunk(0, 1, (Level(0, None, (segment,)),))
    store.put("ac", name, Manifest(name, fingerprint.digest(), segment.sha256, 1, (chunk,)).to_bytes())


def load(store: Store, fingerprint: ModelFingerprint, salt: str = "", *, deadline: float | None = None) -> Gate | None:
    """The gate that the store keeps for this model; None only if the store says that it has none.

    ``deadline`` is a ``time.monotonic()`` value. Raises StoreError if the store cannot be read, BitstreamError or
    ProfileError if what it holds is damaged or another model's: a gate was measured then, and is not known.
    """
    name = key(fingerprint, salt)
    pointer = store.get("ac", name, max_bytes=MAX_MANIFEST_BYTES, deadline=deadline)
    if pointer is None:
        return None
    segments = list(Manifest.from_bytes(pointer).expect(key=name, fingerprint=fingerprint.digest()).segments())
    if len(segments) != 1:
        raise CorruptBitstreamError(f"the gate's manifest names {len(segments)} objects instead of one")
    data = store.get("cas", segments[0].sha256, max_bytes=MAX_GATE_BYTES, deadline=deadline)
    if data is None:
        raise CorruptBitstreamError("the gate's manifest is in the store, the gate itself is not")
    segments[0].verify(data)
    gate = Gate.from_bytes(data)
    if gate.fingerprint != fingerprint.digest().hex():
        raise FingerprintMismatchError("the gate under this model's name was measured on another model")
    return gate


class Keeper:
    """The gate of one model in one store: read on first use, measured on request.

    A gate that cannot be read is not an absent one: it may be closed. Until it can be read, no document is spliced.
    """

    def __init__(self, model: KVModel, store: Store, warm: WarmContext, salt: str = "") -> None:
        self._model, self._store, self._warm, self._salt = model, store, warm, salt
        self._lock = threading.Lock()
        self._known = False
        self._gate: Gate | None = None
        self._unreadable: str | None = None
        self._retry_at = 0.0

    @property
    def gate(self) -> Gate | None:
        """What was measured for this model, or None. Never raises because of what the store holds."""
        return self._read(None)[0]

    def refusal(self, deadline: float | None = None) -> str | None:
        """Why documents are not spliced: what was measured, or that it cannot be read; None if they may be.

        ``deadline`` is a ``time.monotonic()`` value that bounds the reading. Never raises because of what the store
        holds.
        """
        gate, unreadable = self._read(deadline)
        return unreadable if gate is None else gate.refusal

    def _read(self, deadline: float | None) -> tuple[Gate | None, str | None]:
        """The gate, and why it cannot be read."""
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            return None, _unreadable(DeadlineExceededError("the deadline passed while another request reads it"))
        try:
            if not self._known and time.monotonic() >= self._retry_at:
                fingerprint = fingerprint_of(self._model.fingerprint, self._warm)
                try:
                    self._gate = load(self._store, fingerprint, self._salt, deadline=deadline)
                    self._known, self._unreadable = True, None
                except (StoreUnavailableError, DeadlineExceededError) as error:
                    # Whoever filled a tier asked for the gate before the documents: one that exists lies there too.
                    tiered = getattr(self._store, "local", None) is not None
                    self._unreadable = None if tiered else _unreadable(error)
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                    log.warning("%s", _unreadable(error))
                except (CacheGenError, ValueError) as error:
                    self._unreadable = _unreadable(error)
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                    log.warning("%s", self._unreadable)
            return self._gate, self._unreadable
        finally:
            self._lock.release()

    def calibrate(self, **options: Any) -> Gate:
        """Measure (see :func:`measure` for the options) and keep the result in the store. Raises StoreError."""
        gate = measure(self._model, warm=self._warm, **options)
        save(self._store, fingerprint_of(self._model.fingerprint, self._warm), gate, self._salt)
        with self._lock:
            self._gate, self._known, self._unreadable = gate, True, None
        return gate

    @property
    def recompute(self) -> Recompute:
        """What the model needs to have recomputed; nothing while it was not measured."""
        gate = self.gate
        return Recompute(QueryAware(), gate.budget) if gate is not None and gate.budget else Recompute()


def _unreadable(error: Exception) -> str:
    return f"whether this model may be spliced is in the store and cannot be read: {error}"


class Shadow:
    """Recomputes a sampled fraction of spliced requests in full and counts how often the first token agrees.

    fraction : of the requests that are checked, 0 to 1. Thread-safe. The caller passes a function that computes the
    prompt in full, so that a check costs nothing when it is not drawn.
    """

    def __init__(self, fraction: float, *, seed: int | None = None) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ConfigError(f"shadow fraction {fraction} must be from 0 to 1")
        self._fraction = fraction
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.checked = 0
        self.agreed = 0

    def drawn(self) -> bool:
        """Whether this request is to be checked."""
        with self._lock:
            return self._fraction > 0 and self._random.random() < self._fraction

    def compare(self, spliced: Sequence[int], full: Sequence[int]) -> float:
        """Count a checked request, greedy tokens of both: the share of ``full`` that ``spliced`` begins with."""
        pairs = enumerate(zip(spliced, full, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(spliced), len(full)))
        with self._lock:
            self.checked += 1
            self.agreed += list(spliced) == list(full)
        return same / len(full) if full else 1.0

    @property
    def agreement(self) -> float | None:
        """The share of checked requests whose answers were the same; None if none was checked."""
        with self._lock:
            return self.agreed / self.checked if self.checked else None
