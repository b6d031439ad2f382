"""Text of generated tokens as it comes: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER = 4
"""Tokens that may share one UTF-8 character; what is still undecodable after these stays U+FFFD."""


class StopStrings:
    """Ends a text before the first stop string, wherever the borders of its pieces fall; holds back what may be one."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now certain, perhaps empty. Sets ``stopped`` when a stop string has appeared."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class ByteStream:
    """Turns the bytes of tokens into text that can be shown at once, for engines that give a token's bytes."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; everything before it has been returned."""
        return self._stop.stopped

    def push(self, piece: bytes) -> str:
        """Text that these bytes complete, perhaps empty."""
        return self._stop.push(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest of the text, when no more tokens come; an unfinished character is U+FFFD."""
        return self._stop.push(self._decoder.decode(b"", True)) + self._stop.finish()


class TextStream:
    """Turns token ids into text that can be shown at once.

    For tokenizers that only decode runs of ids. ``detokenize`` maps ids to text, undecodable bytes to U+FFFD. ``stop``
    are strings that end the text: it ends before the first of them, wherever token borders fall.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._detokenize = detokenize
        self._stop = StopStrings(stop)
        self._ids: list[int] = []  # a short window: tokenizers such as SentencePiece decode the first id differently
        self._taken = 0  # characters of the window's text that have been taken
        self._waiting = 0  # tokens since the text last ended in a whole character

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; everything before it has been returned."""
        return self._stop.stopped

    def push(self, token_id: int) -> str:
        """Text that this token completes, perhaps empty. Sets ``stopped`` when a stop string has appeared."""
        self._ids.append(token_id)
        text = self._detokenize(self._ids)
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) == len(text):
            self._waiting = 0
        else:
            self._waiting = 1 if len(whole) > self._taken else self._waiting + 1
        if 0 < self._waiting < _MAX_CHARACTER:
            new, self._taken = whole[self._taken :], max(self._taken, len(whole))
        else:
            new = text[self._taken :]
            # One id stays in the window as the left neighbour of the next.
            self._ids, self._waiting = self._ids[-1:], 0
            self._taken = len(self._detokenize(self._ids))
        return self._stop.push(new)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._stop.push(self._detokenize(self._ids)[self._taken :]) + self._stop.finish()
        self._ids, self._taken = [], 0
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
