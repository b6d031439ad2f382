"""A request over a simulated link: what a policy decides, what then happens, and what would have been best.

``simulate`` plays a policy against a bandwidth trace it cannot see ahead; ``optimum`` knows the trace and finds the
best plan by dynamic programming over the same choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cachegen_rag.streaming.bandwidth import Experts, LastValue, Meter
from cachegen_rag.streaming.policy import MISSING, CacheGenRule, FixedLevel, Link, Policy, Work

PATIENCE = 1.2
"""The model computes a slice instead of waiting for a chunk that is expected later than this many slices."""


class Trace:
    """Bandwidth over time: ``rates`` in bytes per second, each for ``step`` seconds, repeated for ever."""

    def __init__(self, rates: list[float], step: float) -> None:
        self.rates, self.step = [max(float(r), 1.0) for r in rates], step
        self._edges = np.concatenate([[0.0], np.cumsum(np.array(self.rates) * step)])

    def bytes_at(self, time: float) -> float:
        """Bytes that pass from 0 to ``time``."""
        period = self.step * len(self.rates)
        laps, rest = divmod(max(time, 0.0), period)
        i = min(int(rest / self.step), len(self.rates) - 1)
        return float(laps * self._edges[-1] + self._edges[i] + self.rates[i] * (rest - i * self.step))

    def time_of(self, size: float) -> float:
        """When ``size`` bytes have passed since 0."""
        laps, rest = divmod(size, float(self._edges[-1]))
        i = int(np.searchsorted(self._edges, rest, side="right")) - 1
        i = min(i, len(self.rates) - 1)
        return laps * self.step * len(self.rates) + i * self.step + (rest - float(self._edges[i])) / self.rates[i]

    def arrival(self, start: float, size: float) -> float:
        """When ``size`` bytes sent from ``start`` on have arrived."""
        return self.time_of(self.bytes_at(start) + size)


@dataclass
class Outcome:
    """Time to first token, summed loss, and per chunk its level (None: computed)."""

    ttft: float
    loss: float
    levels: list[int | None] = field(default_factory=list)
    fetched_bytes: float = 0.0


class _Request:
    """The state of one simulated request."""

    def __init__(
        self, work: Work, trace: Trace, policy: Policy, meter: Meter, target: float | None, rtt: float
    ) -> None:
        n = len(work.text)
        self.work, self.trace, self.policy, self.meter = work, trace, policy, meter
        self.target, self.rtt = target, rtt
        self.fills = not isinstance(policy, CacheGenRule | FixedLevel)
        self.level: list[int | None] = [None] * n
        self.ready = np.full(n, math.inf)  # true times
        self.computed = np.zeros(n)  # shares
        self.at = 0  # the chunk the model is at
        self.model, self.link = work.model_free, rtt
        self.flight: tuple[int, float, float, float] | None = None  # chunk, start, end, bytes
        self.compute = 0
        self.bytes = 0.0
        self.seen, self.link_mark = 0.0, 0.0

    def observe(self, now: float) -> None:
        """What the client has seen of the transfer under way until ``now``."""
        if self.flight is None:
            return
        _, start, end, size = self.flight
        base = self.trace.bytes_at(start)
        while True:
            edge = min(end, now, self.trace.time_of(base + min(self.seen + Meter.QUANTUM, size)))
            edge = max(edge, min(self.link_mark + Meter.SAMPLE_SECONDS, end, now))
            got = min(self.trace.bytes_at(edge) - base, size)
            if edge >= min(end, now) and edge < end:
                self.meter.arrived(edge, int(got - self.seen))
                self.seen = got
                return
            self.meter.arrived(edge, int(got - self.seen))
            self.seen, self.link_mark = got, edge
            if edge >= end:
                self.meter.ended(end)
                self.flight = None
                return

    def rest(self, now: float) -> Work:
        """The work from the chunk the model is at, as the client estimates it."""
        a, rate = self.at, self.meter.rate(now)
        fetched = np.array([level is not None for level in self.level[a:]])
        ready = np.where(np.isfinite(self.ready[a:]), self.ready[a:] - now, 0.0)
        if self.flight is not None:
            i = self.flight[0]
            ready[i - a] = (self.flight[3] - self.seen) / rate + self.work.decode[self.level[i] or 0, i]
        text = self.work.text[a:] * (1 - self.computed[a:])
        cut = {name: getattr(self.work, name)[:, a:] for name in ("sizes", "losses", "decode")}
        free = (self.flight[3] - self.seen) / rate if self.flight is not None else 0.0
        return Work(
            **cut, text=text, splice=self.work.splice[a:], tail=self.work.tail, default=self.work.default,
            fetched=fetched, ready=np.maximum(ready, 0.0), model_free=self.model - now, link_free=free,
        )  # fmt: skip

    def decide(self, now: float) -> None:
        """The link is free: start the next transfer."""
        estimate = Link(self.meter.rate(now), 0.0, self.meter.estimator.error())
        target = None if self.target is None else self.target - now
        decision = self.policy.decide(self.rest(now), estimate, target, now)
        self.compute = decision.compute
        if decision.fetch is None:
            self.link = math.inf  # until the model has got on
            return
        i, level = self.at + decision.fetch, decision.level or 0
        size = float(self.work.sizes[level, i])
        end = self.trace.arrival(now, size)
        self.level[i], self.ready[i] = level, end + self.work.decode[level, i]
        self.flight, self.link = (i, now, end, size), end
        self.bytes += size
        self.seen, self.link_mark = 0.0, now
        self.meter.began(now)

    def advance(self, now: float, slice_seconds: float) -> None:
        """The model is free: splice, compute a slice, or wait."""
        i = self.at
        if self.ready[i] <= now:
            self.model, self.at = now + self.work.splice[i], i + 1
            self.replan(now)
            return
        piece = min(slice_seconds, self.work.text[i] * (1 - self.computed[i]))
        if self.level[i] is None:
            wait = math.inf if self.compute else (self.link - now if math.isfinite(self.link) else math.inf)
        else:
            flying = self.flight is not None and self.flight[0] == i
            left = (self.flight[3] - self.seen) / self.meter.rate(now) if flying and self.flight else 0.0
            wait = left + self.work.decode[self.level[i] or 0, i] if flying else self.ready[i] - now
        if (self.level[i] is None and self.compute) or (self.fills and wait > PATIENCE * piece):
            self.model = now + piece
            self.computed[i] += piece / self.work.text[i]
            if self.computed[i] > 1 - 1e-9:
                self.at = i + 1
                if self.level[i] is not None:
                    self.level[i] = None
                    if self.flight is not None and self.flight[0] == i:
                        self.meter.ended(self.model)
                        self.flight, self.link = None, self.model
            self.replan(now)
            return
        events = [t for t in (self.ready[i], self.link) if now < t < math.inf]
        self.model = min([*events, now + max(1.5 * wait, 0.01)] if events and self.fills else events or [now + 0.01])

    def replan(self, now: float) -> None:
        if math.isinf(self.link) and self.at < len(self.level):
            self.link = self.model


def simulate(
    work: Work, trace: Trace, policy: Policy, *, target: float | None = None, prior: float = 12.5e6,
    rtt: float = 0.0, slice_seconds: float = 0.1, meter: Meter | None = None,
) -> Outcome:  # fmt: skip
    """Play ``policy`` through a request. ``prior`` is the rate assumed before anything arrives."""
    if meter is None:
        meter = Meter(Experts(prior))
        if isinstance(policy, CacheGenRule):
            meter.estimator = _ChunkRate(prior)  # type: ignore[assignment]
    state = _Request(work, trace, policy, meter, target, rtt)
    while state.at < len(work.text):
        if state.link <= state.model:
            now = state.link
            state.observe(now)
            state.decide(now)
        else:
            state.observe(state.model)
            state.advance(state.model, slice_seconds)
    levels = state.level
    loss = sum(float(work.losses[v, i]) * (1 - state.computed[i]) for i, v in enumerate(levels) if v is not None)
    return Outcome(float(state.model + work.tail), loss, levels, state.bytes)


class _ChunkRate(LastValue):
    """The last sample, in the shape that Meter wants."""

    def error(self) -> float:
        return 0.0


def optimum(work: Work, trace: Trace, *, target: float | None = None, rtt: float = 0.0, grid: int = 400) -> Outcome:
    """The best plan with the trace known. Without a target: the earliest first token at the default level.

    With one: the least loss among the plans that meet it; if none does, the earliest first token at any level.
    Choices are made chunk by chunk in prompt order; fetching in that order is optimal, since the model needs the
    chunks in that order. Without a target the dynamic program is exact for chunks of equal size; with one, bytes are
    rounded to a grid.
    """
    if target is None:
        return _earliest(work, trace, [work.default], rtt)
    best = _least_loss(work, trace, target, rtt, grid)
    return best if best is not None else _earliest(work, trace, list(range(len(work.sizes))), rtt)


def _earliest(work: Work, trace: Trace, levels: list[int], rtt: float) -> Outcome:
    best = Outcome(math.inf, math.inf)
    for level in levels:  # mixed levels cannot be earlier than the smallest one
        states = {0.0: work.model_free}
        for i in range(len(work.text)):
            reached: dict[float, float] = {}
            for sent, model in states.items():
                computed = model + work.text[i]
                reached[sent] = min(reached.get(sent, math.inf), computed)
                more = sent + float(work.sizes[level, i])
                arrived = trace.arrival(rtt, more) + work.decode[level, i]
                reached[more] = min(reached.get(more, math.inf), max(model, arrived) + work.splice[i])
            states = _pareto(reached)
        for model in states.values():
            if model + work.tail < best.ttft:
                best = Outcome(float(model + work.tail), 0.0)
    return best


def _pareto(states: dict[float, float]) -> dict[float, float]:
    """Those with neither fewer bytes nor an earlier end among the others."""
    kept, earliest = {}, math.inf
    for sent in sorted(states):
        if states[sent] < earliest - 1e-12:
            kept[sent] = earliest = states[sent]
    return kept


def _least_loss(work: Work, trace: Trace, target: float, rtt: float, grid: int) -> Outcome | None:
    """Least loss within ``target``, over (bytes sent, model's time) on a grid, rounded down: an optimistic bound."""
    n, due = len(work.text), target - work.tail
    total = float(np.where(work.sizes < MISSING, work.sizes, 0.0).max(axis=0).sum())
    byte_step, time_step = max(total / grid, 1.0), due / grid
    if due <= 0:
        return None
    arrival = np.array([trace.arrival(rtt, b * byte_step) for b in range(grid + 1)])
    arrival[0] = 0.0
    cost = np.full((grid + 1, grid + 1), math.inf)  # [bytes, time]
    start = int(work.model_free / time_step)
    if start > grid:
        return None
    cost[0, start] = 0.0
    carry_b = np.zeros(len(work.sizes))
    for i in range(n):
        new = np.full_like(cost, math.inf)
        shift = int(work.text[i] / time_step)
        if shift <= grid:
            new[:, shift:] = cost[:, : grid + 1 - shift]
        for level in range(len(work.sizes)):
            if work.sizes[level, i] >= MISSING:
                continue
            carry_b[level] += work.sizes[level, i] / byte_step
            steps = int(carry_b[level])
            carry_b[level] -= steps
            splice = int(work.splice[i] / time_step)
            for b in range(grid + 1 - steps):
                row = cost[b]
                earliest = int(max(arrival[b + steps] + work.decode[level, i], 0.0) / time_step)
                if earliest + splice > grid or not np.isfinite(row).any():
                    continue
                moved = np.full(grid + 1, math.inf)
                moved[earliest:] = row[earliest:]
                moved[earliest] = row[: earliest + 1].min()
                target_row = new[b + steps]
                np.minimum(
                    target_row[splice:], moved[: grid + 1 - splice] + work.losses[level, i], out=target_row[splice:]
                )
        cost = new
    best = float(cost.min())
    return Outcome(target, best) if math.isfinite(best) else None
