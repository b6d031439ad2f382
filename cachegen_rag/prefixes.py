"""Which leading combinations of a prompt are worth storing as exact prefixes. Pure: counts in, keys out.

Leading runs form a tree: prefix; prefix + A; prefix + A + B. KV is causal, so a stored run holds every run it begins
with, and storing a node costs only the rows it adds to its parent. A request through a node saves exactly those rows,
so gain per byte is the node's frequency, whatever its size; no node is more frequent than its parent. The best set
under a byte budget is therefore the most frequent nodes whose rows still fit: a greedy choice is closed upwards and
optimal up to the last node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cachegen_rag.errors import ConfigError
from cachegen_rag.prompt import Prompt
from cachegen_rag.splice import leading_runs


def run_key(prompt: Prompt, segments: int) -> str:
    """The key of the first ``segments`` segments: SHA-256 of their joint token ids (64 hex digits)."""
    ids = np.asarray(prompt.token_ids[: prompt.offsets[segments]], dtype="<i4")
    return hashlib.sha256(b"cachegen-rag run 1" + ids.tobytes()).hexdigest()


@dataclass
class _Node:
    parent: str | None
    rows: int  # tokens this run adds to its parent
    count: float = 0.0
    seen: int = 0  # the request it was counted at last


class PrefixLearner:
    """Counts leading runs and says which to store.

    budget_bytes : bytes that stored runs may take together.
    bytes_per_token : stored bytes of one token of KV (at the level that runs are stored at).
    min_count : a run is stored from this (decayed) count on: the first request never is.
    half_life : requests after which a count weighs half.
    max_nodes : runs remembered at a time; the least frequent are forgotten first.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    def __init__(
        self,
        budget_bytes: int,
        bytes_per_token: float,
        *,
        min_count: float = 2.0,
        half_life: int = 500,
        max_nodes: int = 4096,
    ) -> None:
        if budget_bytes < 0 or bytes_per_token <= 0 or half_life < 1 or max_nodes < 1:
            raise ConfigError(
                f"prefix learning needs budget_bytes >= 0, bytes_per_token > 0, half_life >= 1 and max_nodes >= 1; "
                f"got {budget_bytes}, {bytes_per_token}, {half_life}, {max_nodes}"
            )
        self._budget, self._per_token, self._min_count = budget_bytes, bytes_per_token, min_count
        self._decay, self._max_nodes = 0.5 ** (1.0 / half_life), max_nodes
        self._nodes: dict[str, _Node] = {}
        self._requests = 0

    def observe(self, prompt: Prompt) -> None:
        """Count every leading run of a request."""
        self._requests += 1
        parent: str | None = None
        before = 0
        for segments in reversed(leading_runs(prompt)):
            tokens = prompt.offsets[segments]
            if tokens == before:  # an empty document adds nothing
                continue
            key = run_key(prompt, segments)
            node = self._nodes.setdefault(key, _Node(parent, tokens - before))
            node.count = self._now(node) + 1.0
            node.seen = self._requests
            parent, before = key, tokens
        if len(self._nodes) > self._max_nodes:
            self._forget()

    def wanted(self) -> dict[str, int]:
        """Keys of the runs worth storing and the rows each adds to its parent, most frequent first.

        With every run its parents are in it, and the bytes of all together are within the budget.
        """
        room = self._budget / self._per_token
        chosen: dict[str, int] = {}
        for key, node in self._ranked():
            if self._now(node) < self._min_count:
                break
            if node.rows > room or (node.parent is not None and node.parent not in chosen):
                continue
            chosen[key] = node.rows
            room -= node.rows
        return chosen

    def admit(self, prompt: Prompt) -> int:
        """The number of leading segments of this prompt whose joint KV is worth storing now (0: none)."""
        wanted = self.wanted()
        return next((n for n in leading_runs(prompt) if run_key(prompt, n) in wanted), 0)

    def evict(self, stored: Iterable[str]) -> list[str]:
        """The keys among ``stored`` that are no longer worth their bytes."""
        wanted = self.wanted()
        return [key for key in stored if key not in wanted]

    def _now(self, node: _Node) -> float:
        return float(node.count * self._decay ** (self._requests - node.seen))

    def _ranked(self) -> list[tuple[str, _Node]]:
        # Parents were inserted before their children and sorting is stable: equal counts keep that order.
        return sorted(self._nodes.items(), key=lambda item: -self._now(item[1]))

    def _forget(self) -> None:
        self._nodes = dict(self._ranked()[: self._max_nodes * 3 // 4])
