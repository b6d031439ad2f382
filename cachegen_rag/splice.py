"""The plan of a prompt: which positions are decoded and which are taken from stored KV. Pure: no engine, no store.

First choice is exact prefix reuse: KV that was computed for this very run of leading segments costs nothing in
quality. Then documents are spliced, with chosen ranges recomputed. What is left is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from cachegen_rag.prompt import Prompt

Range: TypeAlias = tuple[int, int]
"""Rows ``start`` to ``stop`` of a segment, counted from the segment's first token."""

MIN_TAKE = 4
"""A shorter run between two recomputed ranges is recomputed too: as one run they see each other's new rows."""


GAP_TOKENS = 64
"""A shorter run between documents is computed in one call with the others; a longer one fills a call by itself."""


@dataclass(frozen=True)
class Decode:
    """Compute prompt positions ``start`` to ``stop``; ``recomputed`` of them are document tokens whose KV is stored."""

    start: int
    stop: int
    recomputed: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Take:
    """Take prompt positions ``start`` to ``stop`` from stored KV: of document ``segment``, or exact if it is None."""

    start: int
    stop: int
    segment: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


Step: TypeAlias = Decode | Take


@dataclass(frozen=True)
class Plan:
    """Steps that cover the prompt once, in order. The last token is always decoded: logits are not stored.

    exact : leading segments that are reused exactly (0: none).
    spliced : indices of the documents whose KV is used.
    """

    steps: tuple[Step, ...]
    exact: int = 0
    spliced: tuple[int, ...] = ()

    @property
    def decoded(self) -> int:
        """Tokens that are computed."""
        return sum(len(s) for s in self.steps if isinstance(s, Decode))

    @property
    def taken(self) -> int:
        """Tokens that come from stored KV."""
        return sum(len(s) for s in self.steps if isinstance(s, Take))

    @property
    def recomputed(self) -> int:
        """Document tokens that are computed although their KV was stored."""
        return sum(s.recomputed for s in self.steps if isinstance(s, Decode))

    @property
    def calls(self) -> int:
        """Decode steps: what the recompute costs in engine calls."""
        return sum(isinstance(s, Decode) for s in self.steps)

    def taken_rows(self, prompt: Prompt, segment: int) -> list[Range]:
        """The rows of document ``segment`` that the plan takes, so that no others need be decoded or staged."""
        offset = prompt.offsets[segment]
        return [(s.start - offset, s.stop - offset) for s in self.steps if isinstance(s, Take) and s.segment == segment]


def plan(
    prompt: Prompt,
    available: Collection[int] = (),
    recompute: Mapping[int, Iterable[Range]] | None = None,
    *,
    exact: int = 0,
    min_take: int = MIN_TAKE,
) -> Plan:
    """Plan ``prompt``.

    available : indices of document segments whose own KV is at hand.
    recompute : per document segment, ranges of rows to compute anew; clipped to the segment.
    exact : number of leading segments whose joint KV is at hand; they are taken whole (see :func:`leading_runs`).
    min_take : shorter runs inside a document are computed instead of taken.

    The last token of the prompt is decoded whatever is stored. Deterministic; never raises for any input whose indices
    lie in the prompt.
    """
    total = len(prompt)
    if total == 0:
        return Plan(())
    exact = max(0, min(exact, len(prompt.segments)))
    taken: list[Take] = []
    spliced: list[int] = []
    start = min(prompt.offsets[exact], total - 1)
    if start:
        taken.append(Take(0, start))
    for index in range(exact, len(prompt.segments)):
        segment = prompt.segments[index]
        if segment.kind != "document" or index not in available or not len(segment):
            continue
        offset = prompt.offsets[index]
        again = merge_ranges((recompute or {}).get(index, ()), len(segment), min_take)
        runs = [(a + offset, min(b + offset, total - 1)) for a, b in complement(again, len(segment))]
        runs = [(a, b) for a, b in runs if a < b]
        taken += [Take(a, b, index) for a, b in runs]
        if runs:
            spliced.append(index)
    steps: list[Step] = []
    at = 0
    for take in [*taken, Take(total, total)]:
        if take.start > at:
            steps.append(Decode(at, take.start, _stored(prompt, spliced, at, take.start)))
        if len(take):
            steps.append(take)
        at = take.stop
    return Plan(tuple(steps), exact if start else 0, tuple(spliced))


