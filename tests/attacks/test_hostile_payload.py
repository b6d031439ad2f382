"""Bitstreams whose container is sound and whose payload is not: what a hostile writer, not a bad disk, would send.

Decoding such a file raises one of our errors or gives finite KV. It never crashes, never writes outside the target,
and never takes memory out of proportion.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import synthetic

from cachegen_rag.bitstream import Bitstream, Section
from cachegen_rag.codec import Codec
from cachegen_rag.errors import BitstreamError
from cachegen_rag.kernels import native
from cachegen_rag.kv import KVShape
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec

SHAPE = KVShape(layers=3, kv_heads=2, key_dim=16, value_dim=24)
TOKENS = 37
GUARD = 3


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(synthetic.profile(SHAPE), bytes(32), sinks=True)


@pytest.fixture(scope="module")
def streams(codec: Codec) -> list[Bitstream]:
    """Sound bitstreams: lossy with and without sinks and escapes, and exact."""
    kvs = [
        synthetic.kv(codec.profile, TOKENS),
        synthetic.kv(codec.profile, TOKENS, first=50, outliers=20),
        synthetic.kv(codec.profile, 1, first=9),
    ]
    return [Bitstream.from_bytes(codec.encode(kv, level)) for kv in kvs for level in range(len(codec.levels))]


@pytest.fixture(params=["portable", "avx2", "avx512", "numba"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    lib = native.library()
    if request.param == "numba":
        monkeypatch.setattr(native, "library", lambda: None)
        yield
        return
    wanted = ("portable", "avx2", "avx512").index(request.param)
    if lib is None or lib.cg_set_isa(wanted) != wanted:
        pytest.skip(f"no {request.param} kernels here")
    yield
    lib.cg_set_isa(-1)


def hostile(stream: Bitstream, rng: random.Random) -> Bitstream:
    """Damage sections, lists of sections or the header's promises, and leave every checksum right."""
    sections = [Section(s.type, bytes(s.data), s.index) for s in stream.sections]
    at = rng.randrange(len(sections))
    data = bytearray(sections[at].data)
    kind = rng.randrange(9)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data = data[: rng.randrange(len(data))]
    elif kind == 2:
        data += rng.randbytes(rng.choice([1, 2, 4, 1000]))
    elif kind == 3:
        data = bytearray(rng.randbytes(len(data)))
    elif kind == 4:
        start = rng.randrange(len(data))
        data[start : start + 8] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * len(data[start : start + 8])
    elif kind == 5:
        data[:8] = data[:8][::-1]
    elif kind == 6:
        data = bytearray(rng.choice(sections).data)
    sections[at] = replace(sections[at], data=bytes(data))
    if kind == 7:
        del sections[at]
    if kind == 8:  # other token counts than the streams were made for
        n = rng.choice([1, len(stream) + 1, 2 * len(stream), 60_000])
        ids = np.zeros(n, np.int32)
        return replace(stream, token_ids=ids, positions=np.arange(n, dtype=np.int32), sections=tuple(sections))
    return replace(stream, sections=tuple(sections), level=stream.level if rng.random() < 0.9 else rng.randrange(5))


def guarded(tokens: int, dtype: Any) -> tuple[list[Any], KVTarget]:
    """A target in the middle of larger arrays, whose other rows hold a pattern."""
    whole = [
        np.full((tokens + 2 * GUARD, SHAPE.kv_heads, dim), 7.0, dtype)
        for dim in (SHAPE.key_dim, SHAPE.value_dim)
        for _ in range(SHAPE.layers)
    ]
    rows = [w[GUARD : GUARD + tokens] for w in whole]
    for row in rows:
        row[...] = 0
    target = KVTarget(rows[: SHAPE.layers], rows[SHAPE.layers :], np.arange(tokens, dtype=np.int32), RopeSpec.plain(16))
    return whole, target


def test_hostile_payloads(codec: Codec, streams: list[Bitstream], kernels: Any) -> None:
    for stream in streams:
        codec.decode(stream.to_bytes())  # numba compiles on first use, which takes memory of its own
    rng, decoded, refused = random.Random(4), 0, 0
    for number in range(600):
        stream = hostile(rng.choice(streams), rng)
        data = stream.to_bytes()
        whole, target = guarded(min(len(stream), 100), np.float16 if number % 2 else np.float32)
        tracemalloc.start()
        try:
            codec.decode_into(data, target)
            decoded += 1
            assert all(np.isfinite(w).all() for w in whole)
        except BitstreamError:
            refused += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 3_000_000 + 4 * len(stream) * SHAPE.fp16_bytes_per_token
        for w in whole:
            assert (w[:GUARD] == 7).all() and (w[-GUARD:] == 7).all(), "written outside the target"
    # Some are sound by chance: a bit of an exact row, or an escaped value, is as good as any other.
    assert refused > 3 * decoded > 0


def test_sound_ones_decode(codec: Codec, streams: list[Bitstream], kernels: Any) -> None:
    for stream in streams:
        whole, target = guarded(len(stream), np.float16)
        codec.decode_into(stream.to_bytes(), target)
        assert all((w[:GUARD] == 7).all() and (w[-GUARD:] == 7).all() for w in whole)
        assert any(np.any(w[GUARD:-GUARD]) for w in whole)
