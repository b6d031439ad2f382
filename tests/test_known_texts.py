"""Known documents found in running text."""

from __future__ import annotations

import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from cachegen_rag.known_texts import KnownTexts
from cachegen_rag.prompt import Document, Message


def test_known_texts_are_found_in_running_text_longest_first():
    short, long = Document("the quick brown fox", "s"), Document("the quick brown fox jumps", "l")
    known = KnownTexts([short, long], min_chars=8)
    text = "see: the quick brown fox jumps and the quick brown fox, or the quick brown dog"
    assert known.split(text) == ["see: ", long, " and ", short, ", or the quick brown dog"]
    known.discard(long.text)
    assert known.split(text)[:3] == ["see: ", short, " jumps and "]
    assert len(known) == 1


def test_texts_too_short_to_be_sure_are_not_matched():
    known = KnownTexts([Document("short")])
    assert len(known) == 0
    assert known.split("a short text") == ["a short text"]


def test_known_texts_in_messages_become_documents():
    document = Document("a passage that is known to the cache already", "d")
    known = KnownTexts([document])
    messages = known.match([Message.of("user", f"Context:\n{document.text}\nQuestion?", Document("given", "g"))])
    assert messages == [Message.of("user", "Context:\n", document, "\nQuestion?", Document("given", "g"))]


@given(st.lists(st.text("ab ", min_size=3, max_size=6), max_size=5), st.text("ab ", max_size=60))
def test_split_loses_no_character(texts, text):
    known = KnownTexts([Document(t) for t in texts], min_chars=3)
    parts = known.split(text)
    assert "".join(p if isinstance(p, str) else p.text for p in parts) == text
    assert all(p for p in parts)
    rest = [p for p in parts if isinstance(p, str)]
    assert not any(t in piece for piece in rest for t in texts)


def test_known_texts_change_while_others_look_for_them():
    known, head, stop, failed = KnownTexts(min_chars=8), "x" * 8, threading.Event(), []
    known.add(Document(head + "stays"))
    for i in range(300):
        known.add(Document(f"{head}{i}"))

    def change(letter: str) -> None:
        try:
            i = 0
            while not stop.is_set():
                i += 1
                known.add(Document(f"{head}{letter}{i % 500}"))
                known.discard(f"{head}{letter}{i * 7 % 500}")
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=change, args=(letter,)) for letter in "ab"]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert known.split(f"{head}stays and more") == [Document(head + "stays"), " and more"]
            assert len(known) >= 301
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        sys.setswitchinterval(interval)
    assert not failed