def _stored(prompt: Prompt, spliced: Sequence[int], start: int, stop: int) -> int:
    overlaps = (min(stop, prompt.offsets[i + 1]) - max(start, prompt.offsets[i]) for i in spliced)
    return sum(max(0, n) for n in overlaps)


def merge_ranges(ranges: Iterable[Range], length: int, min_gap: int = 1) -> list[Range]:
    """Ranges clipped to ``0 .. length``, sorted, merged where they meet or lie less than ``min_gap`` apart.

    A gap before the first or after the last range that is shorter than ``min_gap`` is closed too.
    """
    clipped = sorted((max(0, a), min(length, b)) for a, b in ranges)
    out: list[Range] = []
    for a, b in clipped:
        if a >= b:
            continue
        if a < min_gap and not out:
            a = 0
        if out and a - out[-1][1] < min_gap:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    if out and length - out[-1][1] < min_gap:
        out[-1] = (out[-1][0], length)
    return out


def complement(ranges: Sequence[Range], length: int) -> list[Range]:
    """What sorted, disjoint ``ranges`` leave of ``0 .. length``."""
    edges = [0, *(e for r in ranges for e in r), length]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def leading_runs(prompt: Prompt) -> list[int]:
    """Numbers of leading segments whose joint KV may be reused exactly, the longest first.

    A run ends with a document, or is the text before the first document; the text behind the last document (the
    question) changes with every request and is never part of one.
    """
    documents = prompt.documents
    if not documents:
        return []
    ends = {documents[0], *(i + 1 for i in documents)}
    return sorted((n for n in ends if prompt.offsets[n] > 0), reverse=True)


def longest_exact(prompt: Prompt, stored: Callable[[int], bool]) -> int:
    """The longest leading run for which ``stored(number of segments)`` is true; 0 if none is."""
    return next((n for n in leading_runs(prompt) if stored(n)), 0)


class Builder(Protocol):
    """The part of a Session that executes a plan."""

    def decode(self, token_ids: Sequence[int], *, logits: bool = False) -> Any: ...

    def skip(self, token_ids: Sequence[int]) -> None: ...

    def take(self, start: int, stop: int, token_ids: Sequence[int]) -> None: ...


def between(steps: Iterable[Step], start: int, stop: int) -> Iterator[Step]:
    """The parts of ``steps`` that lie at prompt positions ``start`` to ``stop``."""
    for step in steps:
        a, b = max(step.start, start), min(step.stop, stop)
        if a < b:
            yield replace(step, start=a, stop=b)


def leading_text(prompt: Prompt) -> int:
    """Tokens before the first document; none if there is no document, since then the question is among them."""
    documents = prompt.documents
    return prompt.offsets[documents[0]] if documents else 0


def is_gap(step: Step, prompt: Prompt) -> bool:
    """Whether a step may be left out at first and computed in one call with the others that were (``recompute``).

    So are short runs between documents: separators, heads. Not what begins the prompt, nor what ends it.
    """
    inside = leading_text(prompt) <= step.start and step.stop < len(prompt)
    return isinstance(step, Decode) and inside and len(step) < GAP_TOKENS


def execute(steps: Iterable[Step], prompt: Prompt, session: Builder) -> list[Range]:
    """Run ``steps`` on a session whose library already holds what they take; the gaps that are still to be computed."""
    ids = prompt.token_ids
    gaps: list[Range] = []
    for step in steps:
        part = ids[step.start : step.stop]
        if isinstance(step, Take):
            session.take(step.start, step.stop, part)
        elif is_gap(step, prompt):
            session.skip(part)
            gaps.append((step.start, step.stop))
        else:
            session.decode(part)
    return gaps
