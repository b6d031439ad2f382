"""What is to be expected of a transfer: when chunks arrive, what is left to do, and whether waiting for them pays."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from cachegen_rag.codec import Codec
from cachegen_rag.streaming.parts import ChunkOutcome, Part, levels_of
from cachegen_rag.streaming.policy import MISSING, Work

if TYPE_CHECKING:
    from cachegen_rag.streaming.pipeline import Loader

Status = Literal["waiting", "fetching", "arrived", "decoding", "ready", "failed"]

DECODE = 1e-4
"""Seconds a token that decoding is assumed to take until it was measured."""
PATIENCE = 1.2
"""The model computes instead of waiting if the chunk is expected later than this many times what that takes."""
NOTICEABLE = 0.025
"""Seconds by which the store must be slower than computing before it is not asked."""
SLICE_SECONDS, SLICE_TOKENS = 0.1, 64
"""What the model computes between two looks at a silent network, the longer of both."""
STRETCH_SECONDS = 0.6
"""What it computes at once of what is to be computed anyway: short calls are inefficient, and plans may change."""


class Outlook:
    """The state of a transfer and what can be told from it. Its methods change nothing; the loader's lock is held."""

    def __init__(self, loader: Loader, parts: Sequence[Part], due: float | None, prefix: int, tail: int) -> None:
        self.parts = list(parts)
        self.outcomes = [ChunkOutcome() for _ in parts]
        self.began = time.monotonic()
        self._loader, self._due = loader, due
        self._status: list[Status] = ["waiting"] * len(self.parts)
        self._left: dict[int, int] = {}  # bytes that have not arrived yet, of what is being fetched
        self._progress: dict[int, tuple[float, int]] = {}  # when a piece worth the name last came, bytes left then
        self._at = 0  # the part the model is at
        self._done = 0  # tokens of it that are computed
        slowest = loader.text.seconds(sum(len(p.token_ids) for p in parts), 0)
        self.priority = due if due is not None else self.began + slowest  # among what waits for the link
        self._lay_out(prefix, tail)

    def _lay_out(self, prefix: int, tail: int) -> None:
        """Lay out what the planner needs to know of every part, once."""
        loader, parts = self._loader, self.parts
        choose = self._due is not None and loader.remote
        self._levels = [levels_of(part, choose) for part in parts]
        rows = max([1, *map(len, self._levels)])
        self._sizes = np.full((rows, len(parts)), MISSING)
        self._losses, self._decodes = np.zeros((2, rows, len(parts)))
        self._text, self._splice = np.zeros((2, len(parts)))
        text = loader.text.seconds
        for i, part in enumerate(parts):
            tokens = len(part.token_ids)
            for row, level in enumerate(self._levels[i]):
                entry = part.chunk.level(level)
                self._sizes[row, i] = entry.length
                self._losses[row, i] = (entry.expected_kl or 0.0) * tokens
                self._decodes[row, i] = tokens * self._decode_cost(part.codec, level, self._levels[i])
            gap = text(part.gap, part.start)
            self._text[i] = gap + text(tokens, part.start)
            splice = tokens * loader.costs.mean(f"splice/{loader.model}", 0.0)
            self._splice[i] = gap + splice + text(part.head, part.start)
        end = parts[-1].start + len(parts[-1].token_ids) if parts else prefix
        self._tail = text(tail, end)
        self._model_free = self.began + text(prefix, 0)

    def _work(self, now: float, link_free: float) -> Work:
        """What is left of the request from the part the model is at."""
        a = self._at
        status, shared = self._status[a:], self._loader.shared_cores
        text, splice = self._text[a:].copy(), np.tile(self._splice[a:], (len(self._sizes), 1))
        if self._done and len(text):
            share = 1 - self._done / len(self.parts[a].token_ids)
            text[0] *= share
        decodes, ready = self._decodes[:, a:], np.zeros(len(text))
        for j, state in enumerate(status):
            if state == "failed":
                splice[:, j] = text[j]
            elif state == "waiting":
                splice[:, j] += decodes[:, j] * shared  # decoding then takes the model's time
            elif state != "ready":
                ready[j] = self._network_wait(a + j, now)[0] if shared else self._expected(a + j, now)
                splice[:, j] += self._decode_seconds(a + j) * shared
        if shared:
            decodes = np.zeros_like(decodes)
        return Work(
            self._sizes[:, a:],
            self._losses[:, a:],
            decodes,
            text,
            splice,
            self._tail,
            0,
            np.array([state != "waiting" for state in status], bool),
            ready,
            max(self._model_free - now, 0.0),
            link_free,
        )

    def _decode_cost(self, codec: Codec, level: int, levels: Sequence[int]) -> float:
        """Seconds a token of decoding a level, or the level nearest to it that was measured."""
        known = {n: self._loader.costs.mean(decode_key(codec, n), 0.0) for n in levels}
        measured = [n for n, seconds in known.items() if seconds > 0]
        return known[min(measured, key=lambda n: abs(n - level))] if measured else DECODE

    def _decode_seconds(self, i: int) -> float:
        """Seconds of decoding part ``i`` at the level it is fetched at."""
        level, levels = self.outcomes[i].level, self._levels[i]
        return float(self._decodes[levels.index(level), i]) if level in levels else 0.0

    def _expected(self, i: int, now: float) -> float:
        """Seconds until part ``i`` is decoded, as far as one can tell."""
        status = self._status[i]
        if status in ("ready", "failed"):
            return 0.0 if status == "ready" else math.inf
        if status == "waiting":
            return sum(self._network_wait(i, now))
        decode = self._decode_seconds(i)
        if status in ("arrived", "decoding"):
            return decode * max(1, self._status[self._at : i + 1].count("decoding"))
        return max(self._network_wait(i, now)) + decode

    def _network_wait(self, i: int, now: float) -> tuple[float, float]:
        """Seconds until part ``i`` arrives by the link's rate, and for how long nothing of it has come."""
        status, rate = self._status[i], self._loader.rate(now)
        if status == "waiting":
            size = float(self._sizes[0, i]) if self._levels[i] else 0.0
            return (self._loader.bytes_in_flight(self.priority) + size) / rate, 0.0
        if status != "fetching":
            return 0.0, 0.0
        ahead = sum(left for j, left in self._left.items() if j <= i)
        return ahead / rate, max(now - self._progress[i][0] - self._loader.meter.round_trip.seconds(), 0.0)

    def _rather_compute(self, i: int, done: int, now: float) -> int:
        """How many tokens of part ``i`` the model rather computes, from ``done`` on, than wait for it; 0: it waits.

        It does if the whole part is computed sooner than it is there: half of one saves nothing, and what arrives
        meanwhile waits for the engine. And it does, little by little, where nothing comes whatever the link's rate was.
        """
        start, text = self.parts[i].start, self._loader.text
        piece = self._slice(i, done, SLICE_SECONDS)
        late = PATIENCE * text.seconds(piece, start + done)
        if self._status[i] in ("arrived", "decoding"):
            return piece if not self._loader.shared_cores and self._expected(i, now) > late else 0
        wait, silent = self._network_wait(i, now)
        if wait > PATIENCE * text.seconds(len(self.parts[i].token_ids) - done, start + done):
            return self._slice(i, done, STRETCH_SECONDS)
        return piece if silent > late else 0

    def _slice(self, i: int, done: int, seconds: float) -> int:
        """Tokens of part ``i``, from ``done`` on, that the model computes in about ``seconds``."""
        text, start, left = self._loader.text.seconds, self.parts[i].start + done, len(self.parts[i].token_ids) - done
        if text(left, start) <= seconds:
            return left
        return min(left, max(SLICE_TOKENS, int(256 / max(text(256, start), 1e-9) * seconds)))

    def _slower_than_computing(self) -> str | None:
        """Why a local store is not worth asking, or None. Only what was measured counts."""
        if not self._loader.text.known or not self.parts:
            return None
        stored, text = float(self._decodes[0].sum() + self._splice.sum()), float(self._text.sum())
        if stored < text + NOTICEABLE:
            return None
        decoders = {decode_key(part.codec, part.level) for part in self.parts}
        for name in (f"splice/{self._loader.model}", *decoders):
            self._loader.costs.doubt(name)
        return f"computing is faster here: {text * 1e3:.0f} ms against {stored * 1e3:.0f} ms from the store"


def decode_key(codec: Codec, level: int) -> str:
    """The name of what decoding a level costs: seconds a token, while all threads decode."""
    return f"decode/{codec.profile.hash[:16]}/{level}"
