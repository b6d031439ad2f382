"""The gate: whether a model may be spliced at all, and with how much recompute, by measurement on that model.

Quality of splicing depends on the model, so it is measured once per model: a few questions over documents shipped
with the package are computed in full and spliced; the least budget whose KL meets the threshold is what the model
needs. A model that meets it at no budget is not spliced: exact prefix reuse only. In service ``shadow.py`` goes on
measuring.

A gate is looked for in the store, beside the profile that was given (``calibrate`` writes both), and among those that
ship with the package.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
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
MIN_DOCUMENT = 16
"""Tokens of the gate's documents: in a short context they are cut to fit, but not to less."""

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
        if not self.kl:
            return "what splicing costs this model was not measurable, e.g. in too short a context"
        least = min(self.kl.values())
        return (
            f"spliced answers differ too much on this model: KL {least:.2f} per token at best where "
            f"{self.threshold:g} is allowed; only exact prefixes are reused"
        )

    @property
    def summary(self) -> str:
        """What was measured, in words."""
        if self.budget is None:
            return f"closed: {self.refusal}"
        return (
            f"open with {self.budget:.0%} of the documents recomputed: KL {self.kl[f'{self.budget:g}']:.3f} per token "
            f"over {self.questions} questions, {self.threshold:g} is allowed"
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
            ("kl", gate.budget is None or f"{gate.budget:g}" in gate.kl, "what was measured, the budget's KL too"),
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
    progress: Callable[[str, int, int], None] | None = None,
) -> Gate:
    """Find the least budget whose mean KL per token meets ``threshold``, trying ``budgets`` in their order.

    coder : how a document's KV is stored and read back; by default not at all. Pass one that encodes and decodes, so
        that the gate sees what requests will see.
    progress : called with what is being done, how much of it is done, and how much there is at most.
    A model with a ``refusal`` of its own gets a closed gate at once; so does one whose context is too short.
    """
    done, tell = 0, progress or (lambda *_: None)
    if not budgets:
        raise ConfigError("the gate needs at least one budget to try")
    warm = warm or WarmContext.for_model(model)
    digest = fingerprint_of(model.fingerprint, warm).digest().hex()
    if model.refusal is not None:
        return Gate(digest, threshold, None)
    try:
        trials = _trials(model, questions, document_length)
        total = len(trials) * (1 + len(budgets))
        cases = []
        for trial in trials:
            cases.append(_Case.of(model, warm, coder, trial))
            tell("splice gate", done := done + 1, total)
    except ContextOverflowError:
        return Gate(digest, threshold, None)
    kl: dict[str, float] = {}
    for budget in budgets:
        outcomes = []
        for case in cases:
            outcomes.append(case.spliced(model, method or QueryAware(), budget))
            tell("splice gate", done := done + 1, total)
        kl[f"{budget:g}"] = value = float(np.concatenate([o.kl for o in outcomes]).mean())
        if value <= threshold:
            tell("splice gate", total, total)
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
        turns = with_documents(messages, documents)
        answer, _ = document_tokens(model, question["answers"][0])
        rest = len(build_prompt(model, turns, max_document_tokens=1)) - len(documents) + len(answer)
        fitting = max(MIN_DOCUMENT, min(length, (model.n_ctx - rest) // len(documents)))
        trials.append(Trial(build_prompt(model, turns, max_document_tokens=fitting), answer))
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


def shipped_gate(fingerprint: ModelFingerprint) -> Gate | None:
    """The gate that ships with this package for exactly this model in this warm context, or None."""
    digest = fingerprint.digest().hex()
    path = files("cachegen_rag") / "data" / "gates" / f"{digest[:16]}.json"
    gate = Gate.from_bytes(path.read_bytes()) if path.is_file() else None
    return gate if gate is not None and gate.fingerprint == digest else None


def path_beside(profile: Path) -> Path:
    """Where ``calibrate`` writes the gate that belongs to a profile's file."""
    return profile.with_name(profile.name + ".gate.json")


def gate_beside(profile: Path, fingerprint: ModelFingerprint) -> Gate | None:
    """The gate beside a profile's file; None if there is none, or one of another model (a profile may serve several).

    Raises ProfileError if what lies there is no gate, or cannot be read.
    """
    path = path_beside(profile)
    try:
        gate = Gate.from_bytes(path.read_bytes()) if path.is_file() else None
    except OSError as error:
        raise ProfileError(f"cannot read the gate {path}: {error.strerror}") from error
    return gate if gate is not None and gate.fingerprint == fingerprint.digest().hex() else None


class Keeper:
    """The gate of one model in one store: read on first use, measured on request.

    profile : the file of the codec profile, if one was given: a gate may lie beside it.

    A gate that cannot be read is not an absent one: it may be closed. Until it can be read, no document is spliced.
    """

    def __init__(
        self, model: KVModel, store: Store, warm: WarmContext, salt: str = "", profile: Path | None = None
    ) -> None:
        self._model, self._store, self._warm, self._salt, self._profile = model, store, warm, salt, profile
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
                    self._gate = self._find(fingerprint, deadline)
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

    def _find(self, fingerprint: ModelFingerprint, deadline: float | None) -> Gate | None:
        found = load(self._store, fingerprint, self._salt, deadline=deadline)
        if found is None and self._profile is not None:
            found = gate_beside(self._profile, fingerprint)
        return found or shipped_gate(fingerprint)

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
