"""Which tokens of spliced documents are computed anew: one interface, several methods, under one budget.

A method sees a :class:`Scene` (the prompt, which documents are spliced, how many tokens may be recomputed) and returns
ranges of rows per document. Those that look at the question first let the engine run it over the spliced KV once
(:func:`look`), and score document tokens by the attention they get.

Sources: heads of documents are EPIC (Hu et al., 2024); deviation at layer 1 is CacheBlend (Yao et al., 2024);
scoring by the question's attention with all documents at their global positions is the InfoFlow / ProphetKV family
(2025). Counting only the layers in which spliced KV hurts, squaring the attention, choosing runs and computing them
in a few calls are ours, measured by ``cachegen-rag bench splice``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import Attended, Session
from cachegen_rag.prompt import Prompt
from cachegen_rag.splice import Plan, Range

BAND = (0.45, 0.87)
"""The layers whose attention counts, as fractions of the depth: spliced KV hurts there (measured layer by layer)."""

RUN_COST = 4.0
"""What one more run costs in choosing, in tokens: a long run sees its own new rows, short ones not those of others."""

BLOCK = 32
"""Keys that are multiplied at once: so few that BLAS starts no threads, which on busy cores wait for one another."""

CALLS = 3
"""Engine calls in which a prompt's runs are recomputed: each reads all weights once."""


@dataclass(frozen=True)
class Scene:
    """What a method chooses from.

    spliced : indices of the documents whose stored KV is used.
    budget : document tokens that may be recomputed.
    scores : float ``[tokens of the prompt]``, the weight of each token for this question; None if nobody looked.
    deviation : float ``[tokens of the prompt]``, how far the stored KV of each token is from the KV computed in place,
        where that is known (CacheBlend); None otherwise.
    """

    prompt: Prompt
    spliced: tuple[int, ...]
    budget: int
    scores: NDArray[np.float32] | None = None
    deviation: NDArray[np.float32] | None = None


class Method(Protocol):
    """A way to choose. ``looks``: needs :attr:`Scene.scores`, so the question is run over the spliced KV first."""

    @property
    def name(self) -> str: ...

    @property
    def looks(self) -> bool: ...

    def choose(self, scene: Scene) -> dict[int, list[Range]]:
        """Ranges of rows per document, no more than ``scene.budget`` tokens together."""


@dataclass(frozen=True)
class Nothing:
    """Recompute nothing."""

    name: str = "none"
    looks: bool = False

    def choose(self, scene: Scene) -> dict[int, list[Range]]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Heads:
    """The first tokens of every document, ``tokens`` each at most; None: as many as the budget gives each."""

    tokens: int | None = None
    name: str = "heads"
    looks: bool = False

    def choose(self, scene: Scene) -> dict[int, list[Range]]:
        """Equal heads."""
        if not scene.spliced:
            return {}
        each = scene.budget // len(scene.spliced)
        each = each if self.tokens is None else min(self.tokens, each)
        return {i: [(0, min(each, len(scene.prompt.segments[i])))] for i in scene.spliced} if each else {}


@dataclass(frozen=True)
class Deviation:
    """The tokens whose KV deviates most. ``run_cost`` as in :func:`best_runs`."""

    run_cost: float = 0.0
    name: str = "deviation"
    looks: bool = False

    def choose(self, scene: Scene) -> dict[int, list[Range]]:
        """The largest deviations."""
        if scene.budget <= 0:
            return {}
        if scene.deviation is None:
            raise ConfigError("recompute by deviation needs each token's deviation, which this engine does not give")
        return _by_score(scene, scene.deviation, scene.budget, self.run_cost, {})


@dataclass(frozen=True)
class QueryAware:
    """The tokens the question attends to most, behind ``heads`` tokens of every document (0: by attention alone)."""

    heads: int = 0
    run_cost: float = RUN_COST
    name: str = "query"
    looks: bool = True

    def choose(self, scene: Scene) -> dict[int, list[Range]]:
        """Heads first, then the best runs that the rest of the budget buys."""
        if scene.budget <= 0:
            return {}
        if scene.scores is None:
            raise ConfigError("query-aware recompute needs scores: look at the question first")
        first = Heads(self.heads).choose(scene) if self.heads else {}
        left = scene.budget - sum(b - a for ranges in first.values() for a, b in ranges)
        return _by_score(scene, scene.scores, left, self.run_cost, first)


