"""Which chunk to fetch next, at which level, and how many to compute instead. Pure: numbers in, a decision out.

The model builds the prompt from left to right: a computed chunk costs it ``text`` seconds, a fetched one ``splice``
seconds once it has arrived and been decoded. Chunks to be computed are the first of those not fetched yet: there the
model never waits, and the link gets the most time for the rest (both-ends loading). A plan is therefore a number ``k``
of chunks to compute and a level for each of the others, and its time to first token is

    max(model_free + sum of the model's costs,  for every fetched chunk i: ready_i + the model's costs from i on) + tail

which is evaluated for all ``k`` and levels at once. Only the first step of a plan is carried out; the next decision is
made anew with what was measured meanwhile (model-predictive control; Yin et al., SIGCOMM 2015, for video).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MISSING = 1e15
"""Bytes of a chunk at a level at which it is not stored: too many for any plan, and finite for arithmetic."""

COMPUTING_RESERVE = 0.05
"""Share of a target that stays unused where all that is left is computed: engines are steadier than links."""

NEARLY = 0.02
"""Share of a time within which two plans are taken for equally early: what is measured is not known better."""

SAME = 0.002
"""The same for the choice of a level, which is made anew for every chunk: what each gives away would add up."""

LONG_SHOT = 3.0
"""A chunk that nobody waits for is still fetched if it is expected within this many times the time left."""


@dataclass
class Work:
    """What is left of a request. Times are seconds from now; arrays go over the chunks in prompt order.

    sizes, losses, decode : ``[levels, chunks]``, finest level first: bytes, expected KL summed over the chunk's tokens,
        seconds from the last byte to decoded. A chunk that is not stored at a level has the size MISSING there.
    text, splice : ``[chunks]``, the model's seconds for a chunk if it is computed, or fetched (its recomputed head, and
        decoding where that takes the model's cores); splice may be ``[levels, chunks]``.
    tail : the model's seconds after the last chunk. default : index of the level used without a target.
    fetched : ``[chunks]``, chunks that have arrived or are on their way; ready : when they are decoded (0: now).
    model_free, link_free : when the model, and the link, can begin something new.
    """

    sizes: Floats
    losses: Floats
    decode: Floats
    text: Floats
    splice: Floats
    tail: float = 0.0
    default: int = 0
    fetched: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    ready: Floats = field(default_factory=lambda: np.zeros(0))
    model_free: float = 0.0
    link_free: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.fetched):
            self.fetched = np.zeros(len(self.text), bool)
            self.ready = np.zeros(len(self.text))


@dataclass(frozen=True)
class Link:
    """What is known of the link: ``rate`` in bytes a second, ``round_trip`` seconds, relative ``error`` of the rate."""

    rate: float
    round_trip: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Decision:
    """``fetch`` this chunk (index into Work) at this ``level`` (index) next, or nothing (None).

    ``compute``: how many of the chunks not fetched yet the plan computes; ``ttft``: when its first token is expected.
    """

    fetch: int | None
    level: int | None
    compute: int
    ttft: float


class Policy(Protocol):
    """Decides what the link does next, whenever it is free."""

    def decide(self, work: Work, link: Link, target: float | None = None, elapsed: float = 0.0) -> Decision:
        """``target``: seconds from now until the first token is due, None if there is no target; ``elapsed`` so far."""


def finish_times(work: Work, rate: float, round_trip: float = 0.0) -> tuple[Floats, NDArray[np.int64]]:
    """Time to first token ``[levels, k]`` if the first ``k`` unfetched chunks are computed and the others fetched.

    Also the unfetched chunks' indices; ``k`` goes from 0 to their number.
    """
    todo = (~work.fetched).nonzero()[0]
    count, splice = len(todo), work.splice if work.splice.ndim == 2 else work.splice[None]
    left = _of(todo, work)
    suffix = splice[:, ::-1].cumsum(axis=1)[:, ::-1]  # the model's cost from a chunk on, if all is fetched
    extra = np.zeros((len(splice), count + 1))  # the model's additional cost for computing the first k
    (work.text - splice)[:, left].cumsum(axis=1, out=extra[:, 1:])
    model = extra + (work.model_free + (suffix[:, :1] if suffix.size else 0.0))
    for i in (work.fetched & (work.ready > work.model_free)).nonzero()[0] if count < len(work.fetched) else ():
        at = todo.searchsorted(i)
        later = extra - extra[:, at : at + 1]  # computed chunks behind i wait for it too
        np.maximum(model, work.ready[i] + suffix[:, i : i + 1] + np.maximum(later, 0.0), out=model)
    times = np.empty((len(work.sizes), count + 1))
    if count:
        seconds = np.zeros((len(work.sizes), count + 1))
        (work.sizes[:, left] / rate).cumsum(axis=1, out=seconds[:, 1:])
        done = seconds[:, 1:] + work.decode[:, left] + suffix[:, left]
        latest = np.maximum.accumulate(done[:, ::-1], axis=1)[:, ::-1]
        latest += max(work.link_free, 0.0) + round_trip
        np.maximum(latest - seconds[:, :count], model[:, :count], out=times[:, :count])
    times[:, count] = model[:, count]
    times += work.tail
    return times, todo


def _of(todo: NDArray[np.int64], work: Work) -> slice | NDArray[np.int64]:
    """An index of what is left: a slice, which copies nothing, as long as that is everything."""
    return slice(None) if len(todo) == len(work.fetched) else todo


class Planner:
    """Plans over the whole horizon. With a target: the least loss that meets it; without: the earliest first token.

    caution : with a target, how many standard errors of the estimated rate the plan allows for. The error of a sum of
        many transfers is smaller than that of one, so it is scaled with the number that is left.
    reserve : with a target, the share of it that plans leave unused: a rate can fall after the last decision, however
        steady it was. Simulated on recorded and generated traces, it buys missed targets back for less quality than
        caution does, and than plans that also survive a sudden drop, or give up transfers for coarser ones.
    """

    def __init__(self, caution: float = 0.6, reserve: float = 0.19) -> None:
        self.caution, self.reserve = caution, reserve

    def decide(self, work: Work, link: Link, target: float | None = None, elapsed: float = 0.0) -> Decision:
        if target is None:
            times, todo = finish_times(work, link.rate, link.round_trip)
            _, k = _soonest(times[work.default][None])
            return _earliest(work, link, todo, k, work.default, float(times[work.default, k]))
        due = target - COMPUTING_RESERVE * (target + elapsed)
        target -= self.reserve * (target + elapsed)
        left = max(1, work.fetched.size - int(np.count_nonzero(work.fetched)))
        rate = link.rate * math.exp(-self.caution * link.error / math.sqrt(left))
        times, todo = finish_times(work, rate, link.round_trip)
        fits = times <= target
        fits[:, -1] |= times[:, -1] <= due  # computing all that is left asks nothing more of the network
        if not fits.any():  # late whatever is done: be as little late as possible
            level, k = _soonest(times)
            return _earliest(work, link, todo, k, level, float(times[level, k]))
        losses = np.zeros_like(times)
        losses[:, :-1] = work.losses[:, _of(todo, work)][:, ::-1].cumsum(axis=1)[:, ::-1]
        first = fits.argmax(axis=0)  # the finest level that fits, for each k
        finer = np.maximum(first - 1, 0)
        columns = np.arange(times.shape[1])
        time, loss = times[first, columns], losses[first, columns]
        room = times[finer, columns] - time  # 0 where no level is finer
        share = (target - time) / np.where(room > 0, room, math.inf)
        mixed = loss - share * (loss - losses[finer, columns])
        mixed[~fits.any(axis=0)] = math.inf
        k = int(np.lexsort((time, mixed))[0])
        level = int(finer[k] if share[k] >= 0.5 else first[k])
        return _decision(work, todo, k, level, float(time[k]))


def _soonest(times: Floats) -> tuple[int, int]:
    """Of the plans that are about the earliest, the finest level, and the fewest chunks to compute at it."""
    level = int((times.min(axis=1) <= times.min() * (1 + SAME)).argmax())
    return level, int((times[level] <= times[level].min() * (1 + NEARLY)).argmax())


def _earliest(work: Work, link: Link, todo: NDArray[np.int64], k: int, level: int, time: float) -> Decision:
    """Like ``_decision``; where all is to be computed, the idle link fetches the last chunk in case it is in time.

    It costs nothing that is scarce, and otherwise a link once taken for slow would never be measured again.
    """
    if 0 < k == len(todo):
        last = int(todo[-1])
        arrival = max(work.link_free, 0.0) + link.round_trip + float(work.sizes[level, last]) / link.rate
        if arrival < LONG_SHOT * time:
            return Decision(last, level, k - 1, time)
    return _decision(work, todo, k, level, time)


def _decision(work: Work, todo: NDArray[np.int64], k: int, level: int, time: float) -> Decision:
    if k < len(todo):
        return Decision(int(todo[k]), level, k, time)
    return Decision(None, None, k, time)


class CacheGenRule:
    """The streamer of the CacheGen paper (section 5.3), with the last transfer's rate as the estimate.

    If recomputing the rest from text meets the target, the next chunk is text; else the finest level at which all
    remaining chunks meet it; else the coarsest. Chunks are fetched in order; without a target the default level.

    reserve : share of the target that is left unused; the paper's rule has none.
    """

    def __init__(self, reserve: float = 0.0) -> None:
        self.reserve = reserve

    def decide(self, work: Work, link: Link, target: float | None = None, elapsed: float = 0.0) -> Decision:
        todo = np.flatnonzero(~work.fetched)
        if target is not None:
            target -= self.reserve * (target + elapsed)
        if not len(todo):
            return Decision(None, None, 0, work.model_free + work.tail)
        text = max(work.model_free, 0.0) + float(work.text[todo].sum()) + work.tail
        if target is not None and text <= target:
            return Decision(None, None, len(todo), text)
        times = max(work.link_free, 0.0) + work.sizes[:, todo].sum(axis=1) / link.rate
        level = work.default
        if target is not None:
            fits = times + work.tail <= target
            level = int(np.argmax(fits)) if fits.any() else len(times) - 1
        return Decision(int(todo[0]), level, 0, float(times[level]))


class FixedLevel:
    """All chunks at one level, in order; ``None`` computes everything."""

    def __init__(self, level: int | None) -> None:
        self.level = level

    def decide(self, work: Work, link: Link, target: float | None = None, elapsed: float = 0.0) -> Decision:
        todo = np.flatnonzero(~work.fetched)
        if self.level is None or not len(todo):
            return Decision(None, None, len(todo), math.inf)
        return Decision(int(todo[0]), self.level, 0, math.inf)
