"""Estimates of a link's throughput. Pure: transfers observed in, bytes per second out.

Every estimator works on the time a byte takes rather than on bytes per second: what a plan needs to know is how long
the remaining bytes will take, and the mean of times is the harmonic mean of rates (Jiang et al., FESTIVE, 2012). Round
trips are kept apart, in :class:`RoundTrip`: they cost the same whatever a chunk's size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

DEFAULT_RATE = 12.5e6
"""Bytes per second assumed of a store that was never measured: 100 Mbit/s."""

MIN_BYTES = 1024
"""Shorter transfers say more about round trips than about throughput and are not counted."""


class Estimator(Protocol):
    """Predicts the rate of the bytes to come from the transfers seen so far."""

    def observe(self, size: float, seconds: float) -> None:
        """A transfer of ``size`` bytes took ``seconds``, round trips not counted."""

    def rate(self) -> float:
        """Bytes per second expected of the next transfers."""


class LastValue:
    """The rate of the last transfer: what CacheGen's streamer assumes."""

    def __init__(self, prior: float = DEFAULT_RATE) -> None:
        self._rate = prior

    def observe(self, size: float, seconds: float) -> None:
        if size >= MIN_BYTES and seconds > 0:
            self._rate = size / seconds

    def rate(self) -> float:
        return self._rate


class HarmonicMean:
    """Harmonic mean of the last ``window`` transfers' rates, the prior counted as one of them until it drops out.

    ``window=None`` keeps all.
    """

    def __init__(self, prior: float = DEFAULT_RATE, window: int | None = 5) -> None:
        self._times: deque[float] = deque([1.0 / prior], window)
        self._primed = True

    def observe(self, size: float, seconds: float) -> None:
        if size >= MIN_BYTES and seconds > 0:
            if self._primed:  # one real transfer says more than what was remembered
                self._times.clear()
                self._primed = False
            self._times.append(seconds / size)

    def rate(self) -> float:
        return len(self._times) / math.fsum(self._times)


class Ewma:
    """Exponentially weighted mean of the time a byte takes; ``gain`` is the weight of the newest transfer."""

    def __init__(self, prior: float = DEFAULT_RATE, gain: float = 0.3) -> None:
        self._time, self._gain, self._count = 1.0 / prior, gain, 0

    def observe(self, size: float, seconds: float) -> None:
        if size >= MIN_BYTES and seconds > 0:
            self._count += 1
            gain = max(self._gain, 1.0 / self._count)  # a plain mean at first, so that the prior does not linger
            self._time += gain * (seconds / size - self._time)

    def rate(self) -> float:
        return 1.0 / self._time


class Experts:
    """Several estimators, weighted by how well each predicted the recent transfers (Hedge; Freund, Schapire 1997).

    A link whose rate jumps and stays favours the short memories, one that flickers around a mean the long ones; which
    it is shows after a few transfers. Predictions are combined on the time scale. ``error()`` is the relative spread of
    the recent prediction errors, for safety margins.
    """

    def __init__(self, prior: float = DEFAULT_RATE, *, sharpness: float = 4.0, memory: float = 0.9) -> None:
        self._experts: Sequence[Estimator] = (
            LastValue(prior),
            HarmonicMean(prior, 3),
            Ewma(prior, 0.3),
            Ewma(prior, 0.1),
            HarmonicMean(prior, None),
        )
        self._losses = [0.0] * len(self._experts)
        self._sharpness, self._memory = sharpness, memory
        self._errors: deque[float] = deque(maxlen=16)
        self.count = 0

    def observe(self, size: float, seconds: float) -> None:
        if size < MIN_BYTES or seconds <= 0:
            return
        time = seconds / size
        if self.count:  # how well the prior fits is no expert's merit
            self._errors.append(math.log(time * self.rate()))
            for i, expert in enumerate(self._experts):
                error = min(abs(math.log(time * expert.rate())), 2.0)
                self._losses[i] = self._memory * self._losses[i] + error
        self.count += 1
        for expert in self._experts:
            expert.observe(size, seconds)

    def rate(self) -> float:
        best = min(self._losses)
        weights = [math.exp(-self._sharpness * (loss - best)) for loss in self._losses]
        times = (w / e.rate() for w, e in zip(weights, self._experts, strict=True))
        return math.fsum(weights) / math.fsum(times)

    def error(self) -> float:
        """Root mean square of the recent log errors (0.3: off by about 30 %); 0.5 before anything was seen."""
        # Two pseudo-observations: a few lucky predictions are no licence to cut it fine.
        squares = math.fsum(e * e for e in self._errors) + 2 * 0.25
        return math.sqrt(squares / (len(self._errors) + 2))


class RoundTrip:
    """Time from sending a request to the head of its answer: a slowly rising minimum, so that queueing is left out."""

    def __init__(self, prior: float = 0.02) -> None:
        self._value, self._seen = prior, False

    def observe(self, seconds: float) -> None:
        """One request's head arrived after ``seconds``."""
        if not self._seen or seconds < self._value:
            self._value, self._seen = seconds, True
        else:
            self._value += 0.1 * (seconds - self._value)

    def seconds(self) -> float:
        """The round trip expected of the next request."""
        return self._value


class Meter:
    """Turns the arrival of bytes into observations of an estimator, for all transfers of a link together.

    A sample ends after ``QUANTUM`` bytes and ``SAMPLE_SECONDS``, whichever is later; time during which nothing was
    asked for does not count. Times are ``time.monotonic()`` or any other clock that does not go back.
    """

    QUANTUM = 32 << 10
    SAMPLE_SECONDS = 0.03

    def __init__(self, estimator: Experts) -> None:
        self.estimator = estimator
        self.round_trip = RoundTrip()
        self._busy = 0  # transfers whose body is arriving
        self._bytes = 0
        self._since = 0.0

    def began(self, now: float, waited: float | None = None) -> None:
        """A body begins to arrive, ``waited`` seconds after it was asked for on an idle link."""
        if waited is not None:
            self.round_trip.observe(waited)
        if self._busy == 0:
            self._bytes, self._since = 0, now
        self._busy += 1

    def arrived(self, now: float, size: int) -> None:
        """``size`` bytes came in."""
        self._bytes += size
        if self._bytes >= self.QUANTUM and now - self._since >= self.SAMPLE_SECONDS:
            self._sample(now)

    def ended(self, now: float) -> None:
        """A body has arrived, or its transfer was given up."""
        self._busy = max(0, self._busy - 1)
        if self._busy == 0 and self._bytes >= self.QUANTUM:
            self._sample(now)

    def rate(self, now: float) -> float:
        """Bytes per second expected; less than the estimator's if the sample under way is overdue."""
        rate = self.estimator.rate()
        if self._busy and now > self._since:
            overdue = (self._bytes + self.QUANTUM) / (now - self._since)
            return min(rate, overdue) if overdue < rate / 2 else rate
        return rate

    def _sample(self, now: float) -> None:
        self.estimator.observe(self._bytes, max(now - self._since, 1e-6))
        self._bytes, self._since = 0, now