METHODS: Mapping[str, Callable[[], Method]] = {
    "none": Nothing,
    "heads": Heads,
    "deviation": Deviation,
    "query": QueryAware,
    "heads+query": lambda: QueryAware(heads=4, name="heads+query"),
}
"""All methods by name."""


def method(name: str) -> Method:
    """The method of this name. Raises ConfigError, which lists the names."""
    if name not in METHODS:
        raise ConfigError(f"recompute method {name!r} is unknown: choose one of {', '.join(METHODS)}")
    return METHODS[name]()


def _by_score(
    scene: Scene, scores: NDArray[np.float32], budget: int, run_cost: float, first: dict[int, list[Range]]
) -> dict[int, list[Range]]:
    """The best runs over the documents' rows, ``first`` being chosen (and paid for) already."""
    rows: list[tuple[int, int]] = []  # document, row
    weights: list[NDArray[np.float32]] = []
    for index in scene.spliced:
        offset, length = scene.prompt.offsets[index], len(scene.prompt.segments[index])
        start = max((b for _, b in first.get(index, ())), default=0)
        rows += [(index, row) for row in range(start, length)]
        weights.append(scores[offset + start : offset + length])
    out = {index: list(ranges) for index, ranges in first.items()}
    if budget <= 0 or not rows:
        return out
    breaks = [n for n in range(1, len(rows)) if rows[n][0] != rows[n - 1][0]]
    for a, b in best_runs(np.concatenate(weights), budget, run_cost, breaks):
        index, row = rows[a]
        out.setdefault(index, []).append((row, row + b - a))
    return out


def best_runs(
    scores: NDArray[np.float32], budget: int, run_cost: float = RUN_COST, breaks: Sequence[int] = ()
) -> list[Range]:
    """Runs of rows with the largest sum of scores, at most ``budget`` rows, every run costing ``run_cost`` more.

    For a price per row, the best set of runs (score - price x (rows + run_cost x runs)) is found exactly in one pass;
    the price is bisected until the rows fit the budget. ``run_cost=0`` gives the single best rows. No run crosses one
    of ``breaks``. Scores must be non-negative.
    """
    weights = np.maximum(np.nan_to_num(np.asarray(scores, dtype=np.float64)), 0.0)
    if budget <= 0 or not len(weights) or not weights.max() > 0:
        return []
    if budget >= len(weights):
        edges = [0, *(n for n in breaks if 0 < n < len(weights)), len(weights)]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    low, high = 0.0, float(weights.max()) * 1.001
    best: list[Range] = []
    for _ in range(24):
        price = (low + high) / 2
        runs = _runs_at(weights, price, price * run_cost, set(breaks))
        if sum(b - a for a, b in runs) <= budget:
            best, high = runs, price
        else:
            low = price
    return best


def _runs_at(weights: NDArray[np.float64], price: float, opening: float, breaks: Collection[int]) -> list[Range]:
    """Two states, in a run or not: the best way into each, row by row; then walked back."""
    gains = (weights - price).tolist()
    inside, outside = -np.inf, 0.0
    entered = [False] * len(gains)  # a run that holds row n best begins at n
    closed = [False] * len(gains)  # the best set that leaves out row n has a run that ends just before it
    for n, gain in enumerate(gains):
        begin = max(outside, inside) - opening  # a run may also begin right behind another one, at a break
        stay = -np.inf if n in breaks else inside
        entered[n] = begin > stay
        closed[n] = inside > outside
        inside, outside = max(begin, stay) + gain, max(outside, inside)
    runs: list[Range] = []
    n = len(gains)
    in_run = inside > outside
    stop = n
    while n > 0:
        n -= 1
        if in_run:
            if entered[n]:
                runs.append((n, stop))
                in_run = closed[n]  # what came before this run: out, or a run that ended here
                stop = n
        elif closed[n]:
            in_run, stop = True, n
    return runs[::-1]


