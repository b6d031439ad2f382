"""A prompt under construction on a transformers model (see :class:`cachegen_rag.models.base.Session`).

Short runs of tokens are *queued* and computed together, in one forward pass, when something depends on them: the heads
of all documents and the question cost one pass. Their rows are scattered between the taken ones, with explicit
positions and a mask by position, so the result is that of computing them one run after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
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
from cachegen_rag.models.text_stream import TextStream
from cachegen_rag.models.torch_attention import Step, forward
from cachegen_rag.models.torch_cache import KeptRuns, Library
from cachegen_rag.models.torch_rope import unrotate
from cachegen_rag.models.torch_sampling import Sampler

if TYPE_CHECKING:
    from cachegen_rag.models.transformers import Loaded

QUEUED_TOKENS = 64
"""Runs at least this long are computed at once: they fill a forward pass by themselves."""

MAX_PASS_TOKENS = 2048
"""Tokens of one forward pass; bounds its memory."""


@dataclass(frozen=True)
class Staged:
    """State of a target: whether its rows lie in the library, and the CUDA event after which they may be written."""

    in_place: bool
    ready: Any


class TransformersSession:
    """One prompt. Made by ``TransformersModel.session()``."""

    def __init__(
        self,
        loaded: Loaded,
        cache: Any,
        library: Library,
        kept: KeptRuns,
        read_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._read_on = read_on  # called when an answer goes on, perhaps in another thread
        self.cancelled: Callable[[], bool] | None = None
        self._loaded, self._cache, self._library, self._kept = loaded, cache, library, kept
        self._ids: list[int] = []  # one a position
        self._cells: list[int] = []  # positions of the cache's rows, increasing
        self._queue: list[int] = []  # cells whose rows are still to be computed
        self._logits: torch.Tensor | None = None  # of the last token, if it was computed
        self._computed = 0  # leading tokens that were computed here or kept, not taken
        self._open = True
        library.clear()

    def close(self) -> None:
        """End the session: the memory it used belongs to the next one."""
        self._open = False

    @property
    def length(self) -> int:
        """Tokens in the prompt so far; the next token has this position."""
        return len(self._ids)

    @property
    def token_ids(self) -> list[int]:
        """The ids of those tokens."""
        return list(self._ids)

    def decode(self, token_ids: Sequence[int], *, logits: bool = False) -> NDArray[np.float32] | None:
        """Compute ``token_ids`` at the end of the prompt. ``logits=True`` returns float32 ``[tokens, vocabulary]``.

        Fewer than ``QUEUED_TOKENS`` without logits are only queued.

        Raises ContextOverflowError when they do not fit, before any compute; RequestCancelledError before a pass.
        """
        self._require_wanted()
        self._append(token_ids)
        if not token_ids:
            return np.empty((0, self._loaded.vocabulary), np.float32) if logits else None
        if logits:
            return self._flush(len(token_ids)).float().cpu().numpy()
        if len(token_ids) >= QUEUED_TOKENS or len(self._queue) >= MAX_PASS_TOKENS:
            self._flush()
        return None

    def decode_with_queries(self, token_ids: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Like ``decode(..., logits=True)``, and the queries of these tokens, float32
        ``[layers, tokens, heads, key_dim]``, rotation removed, interleaved pairs.

        Raises ContextOverflowError; SpliceRefusedError for a model whose queries cannot be compared with its keys.
        """
        logits, queries = self._forward_with_queries(token_ids, len(token_ids))
        positions = torch.arange(self.length - len(token_ids), self.length)
        return logits.float().cpu().numpy(), unrotate(queries, positions, self._loaded.rope).cpu().numpy()

    def attend(self, token_ids: Sequence[int], layers: range) -> Attended:
        """Like ``decode``; of some layers, the queries of these tokens and the keys of the whole prompt.

        Raises as :meth:`decode_with_queries` does.
        """
        some = slice(layers.start, layers.stop)
        _, queries = self._forward_with_queries(token_ids, 1)
        keys = self._cache.keys[some, :, : len(self._cells)].transpose(1, 2)
        positions = np.asarray(self._cells, dtype=np.int32)
        return Attended(queries[some].float().cpu().numpy(), keys.float().cpu().numpy(), positions)

    def _forward_with_queries(self, token_ids: Sequence[int], keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the last ``keep`` of these tokens and the rotated queries of all, ``[layers, n, heads, dim]``."""
        self._require_splicing()
        self._flush()
        self._append(token_ids)
        collected: list[torch.Tensor] = []
        logits = self._flush(keep, collected)
        return logits, torch.stack(collected).transpose(1, 2)  # [layers, heads, n, dim] -> [layers, n, heads, dim]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose rows are computed with what comes next: exact here."""
        self._require_splicing()
        self._append(token_ids)

    def recompute(self, runs: Sequence[tuple[int, int]]) -> None:
        """Queue these runs of the prompt to be computed anew, together: exact here, each sees the new rows of others.

        Raises ModelError on runs that are out of order, empty or outside the prompt.
        """
        self._require_splicing()
        check_runs(runs, self.length)
        cells = set(self._queue)
        for start, stop in runs:
            first, last = np.searchsorted(self._cells, [start, stop])
            cells.update(range(int(first), int(last)))
        self._queue = sorted(cells)
        if runs:
            self._computed = min(self._computed, runs[0][0])
            self._logits = None

    def reuse(self, token_ids: Sequence[int]) -> int:
        """Begin an empty prompt with the longest leading run of ``token_ids`` that an earlier session kept; its length.

        Raises ModelError when the prompt is not empty.
        """
        self._require_open()
        if self._ids:
            raise ModelError(f"reuse begins a prompt; this one has {self.length} tokens already")
        if self._loaded.refusal is not None:
            return 0
        self._computed = self._kept.restore(token_ids, self._cache)
        self._ids = [int(i) for i in token_ids[: self._computed]]
        self._cells = list(range(self._computed))
        return self._computed

    def keep(self, length: int | None = None) -> bool:
        """Keep the first ``length`` tokens (default: all) for :meth:`reuse` in later sessions; False without room.

        Raises ModelError when some of them were taken.
        """
        self._require_open()
        length = self.length if length is None else length
        if not 0 <= length <= self._computed:
            raise ModelError(f"only the {self._computed} leading tokens that were computed can be kept, not {length}")
        self._flush()
        return self._loaded.refusal is None and self._kept.save(self._ids[:length], self._cache)

    def stage(self, positions: NDArray[np.int32]) -> KVTarget:
        """Memory for KV rows at these prompt positions (strictly increasing).

        On a GPU the arrays are CUDA tensors; on the CPU numpy arrays. A run without holes is decoded straight into
        the library.

        Raises ContextOverflowError, SpliceRefusedError.
        """
        self._require_splicing()
        where = np.asarray(positions, dtype=np.int32)
        if where.ndim != 1 or np.any(np.diff(where) <= 0) or (len(where) and where[0] < 0):
            raise ModelError("staged positions must be a strictly increasing run of prompt positions")
        n = len(where)
        if n and where[-1] >= self._loaded.n_ctx:
            raise ContextOverflowError(f"position {where[-1]} is staged in a context of {self._loaded.n_ctx} tokens")
        direct = n > 0 and int(where[-1]) - int(where[0]) == n - 1 and self._loaded.shares_memory
        if direct:
            rows = slice(int(where[0]), int(where[-1]) + 1)
            self._library.present[rows] = False
            keys, values = self._library.keys[:, :, rows], self._library.values[:, :, rows]
        else:
            shape, device = self._loaded.shape, self._loaded.device
            dtype = self._loaded.dtype if self._loaded.shares_memory else torch.float32
            keys = torch.empty(shape.layers, shape.kv_heads, n, shape.key_dim, dtype=dtype, device=device)
            values = torch.empty(shape.layers, shape.kv_heads, n, shape.value_dim, dtype=dtype, device=device)
        staged = Staged(direct, _event(self._loaded.device))
        return KVTarget(self._hand_out(keys), self._hand_out(values), where, self._loaded.rope, staged)

    def commit(self, target: KVTarget, token_ids: Sequence[int] | None = None) -> None:
        """Put a filled target into the library. Rows staged before at other positions stay.

        Raises CorruptBitstreamError when a value is not finite.
        """
        self._require_splicing()
        for arrays in (target.keys, target.values):
            _require_finite([torch.as_tensor(rows) for rows in arrays])
        where = torch.from_numpy(target.positions.astype(np.int64))
        if not target.state.in_place:
            on_device = where.to(self._loaded.device)
            for memory, arrays in ((self._library.keys, target.keys), (self._library.values, target.values)):
                for layer, rows in zip(memory, arrays, strict=True):
                    layer.index_copy_(1, on_device, torch.as_tensor(rows).transpose(0, 1).to(layer))
        self._library.present[where] = True

    def take(self, start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Append the library's rows at prompt positions ``start`` to ``stop``; ``start`` must equal ``length``.

        Raises ModelError for any other start or a wrong number of ids; ContextOverflowError; SpliceRefusedError when
        the library lacks the last position.
        """
        if start != self.length or len(token_ids) != stop - start:
            raise ModelError(
                f"positions {start} to {stop} with {len(token_ids)} ids do not continue a prompt of {self.length}"
            )
        self._require_room(len(token_ids))
        self._require_splicing()
        if stop == start:
            return
        if not self._library.present[stop - 1]:
            raise SpliceRefusedError(f"the library has no row for position {stop - 1}, the last one to be taken")
        rows = self._library.rows(start, stop)
        first, n = len(self._cells), len(rows)
        source: slice | torch.Tensor = slice(int(rows[0]), int(rows[-1]) + 1)
        if int(rows[-1]) - int(rows[0]) != n - 1:
            source = rows.to(self._loaded.device)
        for cache, library in ((self._cache.keys, self._library.keys), (self._cache.values, self._library.values)):
            cache[:, :, first : first + n] = library[:, :, source]
        self._ids.extend(map(int, token_ids))
        self._cells.extend(rows.tolist())
        self._logits = None

    def export(self, start: int, stop: int) -> KV:
        """The KV of prompt positions ``start`` to ``stop``, rotation removed, positions counted from ``start``.

        float32 keys; values in the engine's dtype. On a GPU both are CUDA tensors.

        Raises SpliceRefusedError, ModelError for positions outside the prompt.
        """
        self._require_splicing()
        if not 0 <= start <= stop <= self.length:
            raise ModelError(f"positions {start} to {stop} lie outside a prompt of {self.length} tokens")
        self._flush()
        first, last = np.searchsorted(self._cells, [start, stop])
        positions = np.asarray(self._cells[first:last], dtype=np.int32)
        keys = self._cache.keys[:, :, first:last].transpose(1, 2)
        values = self._cache.values[:, :, first:last].transpose(1, 2)
        keys = unrotate(keys, torch.from_numpy(positions.astype(np.int64)), self._loaded.rope)
        ids = np.asarray([self._ids[p] for p in positions], dtype=np.int32)
        host = self._loaded.on_host
        if host and values.dtype == torch.bfloat16:
            values = values.float()  # numpy has no bfloat16
        # Copies: the cache goes on to other rows.
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
        arrays: tuple[Any, Any] = (k.numpy(), v.numpy()) if host else (k, v)
        return KV(*arrays, ids, positions - np.int32(start))

    def truncate(self, length: int) -> None:
        """Drop everything at positions ``length`` and beyond from the prompt (the library stays)."""
        self._require_open()
        if not 0 <= length <= self.length:
            raise ModelError(f"cannot truncate a prompt of {self.length} tokens to {length}")
        if length == self.length:
            return
        self._computed = min(self._computed, length)
        del self._ids[length:]
        del self._cells[int(np.searchsorted(self._cells, length)) :]
        self._queue = [c for c in self._queue if c < len(self._cells)]
        self._logits = None
        if self._loaded.refusal is not None:
            # The model's own cache cannot be cut in general: what is left is computed again when it is needed.
            self._cache = self._loaded.plain_cache()
            self._queue = list(range(len(self._cells)))

    def generate(self, sampling: Sampling) -> Iterator[Token]:
        """Generate from the end of the prompt; at least one token must have been decoded last, not taken.

        The end-of-turn token is returned as the last one, without text of its own.

        Raises ModelError (nothing decoded last), ConfigError (a grammar, which this engine does not have).
        """
        sampler = Sampler(sampling, self._loaded.device)
        if self._logits is None and self._queue[-1:] != [len(self._cells) - 1]:
            raise ModelError("decode at least one token before generating: logits are not part of stored KV")
        return self._generate(sampling, sampler)

    def _generate(self, sampling: Sampling, sampler: Sampler) -> Iterator[Token]:
        text = TextStream(self._loaded.visible_text, sampling.stop)
        limit = max(1, self._loaded.n_ctx - self.length)  # the last token needs no room: it is not computed
        limit = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
        self._flush()
        for count in range(1, limit + 1):
            logits = self._logits
            if logits is None:
                raise ModelError("the prompt was changed while it was generating")
            token = sampler.pick(logits, self._ids)
            shown = text.push(token.id)
            if token.id in self._loaded.end_ids or text.stopped:
                shown += text.finish()
                yield Token(token.id, shown, token.logprob, token.top, "stop")
                return
            if count == limit:
                yield Token(token.id, shown + text.finish(), token.logprob, token.top, "length")
                return
            yield Token(token.id, shown, token.logprob, token.top)
            if self._open:
                self._read_on()
            self._append([token.id])
            self._flush()

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def _append(self, token_ids: Sequence[int]) -> None:
        self._require_room(len(token_ids))
        wrong = next((i for i in token_ids if not 0 <= i < self._loaded.vocabulary), None)
        if wrong is not None:
            raise ModelError(f"token id {wrong} is not in the vocabulary of {self._loaded.vocabulary}")
        first, cell, n = self.length, len(self._cells), len(token_ids)
        if self._computed == first:
            self._computed += n
        self._ids.extend(map(int, token_ids))
        self._cells.extend(range(first, first + n))
        self._queue.extend(range(cell, cell + n))

    def _flush(self, keep: int = 1, collected: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the queue; logits ``[keep, vocabulary]`` of its last tokens (empty if nothing was queued)."""
        kept: list[torch.Tensor] = []
        while self._queue:
            self._require_wanted()
            batch = self._queue[:MAX_PASS_TOKENS]
            rest = len(self._queue) - len(batch)
            wanted = min(len(batch), max(keep - rest, 1))
            out = self._forward(batch, wanted, collected)
            if keep > rest:
                kept.append(out)
            del self._queue[: len(batch)]
            if batch[-1] == len(self._cells) - 1:
                self._logits = out[-1]
        return torch.cat(kept) if kept else torch.empty(0, self._loaded.vocabulary)

    @torch.inference_mode()
    def _forward(self, cells: list[int], keep: int, collected: list[torch.Tensor] | None) -> torch.Tensor:
        device = self._loaded.device
        positions = [self._cells[c] for c in cells]
        ids = torch.tensor([[self._ids[p] for p in positions]], device=device)
        if self._loaded.refusal is not None:
            return forward(self._loaded.model, ids, self._cache, keep)
        # Rows behind the last one computed here are not attended to by any of it.
        used = cells[-1] + 1
        self._cache.point(cells, used)
        step = Step(positions, self._cells[:used], device, keep_queries=collected is not None)
        logits = forward(self._loaded.model, ids, self._cache, keep, step)
        if collected is not None:
            assert step.collected is not None
            collected.extend(step.collected)
        return logits

    # -- checks -------------------------------------------------------------------------------------------------------

    def _require_room(self, tokens: int) -> None:
        self._require_open()
        if self.length + tokens > self._loaded.n_ctx:
            raise ContextOverflowError(
                f"{self.length + tokens} tokens do not fit the context of {self._loaded.n_ctx} tokens"
            )

    def _require_wanted(self) -> None:
        if self.cancelled is not None and self.cancelled():
            raise RequestCancelledError(f"the request was cancelled after {self.length} tokens of its prompt")

    def _require_open(self) -> None:
        if not self._open:
            raise ModelError("this session has ended; open another one with model.session()")

    def _require_splicing(self) -> None:
        self._require_open()
        if self._loaded.refusal is not None:
            raise SpliceRefusedError(f"{self._loaded.name} is not spliced: {self._loaded.refusal}")

    def _hand_out(self, memory: torch.Tensor) -> Sequence[Any]:
        """``[layers, kv_heads, n, dim]`` as one ``[n, kv_heads, dim]`` view a layer."""
        rows = memory.transpose(1, 2)
        return [layer.numpy() for layer in rows] if self._loaded.on_host else list(rows)


def _event(device: torch.device) -> Any:
    """What marks this point of the device's work, for a decoder that runs on another stream; None on the CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _require_finite(layers: list[torch.Tensor]) -> None:
    # A sum is finite where every value is, unless it overflows or cancels: look closer then. One wait for the device.
    if not layers or torch.isfinite(torch.stack([rows.sum(dtype=torch.float32) for rows in layers])).all():
        return
    for layer, rows in enumerate(layers):
        if not torch.isfinite(rows).all():
            raise CorruptBitstreamError(f"layer {layer} of the staged KV holds a value that is not finite")
