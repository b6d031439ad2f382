"""What things cost on this machine: measured as requests run, kept in a small file, used to decide what pays.

A cache is only worth using where fetching and decoding a chunk is faster than computing it. Both depend on the
machine, the model and the link, so both are measured: prefill as ``a + b * tokens + c * tokens * position`` seconds a
call, decode and splice as seconds a token, each link as its rate and round trip.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from cachegen_rag.streaming.bandwidth import DEFAULT_RATE

SAMPLES = 48
"""Prefill samples kept for each model, at most half of them of less than SHORT tokens; old ones make room."""
SHORT = 64
MAX_FILE_BYTES = 1 << 18
MAX_ENTRIES = 64
"""Models, codecs and links remembered; beyond it nothing new is."""
_GAIN = 0.3


class TextCost:
    """Seconds of a prefill call, fitted to the last samples; ``guess`` tokens a second until there are any."""

    def __init__(self, samples: list[tuple[float, float, float]] | None = None, guess: float = 200.0) -> None:
        self.samples: deque[tuple[float, float, float]] = deque(samples or (), SAMPLES)
        self._guess = guess
        self._fit: tuple[float, float, float] | None = None

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self.samples)

    def record(self, tokens: int, position: int, seconds: float) -> None:
        """A call computed ``tokens`` behind ``position`` others in ``seconds``."""
        if tokens < 1 or not 0 < seconds < 3600:
            return
        # Engines may put small calls off, and then they seem to cost nothing: not taken for a measurement.
        if tokens < SHORT and (not self.samples or seconds < self.seconds(tokens, position) / 8):
            return
        short = [sample for sample in self.samples if sample[0] < SHORT]
        if tokens < SHORT and len(short) >= SAMPLES // 2:  # every spliced request adds some
            self.samples.remove(short[0])
        self.samples.append((float(tokens), float(position), seconds))
        self._fit = None

    def seconds(self, tokens: float, position: float) -> float:
        """Expected seconds of one call."""
        if tokens <= 0:
            return 0.0
        if not self.samples:
            return tokens / self._guess
        if self._fit is None:
            self._fit = _fit(self.samples)
        call, each, pair = self._fit
        return call + tokens * (each + pair * (position + tokens / 2))


def _fit(samples: deque[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Non-negative least squares of the relative errors, by dropping what comes out negative."""
    data = np.array(samples)
    tokens, position, seconds = data.T
    columns = np.stack([np.ones_like(tokens), tokens, tokens * (position + tokens / 2)], axis=1) / seconds[:, None]
    active = [0, 1, 2] if len(samples) >= 6 else [1]
    while True:
        solution = np.linalg.lstsq(columns[:, active], np.ones(len(data)), rcond=None)[0]
        if (solution >= 0).all() or len(active) == 1:
            break
        active.pop(int(solution.argmin()))
    out = [0.0, 0.0, 0.0]
    for i, value in zip(active, solution, strict=True):
        out[i] = max(float(value), 0.0)
    if out[1] == 0.0 and out[2] == 0.0:
        out = [0.0, float(np.median(seconds / tokens)), 0.0]
    return out[0], out[1], out[2]


class Costs:
    """Measured costs, shared by everything in the process that uses one file. Thread-safe.

    ``path=None`` keeps them in memory only. A file that cannot be read or written, or holds nonsense, is ignored: the
    costs are then measured anew.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.Lock()
        self._text: dict[str, TextCost] = {}
        self._means: dict[str, float] = {}
        self._warm: set[str] = set()
        self._links: dict[str, tuple[float, float]] = {}
        self._load()

    def text(self, model: str) -> TextCost:
        """The prefill cost of ``model`` (any name that tells engines, files and thread counts apart)."""
        with self._lock:
            if model not in self._text and len(self._text) >= MAX_ENTRIES:
                return TextCost()
            return self._text.setdefault(model, TextCost())

    def mean(self, name: str, default: float) -> float:
        """The running mean recorded under ``name``."""
        return self._means.get(name, default)

    def record(self, name: str, value: float) -> None:
        """Count ``value`` into the running mean of ``name``; not the first of a process, which warms things up."""
        if not 0 <= value < 1e6:
            return
        with self._lock:
            if name not in self._warm:
                self._warm.add(name)
            elif name in self._means:
                self._means[name] += _GAIN * (value - self._means[name])
            elif len(self._means) < 4 * MAX_ENTRIES:
                self._means[name] = value

    def doubt(self, name: str) -> None:
        """Trust the mean of ``name`` a little less: it keeps something from being tried that would renew it."""
        with self._lock:
            if name in self._means:
                self._means[name] *= 0.97

    def link(self, url: str) -> tuple[float, float]:
        """Rate (bytes a second) and round trip (seconds) last measured of a store."""
        return self._links.get(url, (DEFAULT_RATE, 0.02))

    def record_link(self, url: str, rate: float, round_trip: float) -> None:
        """Remember what a store's link did, for the first chunk of the next session."""
        if 1 <= rate < 1e12 and 0 <= round_trip < 60:
            with self._lock:
                if url in self._links or len(self._links) < MAX_ENTRIES:
                    self._links[url] = (rate, round_trip)

    def save(self) -> None:
        """Write the file, whole or not at all. Best effort."""
        if self.path is None:
            return
        with self._lock:
            data = {
                "version": 1,
                "text": {name: list(cost.samples) for name, cost in self._text.items() if cost.known},
                "means": dict(self._means),
                "links": {url: list(link) for url, link in self._links.items()},
            }
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(data, file)
            os.replace(draft, self.path)

    def _load(self) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            data = json.loads(text) if len(text) <= MAX_FILE_BYTES else {}
            if data.get("version") != 1:
                return
            for name, samples in list(data["text"].items())[:MAX_ENTRIES]:
                rows = [(_number(n), _number(p), _number(s)) for n, p, s in samples[-SAMPLES:]]
                self._text[name] = TextCost([row for row in rows if row[0] >= 1 and row[2] > 0])
            self._means = {n: _number(v) for n, v in list(data["means"].items())[: 4 * MAX_ENTRIES]}
            links = {u: (_number(r), _number(t)) for u, (r, t) in list(data["links"].items())[:MAX_ENTRIES]}
            self._links = {url: link for url, link in links.items() if link[0] >= 1}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._text, self._means, self._links = {}, {}, {}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError("not a cost")
    return float(value)