def attention(seen: Attended) -> NDArray[np.float32]:
    """How much each key weighs: squared softmax attention, summed over queries, heads and layers. Float32 ``[rows]``.

    Causal by position; the queries are of the last positions.
    """
    layers, count, heads, dim = seen.queries.shape
    rows, kv_heads = seen.keys.shape[1:3]
    asked = count * (heads // kv_heads)
    order = np.argsort(seen.positions, kind="stable")
    after = np.triu(np.full((count, count), -np.inf, np.float32), 1)  # of one another the queries see the earlier ones
    queries = (seen.queries * np.float32(dim**-0.5)).reshape(layers, count, kv_heads, -1, dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(layers, kv_heads, asked, dim)
    padded = np.zeros((layers, kv_heads, -(-rows // BLOCK) * BLOCK, dim), np.float32)
    padded[:, :, :rows] = seen.keys[:, order].transpose(0, 2, 1, 3)
    blocks = padded.reshape(layers, kv_heads, -1, BLOCK, dim).swapaxes(3, 4)
    out = np.zeros(rows, dtype=np.float32)
    for layer, head in np.ndindex(layers, kv_heads):
        products = queries[layer, head] @ blocks[layer, head]  # [blocks, asked, BLOCK]
        weights = np.ascontiguousarray(products.swapaxes(0, 1).reshape(asked, -1)[:, :rows])
        weights.reshape(count, -1, rows)[:, :, rows - count :] += after[:, None]
        weights -= weights.max(axis=1, keepdims=True)
        np.maximum(weights, -40.0, out=weights)  # smaller ones become denormal numbers, which are slow
        np.exp(weights, out=weights)
        share = 1.0 / weights.sum(axis=1)
        np.square(weights, out=weights)
        out[order] += np.einsum("n,nk->k", np.square(share), weights)
    return out


def look(session: Session, prompt: Prompt, layers: int, band: tuple[float, float] = BAND) -> NDArray[np.float32]:
    """Run the question over the spliced KV and score every token of the prompt by the attention it gets.

    The session must hold the prompt up to the question (the last segment); it is left so. Of the model's ``layers``
    those in ``band`` are asked. Float32 ``[tokens]``.
    """
    start, stop = prompt.offsets[-2], prompt.offsets[-1]
    first = int(layers * band[0])
    asked = range(first, max(first + 1, int(np.ceil(layers * band[1]))))
    seen = session.attend(prompt.token_ids[start:stop], asked)
    session.truncate(start)
    scores = np.zeros(stop, dtype=np.float32)
    scores[seen.positions] = attention(seen)
    return scores


@dataclass(frozen=True)
class Recompute:
    """What is recomputed in a request: a method, and a budget.

    budget : a fraction of the spliced documents' tokens, or ``"auto"``: what the time to the first token leaves. A
        method that looks at the question recomputes nothing in a prompt with a single document: what splicing loses
        is what documents say to each other, and looking for it costs time.
    """

    method: Method = field(default_factory=Nothing)
    budget: float | Literal["auto"] = 0.0
    max_fraction: float = 0.3

    def __post_init__(self) -> None:
        if self.budget != "auto" and not 0.0 <= self.budget <= 1.0:
            raise ConfigError(f"recompute budget {self.budget} must be a fraction from 0 to 1, or 'auto'")

    def tokens(
        self, prompt: Prompt, steps: Plan, *, target_s: float | None = None, tokens_per_s: float | None = None
    ) -> int:
        """Document tokens that may be recomputed in ``steps``.

        ``auto`` spends what is left of ``target_s`` at ``tokens_per_s`` after everything else is decoded (twice the
        question for a method that looks at it), and ``max_fraction`` at most; without both numbers, 15 %.
        """
        if self.method.looks and len(prompt.documents) < 2:
            return 0
        spliced = sum(len(prompt.segments[i]) for i in steps.spliced)
        if self.budget != "auto":
            return int(self.budget * spliced)
        if target_s is None or not tokens_per_s:
            return int(0.15 * spliced)
        question = len(prompt.segments[-1]) if self.method.looks else 0
        left = int(target_s * tokens_per_s) - steps.decoded - question
        return max(0, min(left, int(self.max_fraction * spliced)))


def recompute_runs(session: Session, runs: Sequence[Range], calls: int = CALLS) -> int:
    """Compute runs of prompt positions anew, in about ``calls`` groups from front to back; how many groups they were.

    Within a group the runs may not see each other's new rows (see ``Session.recompute``); a later group sees those of
    the earlier ones. Measured, few groups lose little against one call a run, and cost a fraction of its time.
    """
    groups: list[list[Range]] = [[] for _ in range(calls)]
    total, at = sum(stop - start for start, stop in runs), 0.0
    for start, stop in runs:
        groups[min(calls - 1, int((at + (stop - start) / 2) * calls / total))].append((start, stop))
        at += stop - start
    used = [group for group in groups if group]
    for group in used:
        session.recompute(group)
    return len(used)
