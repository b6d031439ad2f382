"""Manifests: golden object, round trips, what the writer refuses, and verifying stored objects against their entry.

Damage and attacks are tested with those of the bitstream, in tests/test_bitstream.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachegen_rag.errors import (
    CorruptBitstreamError,
    EncodeError,
    FingerprintMismatchError,
    TruncatedBitstreamError,
)
from cachegen_rag.manifest import Chunk, Level, Manifest, Segment

GOLDEN = Path(__file__).parent / "golden" / "format" / "document.cgm"
OBJECT = Segment("2958d416d08aa5a472d7b509036cb7eafd542add84527e66a145ea64cb4cdc75", 6, 0xF6B1CFDA)


def make(**changes: Any) -> Manifest:
    segment = Segment.of(b"object")
    chunks = (
        Chunk(0, 200, (Level(0, 0.0078125, (segment,)), Level(3, None, (segment, segment)))),
        Chunk(200, 300, (Level(1, 0.0, (segment,)),)),
    )
    return replace(Manifest("0c" * 32, bytes(range(32)), "ab" * 32, 300, chunks), **changes)


def test_golden_decodes_to_these_values_for_ever() -> None:
    manifest = Manifest.from_bytes(GOLDEN.read_bytes())
    assert manifest.key == "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"
    assert manifest.fingerprint.hex() == "44863b03e9909b7100e05b02526909a346fd7455183f6619e0fe6198c89981e0"
    assert manifest.profile == "1900eab6c028483d7126599ee6f50de0d27907b5c65fa90524580b4b0f9852b0"
    assert manifest.tokens == 300
    assert manifest.chunks == make().chunks
    assert [s.sha256 for s in manifest.segments()] == [OBJECT.sha256] * 4


chunk_lengths = st.lists(st.integers(1, 65536), min_size=1, max_size=4)
kls = st.one_of(st.none(), st.floats(0, 100, width=32).map(abs))
segments = st.lists(st.binary(min_size=1, max_size=9).map(Segment.of), min_size=1, max_size=3).map(tuple)
levels = st.dictionaries(st.integers(0, 255), st.tuples(kls, segments), min_size=1, max_size=4)


@given(lengths=chunk_lengths, data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_goes_in_comes_out(lengths: list[int], data: st.DataObject) -> None:
    stops = np.cumsum(lengths).tolist()
    chunks = tuple(
        Chunk(stop - n, stop, tuple(Level(k, *v) for k, v in sorted(data.draw(levels).items())))
        for n, stop in zip(lengths, stops, strict=True)
    )
    manifest = make(tokens=stops[-1], chunks=chunks)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_size_of_a_one_chunk_document() -> None:
    one = Segment.of(b"object")
    assert len(make(tokens=200, chunks=(Chunk(0, 200, (Level(1, 0.01, (one,)),)),)).to_bytes()) == 192


ONE = (Level(0, None, (OBJECT,)),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "0c"}, "32 bytes"),
        ({"key": "x" * 64}, "non-hexadecimal"),
        ({"profile": "ab" * 33}, "32 bytes"),
        ({"fingerprint": bytes(31)}, "32 bytes"),
        ({"tokens": 0}, "tokens = 0"),
        ({"tokens": 301}, "cover 300"),
        ({"chunks": ()}, "chunks = 0"),
        ({"chunks": (Chunk(1, 300, ONE),)}, "begins at 1"),
        ({"chunks": (Chunk(0, 200, ONE), Chunk(201, 300, ONE))}, "begins at 201"),
        ({"chunks": (Chunk(0, 300, ONE), Chunk(300, 300, ONE))}, "tokens of a chunk = 0"),
        ({"chunks": (Chunk(0, 300, ()),)}, "levels of a chunk = 0"),
        ({"chunks": (Chunk(0, 300, ONE * 2),)}, "strictly increasing"),
        ({"chunks": (Chunk(0, 300, (Level(256, None, (OBJECT,)),)),)}, "fit the manifest"),
        ({"chunks": (Chunk(0, 300, (Level(0, None, ()),)),)}, "segments of a level = 0"),
        ({"chunks": (Chunk(0, 300, (Level(0, -1.0, (OBJECT,)),)),)}, "expected KL"),
        ({"chunks": (Chunk(0, 300, (Level(0, float("nan"), (OBJECT,)),)),)}, "expected KL"),
        ({"chunks": (Chunk(0, 300, (Level(0, 1e300, (OBJECT,)),)),)}, "fit the manifest"),
        ({"chunks": (Chunk(0, 300, (Level(0, None, (replace(OBJECT, length=0),)),)),)}, "bytes of a segment"),
        ({"chunks": (Chunk(0, 300, (Level(0, None, (replace(OBJECT, sha256="ab"),)),)),)}, "not a SHA-256"),
    ],
)
def test_the_writer_refuses_what_the_format_cannot_hold(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EncodeError, match=words):
        make(**changes).to_bytes()


@pytest.mark.parametrize("wrong", [{"key": "0d" * 32}, {"fingerprint": bytes(32)}, {"profile": "ac" * 32}])
def test_another_document_model_or_profile_is_refused(wrong: dict[str, Any]) -> None:
    manifest = make()
    assert manifest.expect(key="0c" * 32, fingerprint=bytes(range(32)), profile="ab" * 32) is manifest
    with pytest.raises(FingerprintMismatchError):
        manifest.expect(**wrong)


class TestSegment:
    def test_accepts_its_object(self) -> None:
        assert Segment.of(b"object").sha256 == OBJECT.sha256
        Segment.of(b"object").verify(memoryview(b"object"))

    @pytest.mark.parametrize("sha256", [True, False])
    def test_finds_every_flipped_bit_and_cut(self, sha256: bool) -> None:
        segment = Segment.of(b"object")
        for bit in range(48):
            damaged = bytearray(b"object")
            damaged[bit // 8] ^= 1 << (bit % 8)
            with pytest.raises(CorruptBitstreamError):
                segment.verify(damaged, sha256=sha256)
        for size in range(6):
            with pytest.raises(TruncatedBitstreamError):
                segment.verify(b"object"[:size], sha256=sha256)
        with pytest.raises(CorruptBitstreamError):
            segment.verify(b"object!", sha256=sha256)

    def test_a_forged_checksum_does_not_pass_the_hash(self) -> None:
        forged = replace(Segment.of(b"Object"), sha256=OBJECT.sha256)
        forged.verify(b"Object", sha256=False)
        with pytest.raises(CorruptBitstreamError):
            forged.verify(b"Object")


def test_levels_of_a_chunk() -> None:
    chunk = make().chunks[0]
    assert chunk.level(3).length == 12
    with pytest.raises(KeyError):
        chunk.level(1)
