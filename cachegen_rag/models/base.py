"""What the cache needs of a model engine: the ``KVModel`` and ``Session`` protocols.

An engine holds one context. A :class:`Session` has exclusive use of it and builds one prompt from left to right:
tokens are either *decoded* (computed by the model) or *taken* from KV that was staged before. Staged KV lies in a
library of prompt positions, so what is taken may be chosen after it has been staged.

    with model.session() as s:
        s.decode(prefix_ids)                       # positions 0 .. P
        target = s.stage(positions)                # rows for the library, at their final prompt positions
        codec.decode_into(bitstream, target)
        s.commit(target)
        s.decode(document_ids[:8])                 # P .. P+8: recomputed heads
        s.take(P + 8, P + n)                       # the rest from the library
        s.decode(question_ids)
        for token in s.generate(sampling): ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError, ModelError
from cachegen_rag.fingerprint import ModelFingerprint
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.rope import RopeSpec

MIN_TEMPERATURE = 1e-6
MAX_PENALTY = 1e6
MAX_GRAMMAR_CHARS = 1 << 18
MAX_GRAMMAR_DEPTH = 200
"""Groups inside groups: llama.cpp's parser calls itself for each."""

_NUMBERS = ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
_GRAMMAR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.DOTALL)
"""The parts of GBNF in which a parenthesis opens no group: literals, character classes, comments."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature=0`` is greedy; the other fields follow llama.cpp's meaning.

    ``stop`` holds strings: generation ends before the first of them, which is not returned.
    ``seed=None`` draws a fresh one. ``grammar`` is GBNF text. ``logprobs`` asks for that many alternatives a token.
    Penalties look back over ``repeat_last_n`` tokens of the whole prompt (-1: all), spliced tokens included.

    A temperature below ``MIN_TEMPERATURE`` is greedy: dividing float32 logits by it would overflow.

    Raises ConfigError when a value has the wrong type or is out of range, or a grammar is too long or nested too deep.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.stop or ()
        if not isinstance(given, (str, list, tuple)):
            raise ConfigError(f"stop={given!r:.80} must be non-empty strings")
        stop = (given,) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "stop", stop)
        for names, kind, wanted in (
            (("max_tokens", "seed", "logprobs"), (Integral, type(None)), "a whole number or None"),
            (("top_k", "repeat_last_n"), Integral, "a whole number"),
            (_NUMBERS, Real, "a number"),
        ):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, kind):
                    raise ConfigError(f"{name}={value!r:.80} must be {wanted}")
        for name, right, accepted in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "0 or more, or None"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", abs(self.top_k) < 1 << 31, "below 2**31"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repeat_penalty", 1 / MAX_PENALTY <= self.repeat_penalty <= MAX_PENALTY, "above 0, up to 1e6"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, "between -1e6 and 1e6"),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, "between -1e6 and 1e6"),
            ("repeat_last_n", self.repeat_last_n >= -1, "0 or more, or -1 for the whole prompt"),
            ("stop", all(isinstance(text, str) and text for text in stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None"),
        ):
            if not right:
                raise ConfigError(f"{name}={getattr(self, name)!r:.80} must be {accepted}")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.grammar is not None:
            _check_grammar(self.grammar)


def _check_grammar(grammar: object) -> None:
    """Refuse what would overflow the C stack of a recursive parser, or not reach it whole."""
    if not isinstance(grammar, str) or "\0" in grammar or any("\ud800" <= c <= "\udfff" for c in grammar):
        raise ConfigError("grammar must be GBNF text without NUL characters and lone surrogates")
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ConfigError(f"grammar has {len(grammar):,} characters; it may have {MAX_GRAMMAR_CHARS:,}")
    depth = 0
    for bracket in re.findall(r"[()]", _GRAMMAR_TEXT.sub("", grammar)):
        depth += 1 if bracket == "(" else -1
        if depth > MAX_GRAMMAR_DEPTH:
            raise ConfigError(f"grammar nests groups deeper than {MAX_GRAMMAR_DEPTH}")


@dataclass(frozen=True)
class Token:
    """One generated token: its id, the text it completes (may be empty inside a character), why it is the last."""

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None  # "stop" or "length" on the last token


@dataclass(eq=False)
class KVTarget:
    """Memory that an engine hands out for decoded KV, in its own dtype and layout.

    keys : one writable array a layer, ``[tokens, kv_heads, key_dim]``, pair layout ``rope.layout``; any strides.
    values : one writable array a layer, ``[tokens, kv_heads, value_dim]``; any strides.
    positions : int32 ``[tokens]``, the prompt position every row is rotated to.
    rope : how the engine rotates; the decoder applies it to the keys.
    """

    keys: Sequence[Any]
    values: Sequence[Any]
    positions: NDArray[np.int32]
    rope: RopeSpec
    state: Any = field(default=None, repr=False)  # the engine's own

    def rows(self, start: int, stop: int) -> KVTarget:
        """The part of the target that holds rows ``start`` to ``stop`` (views of the same memory)."""
        return KVTarget(
            [k[start:stop] for k in self.keys],
            [v[start:stop] for v in self.values],
            self.positions[start:stop],
            self.rope,
            self.state,
        )


@dataclass(frozen=True, eq=False)
class Attended:
    """Queries of the prompt's last tokens and keys of all its rows, as the engine has them: rotated, one pair layout.

    queries : float32 ``[layers, tokens, heads, key_dim]``. keys : float32 ``[layers, rows, kv_heads, key_dim]``.
    positions : int32 ``[rows]``, of the keys, in any order.
    """

    queries: NDArray[np.float32]
    keys: NDArray[np.float32]
    positions: NDArray[np.int32]


def check_runs(runs: Sequence[tuple[int, int]], length: int) -> None:
    """Raise ModelError unless ``runs`` are disjoint, in order, not empty and within a prompt of ``length`` tokens."""
    at = 0
    for start, stop in runs:
        if not at <= start < stop <= length:
            raise ModelError(f"run {start} to {stop} is out of order, empty or outside {length} tokens")
        at = stop


class Session(Protocol):
    """One prompt under construction, with exclusive use of the engine's context. Not thread-safe."""

    cancelled: Callable[[], bool] | None
    """Asked before every decode, and during long ones where the engine can stop; True raises RequestCancelledError.

    The prompt is then as it was before the decode. Set it to a function that is quick and safe in any thread.
    """

    @property
    def length(self) -> int:
        """Tokens in the prompt so far; the next token has this position."""

    @property
    def token_ids(self) -> list[int]:
        """The ids of those tokens."""

    def decode(self, token_ids: Sequence[int], *, logits: bool = False) -> NDArray[np.float32] | None:
        """Compute ``token_ids`` at the end of the prompt. ``logits=True`` returns float32 ``[tokens, vocabulary]``.

        Raises ContextOverflowError when they do not fit, before any compute.
        """

    def decode_with_queries(self, token_ids: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Like ``decode(..., logits=True)``, and the queries of these tokens as the engine computed them.

        Returns logits ``[tokens, vocabulary]`` and queries float32 ``[layers, tokens, heads, key_dim]``, rotation
        removed, interleaved pairs. For calibration.
        """

    def attend(self, token_ids: Sequence[int], layers: range) -> Attended:
        """Like ``decode``; what these tokens ask for and what the whole prompt answers in some layers.

        For query-aware recompute selection.
        """

    def skip(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose rows :meth:`recompute` computes later; nothing attends to them until then.

        A decode must not follow them directly.
        """

    def recompute(self, runs: Sequence[tuple[int, int]]) -> None:
        """Compute the rows of these runs of prompt positions anew, or for the first time, with as few calls as it can.

        runs : ``(start, stop)``, disjoint and in order. Each sees all that stands before it; of the other runs of the
        same call, an engine may let it see the rows as they were before (llama.cpp), none where there were none.

        Raises ModelError on runs that are no such runs.
        """

    def reuse(self, token_ids: Sequence[int]) -> int:
        """Begin an empty prompt with the longest leading run of ``token_ids`` that an earlier session kept.

        Nothing is computed: the rows are the ones that session computed. Returns the run's length, 0 if none is kept;
        the caller decodes the rest, at least one token before ``generate``.
        """

    def keep(self, length: int | None = None) -> bool:
        """Keep the first ``length`` tokens (default: all) for :meth:`reuse` in later sessions.

        For a chat template's beginning or a warm context. Only tokens that were computed can be kept, none that were
        taken. The engine bounds what it keeps and drops the least recently used run; False when it does not keep this.
        """

    def stage(self, positions: NDArray[np.int32]) -> KVTarget:
        """Memory for KV rows at these prompt positions (strictly increasing).

        Valid until the session ends. Raises SpliceRefusedError on a model that has a ``refusal`` (as ``commit``,
        ``take`` and ``export`` do), ContextOverflowError on a position beyond ``n_ctx``.
        """

    def commit(self, target: KVTarget, token_ids: Sequence[int] | None = None) -> None:
        """Put a filled target into the library. Rows staged before at other positions stay.

        The whole target that ``stage`` returned, filled in every row. Raises CorruptBitstreamError when it holds a
        value that is not finite: such a row would spoil what is computed beside it.
        """

    def take(self, start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Append the library's rows at prompt positions ``start`` to ``stop``; ``start`` must equal ``length``.

        Positions that the library lacks inside the run are legal (a pruned cache), except the last one: what follows
        must continue from it. ``token_ids`` are the ids of all positions of the run, ``stop - start`` of them.
        """

    def export(self, start: int, stop: int) -> KV:
        """The KV of prompt positions ``start`` to ``stop``, rotation removed, positions counted from ``start``.

        Keys are float32 (the rotation is removed in float32), values as the engine has them.
        """

    def truncate(self, length: int) -> None:
        """Drop everything at positions ``length`` and beyond from the prompt (the library stays)."""

    def generate(self, sampling: Sampling) -> Iterator[Token]:
        """Generate from the end of the prompt; at least one token must have been decoded last, not taken."""


class KVModel(Protocol):
    """A model engine whose KV can be exported and spliced. Everything loads lazily, on first use."""

    @property
    def name(self) -> str:
        """A short name for records and reports."""

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The identity of this model's KV."""

    @property
    def shape(self) -> KVShape: ...

    @property
    def rope(self) -> RopeSpec: ...

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""

    @property
    def refusal(self) -> str | None:
        """Why this model is not spliced, or None. A refused model answers by plain prefill."""

    @property
    def bos_id(self) -> int | None:
        """The id a prompt must begin with, or None if this model takes none."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a turn, or None."""

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of ``text``, without BOS or EOS added. ``special=False`` keeps control-token markup plain text."""

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``; undecodable bytes become U+FFFD."""

    def session(self) -> AbstractContextManager[Session]:
        """Exclusive use of the context with an empty prompt; waits for the session before it."""

    def close(self) -> None:
        """Free the engine. Idempotent."""
