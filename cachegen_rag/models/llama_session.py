"""A session of the llama.cpp engine: one prompt under construction (see ``base.Session``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import (
    ContextOverflowError,
    CorruptBitstreamError,
    ModelError,
    RequestCancelledError,
    SpliceRefusedError,
)
from cachegen_rag.kv import KV
from cachegen_rag.models.base import Attended, KVTarget, Sampling, Token, check_runs
from cachegen_rag.models.llama_native import FIRST_RUN, LIBRARY, MAIN, SCRATCH
from cachegen_rag.models.llama_sampling import Sampler, log_softmax, top_logprobs
from cachegen_rag.models.llama_state import SequenceState, is_finite, layout, parse
from cachegen_rag.models.text_stream import ByteStream
from cachegen_rag.rope import rotate, to_interleaved

if TYPE_CHECKING:
    from cachegen_rag.models.llama_cpp import LlamaCppModel

WATCHED_TOKENS = 32  # a shorter decode is not worth a watching thread
WATCH_SECONDS = 0.02


class LlamaSession:
    """Builds a prompt in sequence 0 from decoded tokens and from rows staged in sequence 1 (the library).

    Taking rows shares their cells, so it copies nothing. Made by :meth:`LlamaCppModel.session`.
    """

    def __init__(self, model: LlamaCppModel) -> None:
        self.cancelled: Callable[[], bool] | None = None
        self._model = model
        self._context = model.context
        self._ids: list[int] = []
        self._staged = np.zeros(model.n_ctx, dtype=bool)  # positions that the library holds
        self._lost = np.zeros(model.n_ctx, dtype=bool)  # positions that it held and gave up to make room
        self._computed = 0  # leading tokens that were computed here or kept, not taken
        self._has_logits = False
        self._open = True

    @property
    def length(self) -> int:
        """Tokens in the prompt so far; the next token has this position."""
        return len(self._ids)

    @property
    def token_ids(self) -> list[int]:
        """The ids of those tokens."""
        return list(self._ids)

    def decode(self, token_ids: Sequence[int], *, logits: bool = False) -> NDArray[np.float32] | None:
        """Compute ``token_ids`` at the end of the prompt, in several batches when there are more than ``n_batch``.

        ``logits=True`` returns float32 ``[tokens, vocabulary]``.
        """
        ids = [int(i) for i in token_ids]
        self._check_decode(ids)
        out = np.empty((len(ids), self._model.n_vocab), np.float32) if logits else None
        for start in range(0, len(ids), self._context.n_batch):
            chunk = ids[start : start + self._context.n_batch]
            self._decode_batch(chunk, logits)
            if out is not None:
                out[start : start + len(chunk)] = self._context.logits(len(chunk))
        return out

    def decode_with_queries(self, token_ids: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """``decode(..., logits=True)`` and the queries float32 ``[layers, tokens, heads, key_dim]``, not rotated."""
        ids = [int(i) for i in token_ids]
        out = np.empty((len(ids), self._model.n_vocab), np.float32)
        rotated = self._decode_tapped(ids, out)
        rope, positions = self._model.rope, np.arange(self.length - len(ids), self.length)
        return out, rotate(to_interleaved(rotated, rope), positions, rope, inverse=True)

    def attend(self, token_ids: Sequence[int], layers: range) -> Attended:
        """``decode`` and, of some layers, the queries of these tokens and the keys of the whole prompt."""
        queries = self._decode_tapped([int(i) for i in token_ids], None)
        state = self._rows(0, self.length)
        keys = np.stack([state.keys[layer] for layer in layers]).astype(np.float32)
        return Attended(queries[layers.start : layers.stop], keys, state.positions)

    def _decode_tapped(self, ids: list[int], logits: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Compute ``ids`` and return their queries as the engine has them; ``logits`` is filled if it is given."""
        self._check_splice()  # the rotation of a refused model is not known
        self._check_decode(ids)
        shape, heads = self._model.shape, self._model.n_head
        queries = np.empty((shape.layers, len(ids), heads, shape.key_dim), np.float32)
        for start in range(0, len(ids), self._context.n_batch):
            chunk = ids[start : start + self._context.n_batch]
            rows = slice(start, start + len(chunk))
            with self._context.tap.tapped():
                self._decode_batch(chunk, None if logits is None else True)
            if logits is not None:
                logits[rows] = self._context.logits(len(chunk))
            queries[:, rows] = self._context.tap.queries(shape.layers, len(chunk), heads, shape.key_dim)
        return queries

    def reuse(self, token_ids: Sequence[int]) -> int:
        """Begin the prompt with the longest leading run of ``token_ids`` that an earlier session kept."""
        self._check_open()
        if self._ids:
            raise ModelError(f"reuse begins a prompt; this one has {len(self._ids)} tokens already")
        count = self._model.kept.restore(self._context, token_ids)
        self._ids = [int(i) for i in token_ids[:count]]
        self._computed, self._has_logits = count, False
        return count

    def keep(self, length: int | None = None) -> bool:
        """Keep the first ``length`` tokens (default: all) for :meth:`reuse` in later sessions."""
        self._check_open()
        length = len(self._ids) if length is None else length
        if not 0 <= length <= self._computed:
            raise ModelError(f"only the {self._computed} leading tokens that were computed can be kept, not {length}")
        return self._model.refusal is None and self._model.kept.save(self._context, self._ids[:length])

    def stage(self, positions: NDArray[np.int32]) -> KVTarget:
        """Memory for KV rows at these prompt positions: views of the state bytes that ``commit`` restores."""
        self._check_splice()
        positions = np.asarray(positions, dtype=np.int32)
        if positions.ndim != 1 or (len(positions) and (positions[0] < 0 or np.any(np.diff(positions) <= 0))):
            raise ModelError("positions must be one row of non-negative, strictly increasing numbers")
        if len(positions) and positions[-1] >= self._model.n_ctx:
            raise ContextOverflowError(
                f"a row for position {positions[-1]} does not fit the context of {self._model.n_ctx} tokens"
            )
        state = layout(self._model.shape, positions, SCRATCH)
        return KVTarget(state.keys, state.values, positions, self._model.rope, state)

    def commit(self, target: KVTarget, token_ids: Sequence[int] | None = None) -> None:
        """Put a filled target into the library."""
        self._check_splice()
        state = target.state
        if not isinstance(state, SequenceState) or len(target.positions) != len(state.positions):
            raise ModelError("commit takes a whole target from this engine's stage(), not a part of one")
        if not len(state.positions):
            return
        for layer, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
            if not (is_finite(keys) and is_finite(values)):
                raise CorruptBitstreamError(f"layer {layer} of the staged KV holds a value that is not finite")
        positions = target.positions
        if self._staged[positions].any():
            breaks = np.flatnonzero(np.diff(positions) > 1) + 1
            for run in np.split(positions, breaks):
                self._context.remove(LIBRARY, int(run[0]), int(run[-1]) + 1)
                self._staged[run] = False
        restored = self._context.set_sequence(SCRATCH, state.data)
        if not restored and self._make_room():
            restored = self._context.set_sequence(SCRATCH, state.data)
        if not restored:
            raise ContextOverflowError(
                f"the engine's cache has no room for {len(positions)} staged rows beside the prompt's {self.length}"
            )
        self._context.copy(SCRATCH, LIBRARY)
        self._context.remove(SCRATCH)
        self._staged[positions], self._lost[positions] = True, False

    def take(self, start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Append the library's rows at prompt positions ``start`` to ``stop``."""
        self._check_splice()
        if start != self.length or stop < start or len(token_ids) != stop - start:
            raise ModelError(
                f"take({start}, {stop}) with {len(token_ids)} ids must begin at the prompt's end, {self.length}, "
                "and have one id a position"
            )
        if stop == start:
            return
        if self._lost[start:stop].any():
            raise SpliceRefusedError(
                f"library rows between {start} and {stop} were dropped to make room; stage them again"
            )
        if stop > self._model.n_ctx or not self._staged[stop - 1]:
            raise SpliceRefusedError(f"the library has no row for position {stop - 1}, the last one to be taken")
        self._context.copy(LIBRARY, MAIN, start, stop)
        self._ids.extend(int(i) for i in token_ids)
        self._has_logits = False

    def skip(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose rows :meth:`recompute` computes later; nothing attends to them until then."""
        ids = [int(i) for i in token_ids]
        self._check_splice()
        self._check_tokens(ids)
        self._ids.extend(ids)
        self._has_logits = False

    def recompute(self, runs: Sequence[tuple[int, int]]) -> None:
        """Compute runs of the prompt anew, or for the first time, in as few calls as they fit.

        A run sees what stands before it when the call begins: of the other runs of its call, their rows as they were.
        """
        self._check_splice()
        check_runs(runs, self.length)
        for batch in _batches(runs, self._context.n_batch, self._context.runs_at_once):
            self._recompute(batch)

    def _recompute(self, runs: Sequence[tuple[int, int]]) -> None:
        """Compute runs in one call, each in a sequence that shares what stands before it; then put them in place."""
        context, batch = self._context, []
        try:
            for sequence, (start, stop) in enumerate(runs, FIRST_RUN):
                context.copy(MAIN, sequence, 0, start)
                if context.last_position(sequence) != start - 1:
                    raise SpliceRefusedError(f"the prompt lacks the row of position {start - 1}, which a run follows")
                batch.append((sequence, start, self._ids[start:stop]))
            with self._cancellable(sum(stop - start for start, stop in runs)):
                try:
                    context.decode_runs(batch)
                except ContextOverflowError:
                    if not self._make_room():
                        raise
                    context.decode_runs(batch)
            for (sequence, _, _), (start, stop) in zip(batch, runs, strict=True):
                context.remove(MAIN, start, stop)
                context.copy(sequence, MAIN, start, stop)
        finally:
            for sequence in range(FIRST_RUN, FIRST_RUN + len(runs)):
                context.remove(sequence)
        self._computed, self._has_logits = min(self._computed, runs[0][0]), False

    def export(self, start: int, stop: int) -> KV:
        """The KV of prompt positions ``start`` to ``stop``: keys float32 without rotation, values float16."""
        self._check_splice()
        if not 0 <= start <= stop <= self.length:
            raise ModelError(f"export({start}, {stop}) is outside the prompt's {self.length} tokens")
        model, state = self._model, self._rows(start, stop)
        order = np.argsort(state.positions, kind="stable")
        positions = state.positions[order]
        rotated = np.stack([keys[order] for keys in state.keys])
        keys = rotate(to_interleaved(rotated, model.rope), positions, model.rope, inverse=True)
        values = np.stack([values[order] for values in state.values])
        ids = np.asarray(self._ids, dtype=np.int32)[positions]
        return KV(keys, values, ids, (positions - start).astype(np.int32))

    def _rows(self, start: int, stop: int) -> SequenceState:
        """The engine's rows of prompt positions ``start`` to ``stop``."""
        if start == stop:
            return layout(self._model.shape, np.empty(0, np.int32))
        self._context.copy(MAIN, SCRATCH, start, stop)
        try:
            return parse(self._context.get_sequence(SCRATCH), self._model.shape)
        finally:
            self._context.remove(SCRATCH)

    def truncate(self, length: int) -> None:
        """Drop everything at positions ``length`` and beyond from the prompt (the library stays)."""
        self._check_open()
        if not 0 <= length <= self.length:
            raise ModelError(f"cannot truncate a prompt of {self.length} tokens to {length}")
        if length == self.length:
            return
        ids, self._ids = self._ids[:length], self._ids[:length]
        self._computed, self._has_logits = min(self._computed, length), False
        if not self._context.remove(MAIN, length):  # a recurrent state has no past to go back to
            self._context.remove(MAIN)
            self._ids = []
            self.decode(ids)

    def generate(self, sampling: Sampling) -> Iterator[Token]:
        """Generate from the end of the prompt; the last token must have been decoded, not taken."""
        self._check_open()
        if not self._has_logits:
            raise ModelError("generate follows a decode: decode at least one token after taking or dropping rows")
        return self._generate(sampling, Sampler(self._model.native, sampling, self._ids, self._model.n_ctx))

    def _generate(self, sampling: Sampling, sampler: Sampler) -> Iterator[Token]:
        model, stream = self._model, ByteStream(sampling.stop)
        room = max(1, model.n_ctx - self.length)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        try:
            for count in range(1, limit + 1):
                logits = self._context.last_logits()
                token = sampler.sample(logits)
                logprob: float | None = None
                top: tuple[tuple[int, float], ...] = ()
                if sampling.logprobs is not None:
                    logprobs = log_softmax(logits)
                    logprob, top = float(logprobs[token]), top_logprobs(logprobs, sampling.logprobs)
                ended = model.is_end(token)
                text = stream.finish() if ended else stream.push(model.piece(token))
                if not ended and not stream.stopped and count == limit:
                    text += stream.finish()
                    yield Token(token, text, logprob, top, "stop" if stream.stopped else "length")
                    return
                if ended or stream.stopped:
                    yield Token(token, text, logprob, top, "stop")
                    return
                yield Token(token, text, logprob, top)
                self._check_open()
                model.read_on()
                self._decode_batch([token], False)
        finally:
            sampler.free()

    def _check_open(self) -> None:
        if not self._open:
            raise ModelError("this session is closed")

    def _check_splice(self) -> None:
        self._check_open()
        if self._model.refusal is not None:
            raise SpliceRefusedError(self._model.refusal)

    def _check_decode(self, ids: list[int]) -> None:
        self._check_tokens(ids)
        if ids and self._context.last_position(MAIN) != self.length - 1:
            raise SpliceRefusedError(f"the prompt lacks the row of its last position, {self.length - 1}")

    def _check_tokens(self, ids: list[int]) -> None:
        self._check_open()
        if self.length + len(ids) > self._model.n_ctx:
            raise ContextOverflowError(
                f"{self.length} tokens of prompt and {len(ids)} more are {self.length + len(ids)}; "
                f"the context holds {self._model.n_ctx}"
            )
        wrong = next((i for i in ids if not 0 <= i < self._model.n_vocab), None)
        if wrong is not None:
            raise ModelError(f"token id {wrong} is not in the vocabulary of {self._model.n_vocab}")

    def _decode_batch(self, ids: list[int], logits: bool | None) -> None:
        """Decode at most ``n_batch`` tokens, with logits of all, of the last one or (None) of none.

        The prompt is as before if that fails or is cancelled.
        """
        self._has_logits = False

        def decode() -> None:
            if logits is None:
                self._context.decode_runs([(MAIN, self.length, ids)])
            else:
                self._context.decode(ids, self.length, all_logits=logits)

        try:
            with self._cancellable(len(ids)):
                try:
                    decode()
                except ContextOverflowError:
                    if not self._make_room():
                        raise
                    decode()
        except BaseException:
            self._context.remove(MAIN, self.length)
            raise
        if self._computed == self.length:
            self._computed += len(ids)
        self._ids.extend(ids)
        self._has_logits = logits is not None

    def _make_room(self) -> bool:
        """Give up library rows that the prompt has passed; False if there are none."""
        if not self._staged[: self.length].any():
            return False
        self._context.remove(LIBRARY, 0, self.length)
        self._lost[: self.length] |= self._staged[: self.length]
        self._staged[: self.length] = False
        return True

    @contextmanager
    def _cancellable(self, tokens: int) -> Iterator[None]:
        """Ask ``cancelled`` before a decode and, if it is a long one, while it runs."""
        if self.cancelled is not None and self.cancelled():
            raise RequestCancelledError(f"the request was cancelled after {self.length} tokens of its prompt")
        if self.cancelled is None or tokens < WATCHED_TOKENS:
            yield
            return
        cancelled, done = self.cancelled, threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                if cancelled():
                    self._context.abort()

        watcher = threading.Thread(target=watch, name="cachegen-cancel", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _close(self, failed: bool) -> None:
        """End the session: an empty context, but for the kept runs."""
        self._open = False
        if not self._context.pointer:  # freed at the end of the process, before an unfinished stream was closed
            return
        if failed:
            self._model.kept.forget()
            self._context.clear()
        else:
            for sequence in (MAIN, LIBRARY, SCRATCH):
                self._context.remove(sequence)
            self._model.kept.settle(self._context)


def _batches(runs: Sequence[tuple[int, int]], tokens: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Cut ``runs`` into calls of at most ``tokens`` and ``most`` runs, none of which begins where another one ends."""
    batch: list[tuple[int, int]] = []
    room = tokens
    for start, stop in runs:
        while start < stop:
            if not room or len(batch) == most or (batch and batch[-1][1] == start):
                yield batch
                batch, room = [], tokens
            end = min(stop, start + room)
            batch.append((start, end))
            room -= end - start
            start = end
    if batch:
        yield batch
