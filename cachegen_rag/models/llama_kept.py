"""Leading runs of earlier prompts, kept in the llama.cpp context so that later prompts begin with them for nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cachegen_rag.models.llama_native import FIRST_KEPT, FIRST_RUN, MAIN, NativeContext

KEPT_RUNS = FIRST_RUN - FIRST_KEPT


class KeptRuns:
    """Leading runs of earlier prompts, kept in sequences of their own; the least recently used goes first.

    room : tokens that all of them may have together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._runs: OrderedDict[int, list[int]] = OrderedDict()  # sequence -> token ids
        self._scattered = False

    def save(self, context: NativeContext, ids: list[int]) -> bool:
        """Keep the prompt's leading run ``ids``; False if it is empty or too long."""
        if not 0 < len(ids) <= self.room:
            return False
        for sequence, run in self._runs.items():
            if run[: len(ids)] == ids:
                self._runs.move_to_end(sequence)
                return True
        for sequence in [s for s, run in self._runs.items() if ids[: len(run)] == run]:
            self._drop(context, sequence)  # the new run contains it
        while self._runs and (len(self._runs) == KEPT_RUNS or len(ids) + self.tokens > self.room):
            self._drop(context, next(iter(self._runs)))
        sequence = next(s for s in range(FIRST_KEPT, FIRST_KEPT + KEPT_RUNS) if s not in self._runs)
        context.copy(MAIN, sequence, 0, len(ids))
        self._runs[sequence] = ids
        self._scattered = True
        return True

    def settle(self, context: NativeContext) -> None:
        """Move the runs to the cache's first cells, when no other sequence is left in it.

        llama.cpp attends to all cells up to the last one in use, masked or not: a run left behind a long document
        would slow down every later prompt. The rows are restored as they were read.
        """
        if not self._scattered:
            return
        self._scattered = False
        states = {sequence: context.get_sequence(sequence) for sequence in self._runs}
        context.clear(rows=False)
        for sequence, state in states.items():
            if not context.set_sequence(sequence, state):
                del self._runs[sequence]

    def restore(self, context: NativeContext, ids: Sequence[int]) -> int:
        """Begin the (empty) prompt with the longest kept run that ``ids`` begins with; its length."""
        best, length = None, 0
        for sequence, run in self._runs.items():
            common = next(
                (i for i, (a, b) in enumerate(zip(run, ids, strict=False)) if a != b), min(len(run), len(ids))
            )
            if common > length:
                best, length = sequence, common
        if best is not None:
            self._runs.move_to_end(best)
            context.copy(best, MAIN, 0, length)
        return length

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return sum(len(run) for run in self._runs.values())

    def forget(self) -> None:
        """Forget all runs (the context is being cleared)."""
        self._runs.clear()

    def _drop(self, context: NativeContext, sequence: int) -> None:
        context.remove(sequence)
        del self._runs[sequence]
