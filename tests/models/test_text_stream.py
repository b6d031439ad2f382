"""Streamed text equals the text of the whole, cut before the first stop string, whatever the token borders are."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cachegen_rag.models.text_stream import TextStream


def detokenizer(pieces: list[bytes]):
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace")


def stream(pieces: list[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    out = TextStream(detokenizer(pieces), stop)
    shown = []
    for i in range(len(pieces)):
        shown.append(out.push(i))
        if out.stopped:
            break
    return [*shown, out.finish()], out.stopped


@st.composite
def cut_text(draw):
    text = draw(st.text(alphabet="ab<é中🙂", max_size=30))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=len(raw))))
    borders = [0, *[c for c in cuts if c < len(raw)], len(raw)]
    return text, [raw[a:b] for a, b in pairwise(borders)]


@given(cut_text())
def test_the_parts_join_to_the_text(case):
    text, pieces = case
    shown, stopped = stream(pieces)
    assert "".join(shown) == text and not stopped
    assert all("\ufffd" not in part for part in shown)


@given(cut_text(), st.lists(st.text(alphabet="ab<é", min_size=1, max_size=3), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(case, stops):
    text, pieces = case
    found = [text.find(s) for s in stops if s in text]
    shown, stopped = stream(pieces, stops)
    result = "".join(shown)
    if not found:
        assert result == text and not stopped
    else:
        # A stop string that completes earlier in time may start later than a longer one: the text is then cut there.
        assert stopped and text.startswith(result)
        assert any(text.startswith(s, len(result)) for s in stops)
        assert all(s not in result for s in stops)


def test_bytes_that_never_become_a_character_are_shown_as_replacements():
    shown, _ = stream([b"a", b"\xff", b"\xff", b"\xff", b"\xff", b"b"])
    assert "".join(shown).startswith("a\ufffd") and "".join(shown).endswith("b")


def test_the_start_of_a_stop_string_is_held_until_it_is_known():
    out = TextStream(detokenizer([b"x<", b"|", b"y"]), ["<|end"])
    assert [out.push(0), out.push(1), out.push(2)] == ["x", "", "<|y"]
