"""The shadow check: a sampled fraction of spliced requests is computed in full afterwards, and the two are compared.

It runs when the model is idle, never before an answer: a request that comes interrupts it. What a gate measured once,
on questions of its own, this measures on the application's.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.trial import compare

ANSWER_TOKENS = 16
"""Tokens of the answer on which the two are compared, from its first."""


@dataclass(frozen=True)
class ShadowCheck:
    """One request, spliced against computed in full.

    kl : KL(full || spliced) of the next token in nats, the mean over the answer's first tokens.
    top1 : of these, the share whose most likely token is the same. tokens : how many they are.
    """

    model: str
    kl: float
    top1: float
    tokens: int


class Shadow:
    """Draws the requests that are checked, and sums up what was found. Thread-safe.

    fraction : of the spliced requests, 0 to 1.
    """

    def __init__(self, fraction: float, *, seed: int | None = None) -> None:
        self._fraction = fraction
        self._random = random.Random(seed)
        self._lock = threading.RLock()  # a collected stream ends at any allocation
        self._drawn = self._checked = self._tokens = 0
        self._kl = self._same = 0.0

    def draw(self) -> str | None:
        """A name for the check of this request; None if it is not to be checked."""
        if not self._fraction:
            return None
        with self._lock:
            if self._random.random() >= self._fraction:
                return None
            self._drawn += 1
            return f"shadow {self._drawn}"

    def check(self, model: str, full: NDArray[np.float32], spliced: NDArray[np.float32]) -> ShadowCheck:
        """Compare logits ``[tokens, vocabulary]`` of the two and count what comes out."""
        kl, same = compare(full, spliced)
        check = ShadowCheck(model, float(kl.mean()), float(same.mean()), len(kl))
        with self._lock:
            self._checked += 1
            self._tokens += check.tokens
            self._kl += float(kl.sum())
            self._same += float(same.sum())
        return check

    @property
    def figures(self) -> dict[str, Any]:
        """For the cache's statistics: checks, and per token the mean KL and the share of the same first choice."""
        with self._lock:
            return {
                "shadow_checks": self._checked,
                "shadow_kl": self._kl / self._tokens if self._tokens else None,
                "shadow_top1": self._same / self._tokens if self._tokens else None,
            }
