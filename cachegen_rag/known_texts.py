"""Known documents, found again inside the plain text that an application's own chain rendered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from cachegen_rag.prompt import Document, Message

MIN_MATCH_CHARS = 32
"""Shorter texts are not looked for inside a plain prompt: a false match costs more than a splice saves."""


class KnownTexts:
    """Texts of known documents, found again inside plain text: exact matches, the longest first, left to right.

    Thread-safe.
    """

    def __init__(self, documents: Iterable[Document] = (), min_chars: int = MIN_MATCH_CHARS) -> None:
        self._anchor = max(1, min_chars)
        self._by_anchor: dict[str, dict[str, Document]] = {}
        self._lock = threading.Lock()
        for document in documents:
            self.add(document)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(texts) for texts in self._by_anchor.values())

    def add(self, document: Document) -> None:
        """Know this document; one shorter than ``min_chars`` is never matched and is ignored."""
        if len(document.text) >= self._anchor:
            with self._lock:
                self._by_anchor.setdefault(document.text[: self._anchor], {})[document.text] = document

    def discard(self, text: str) -> None:
        """Forget this text."""
        with self._lock:
            texts = self._by_anchor.get(text[: self._anchor], {})
            texts.pop(text, None)
            if not texts:
                self._by_anchor.pop(text[: self._anchor], None)

    def split(self, text: str) -> list[str | Document]:
        """``text`` as texts and documents in order; joined again they are ``text`` to the character."""
        out: list[str | Document] = []
        if not self._by_anchor:
            return [text] if text else []
        start = at = 0
        while at + self._anchor <= len(text):
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            if at > start:
                out.append(text[start:at])
            out.append(found)
            at += len(found.text)
            start = at
        if start < len(text):
            out.append(text[start:])
        return out

    def _longest(self, text: str, at: int) -> Document | None:
        """The longest known text that ``text`` has at ``at``."""
        texts = self._by_anchor.get(text[at : at + self._anchor])
        if not texts:
            return None
        with self._lock:
            return max((d for t, d in texts.items() if text.startswith(t, at)), key=_length, default=None)

    def match(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` with every known text in their plain parts turned into a document."""
        out = []
        for message in messages:
            pieces = [[p] if isinstance(p, Document) else self.split(p) for p in message.parts]
            out.append(Message(message.role, tuple(itertools.chain.from_iterable(pieces))))
        return out


def _length(document: Document) -> int:
    return len(document.text)
