"""The codec end to end: bytes and symbols exact, values within a step, wrong input refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from cachegen_rag.bitstream import Bitstream, Section
from cachegen_rag.codec import Codec, Profile
from cachegen_rag.codec.codec import SECTION_ESCAPES, SECTION_ROWS, SECTION_STREAM
from cachegen_rag.codec.profile import Level
from cachegen_rag.codec.transform import block_rows
from cachegen_rag.errors import (
    BitstreamError,
    CodecError,
    CorruptBitstreamError,
    EncodeError,
    FingerprintMismatchError,
    UnknownLevelError,
)
from cachegen_rag.kernels import cpu, native
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec, from_interleaved, rotate

TOLERANCE = 5e-4
SHAPES = [
    KVShape(1, 1, 2, 2),
    KVShape(1, 1, 64, 64),
    KVShape(3, 1, 8, 24),
    KVShape(2, 5, 6, 10),
    KVShape(5, 3, 32, 16),
    KVShape(2, 4, 80, 48),
]
TOKENS = [1, 2, 63, 130]


def decoded_both_ways(profile: Profile, kv: KV, level: int) -> tuple[bytes, KV, KV]:
    fast, slow = Codec(profile), Codec(profile, reference=True)
    data = fast.encode(kv, level)
    assert slow.encode(kv, level) == data
    return data, fast.decode(data, np.float32), slow.decode(data, np.float32)


def assert_close(a: KV, b: KV) -> None:
    """Within the tolerance of SPEC.md: a share of the largest magnitude among a token's channels."""
    largest = np.maximum(np.abs(b.keys).max(axis=(0, 2, 3)), np.abs(b.values).max(axis=(0, 2, 3)))[None, :, None, None]
    for x, y in ((a.keys, b.keys), (a.values, b.values)):
        assert np.all(np.abs(x - y) <= TOLERANCE * largest)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_reference_and_cpu_path_agree_on_every_byte(shape: KVShape, tokens: int) -> None:
    profile = synthetic.profile(shape)
    kv = synthetic.kv(profile, tokens, outliers=tokens % 2)
    for level in (1, 2):
        _, fast, slow = decoded_both_ways(profile, kv, level)
        assert_close(fast, slow)
        np.testing.assert_array_equal(fast.token_ids, kv.token_ids)
        np.testing.assert_array_equal(fast.positions, kv.positions)


def adversarial(kv: KV, kind: str) -> KV:
    keys, values = kv.keys.copy(), kv.values.copy()
    if kind == "zeros":
        keys[:], values[:] = 0, 0
    elif kind == "constant":
        keys[:], values[:] = 3.25, -7.5
    elif kind == "outlier":
        keys[0, len(kv) // 2], values[-1, 0, 0, 0] = 6e4, -6e4
    elif kind == "huge":
        keys *= 1000
        values *= 1000
    elif kind == "sparse":
        keys[:, 1:], values[:, ::2] = 0, 0
    elif kind == "alternating":
        keys[:, ::2] *= -40
    elif kind == "tiny":
        keys *= 1e-30
        values *= 1e-30
    return KV(keys, values, kv.token_ids, kv.positions)


@pytest.mark.parametrize("kind", ["zeros", "constant", "outlier", "huge", "sparse", "alternating", "tiny"])
def test_adversarial_tensors_never_clip(kind: str) -> None:
    profile = synthetic.profile(KVShape(3, 2, 16, 8))
    kv = adversarial(synthetic.kv(profile, 70), kind)
    for level in (1, 2):
        _, fast, slow = decoded_both_ways(profile, kv, level)
        assert_close(fast, slow)
        codec = Codec(profile)
        gains = codec.gains(Bitstream.from_bytes(codec.encode(kv, level)))
        for index, coder in enumerate(codec.coders(level)):
            have, want = (cpu.components(block_rows(coder.block, x), coder.forward)[0] for x in (fast, kv))
            limit = np.zeros(want.shape[1])
            limit[coder.quantizer.order] = coder.step * np.maximum(1, coder.quantizer.threshold[:, 0])
            assert np.all(np.abs(have - want) <= limit * gains[index][:, None] + TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", [0, 1])
def test_nan_and_infinity_are_refused(bad: float, level: int) -> None:
    profile = synthetic.profile(KVShape(2, 2, 8, 8))
    kv = synthetic.kv(profile, 5)
    for name in ("keys", "values"):
        damaged = getattr(kv, name).copy()
        damaged[1, 3, 1, 2] = bad
        with pytest.raises(EncodeError, match=name):
            Codec(profile).encode(replace(kv, **{name: damaged}), level)


def test_values_beyond_a_level_are_refused_not_clipped() -> None:
    profile = synthetic.profile(KVShape(1, 1, 8, 8))
    kv = synthetic.kv(profile, 5)
    with pytest.raises(EncodeError, match="steps"):
        Codec(profile).encode(replace(kv, keys=kv.keys + 1e12), 1)
    with pytest.raises(EncodeError, match="fp16"):
        Codec(profile).encode(replace(kv, keys=kv.keys + 1e12), 0)


def test_exact_level_is_fp16_to_the_bit() -> None:
    profile = synthetic.profile(KVShape(3, 2, 16, 8))
    kv = synthetic.kv(profile, 33)
    back = Codec(profile).decode(Codec(profile).encode(kv, 0))
    np.testing.assert_array_equal(back.keys, kv.keys.astype(np.float16))
    np.testing.assert_array_equal(back.values, kv.values.astype(np.float16))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("rotary", [0, 4, 10, 16])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("level", [0, 1])
def test_decode_into_rotates_into_strided_rows(layout: str, rotary: int, dtype: type, level: int) -> None:
    shape = KVShape(3, 2, 16, 12)
    profile = synthetic.profile(shape)
    codec, n = Codec(profile), 51
    kv = synthetic.kv(profile, n, first=7)
    data = codec.encode(kv, level)
    rope = RopeSpec.plain(rotary, 500.0, layout)  # type: ignore[arg-type]
    positions = np.arange(1000, 1000 + n, dtype=np.int32)
    wide = np.full((n, 3, shape.layers, shape.kv_heads, 16), 9, dtype)
    keys = [wide[:, 0, layer] for layer in range(shape.layers)]
    values = [wide[:, 2, layer, :, :12] for layer in range(shape.layers)]
    codec.decode_into(data, KVTarget(keys, values, positions, rope), token_ids=kv.token_ids)
    plain = codec.decode(data, np.float32)
    tolerance = 2e-2 if dtype is np.float16 else 1e-4
    for layer in range(shape.layers):
        want = from_interleaved(rotate(plain.keys[layer], positions, rope), rope)
        np.testing.assert_allclose(keys[layer].astype(np.float32), want, atol=tolerance)
        np.testing.assert_allclose(values[layer].astype(np.float32), plain.values[layer], atol=tolerance)
    assert np.all(wide[:, 1] == 9) and np.all(wide[:, 2, :, :, 12:] == 9)


def test_gaps_in_positions_and_chunks() -> None:
    profile = synthetic.profile(KVShape(2, 2, 8, 8))
    kv = synthetic.kv(profile, 40)
    kept = np.r_[0:7, 11:20, 39]
    pruned = KV(kv.keys[:, kept], kv.values[:, kept], kv.token_ids[kept], kv.positions[kept])
    back = Codec(profile).decode(Codec(profile).encode(pruned, 1))
    np.testing.assert_array_equal(back.positions, pruned.positions)
    part = Codec(profile).decode(Codec(profile).encode(kv[20:40], 1))
    np.testing.assert_array_equal(part.token_ids, kv.token_ids[20:40])


def test_sinks_are_exact_only_where_a_sequence_begins() -> None:
    profile = synthetic.profile(KVShape(2, 2, 8, 8))
    assert profile.sinks == 2
    kv = synthetic.kv(profile, 30)
    sunk = adversarial(kv, "outlier")
    sunk = KV(sunk.keys, sunk.values, sunk.token_ids, sunk.positions)
    codec = Codec(profile, sinks=True)
    back = codec.decode(codec.encode(sunk, 2))
    np.testing.assert_array_equal(back.keys[:, :2], sunk.keys[:, :2].astype(np.float16))
    np.testing.assert_array_equal(back.values[:, :2], sunk.values[:, :2].astype(np.float16))
    assert not np.array_equal(back.keys[:, 2:], sunk.keys[:, 2:].astype(np.float16))
    plain = Codec(profile).encode(kv, 2)
    assert len(codec.encode(kv[2:], 2)) < len(plain) < len(codec.encode(kv, 2))
    assert SECTION_ROWS not in {s.type for s in Bitstream.from_bytes(codec.encode(kv[2:], 2)).sections}
    # Whoever decodes need not know: the bitstream says which tokens are exact.
    np.testing.assert_array_equal(Codec(profile).decode(codec.encode(sunk, 2)).keys, back.keys)


def test_levels_are_described_and_unknown_ones_refused() -> None:
    profile = synthetic.profile(KVShape(2, 2, 8, 8), levels=3)
    codec = Codec(profile)
    kv = synthetic.kv(profile, 64)
    assert codec.lossy_levels == (1, 2, 3) and codec.default_level in codec.lossy_levels
    assert codec.expected_kl(0) == 0 and codec.bits_per_element(0) == 16
    sizes = [len(codec.encode(kv, level)) for level in range(4)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    for wrong in (-1, 4, True, 1.0, "fine"):
        with pytest.raises(UnknownLevelError, match="3 \\("):
            codec.encode(kv, wrong)  # type: ignore[arg-type]


def test_wrong_shape_and_no_tokens() -> None:
    profile = synthetic.profile(KVShape(2, 2, 8, 8))
    kv = synthetic.kv(profile, 4)
    with pytest.raises(EncodeError, match="shape"):
        Codec(profile).encode(KV(kv.keys[:1], kv.values[:1], kv.token_ids, kv.positions), 1)
    with pytest.raises(EncodeError, match="no tokens"):
        Codec(profile).encode(kv[:0], 1)


def test_another_profile_model_or_text_is_refused() -> None:
    shape = KVShape(2, 2, 8, 8)
    profile, other = synthetic.profile(shape), synthetic.profile(shape, seed=9)
    kv = synthetic.kv(profile, 9)
    data = Codec(profile, b"a" * 32).encode(kv, 1)
    with pytest.raises(FingerprintMismatchError):
        Codec(other, b"a" * 32).decode(data)
    with pytest.raises(FingerprintMismatchError):
        Codec(profile, b"b" * 32).decode(data)
    target = KVTarget(list(np.zeros_like(kv.keys)), list(np.zeros_like(kv.values)), kv.positions, RopeSpec((), "half"))
    with pytest.raises(FingerprintMismatchError):
        Codec(profile, b"a" * 32).decode_into(data, target, token_ids=kv.token_ids + 1)
    with pytest.raises(BitstreamError):
        Codec(profile, b"a" * 32).decode_into(data, target.rows(0, 5))


def resealed(
    data: bytes, change: dict[int, bytes | None], *, level: int | None = None, coding: int | None = None
) -> bytes:
    """The bitstream with sections of some types replaced (None: left out) and valid checksums: a hostile writer's."""
    stream = Bitstream.from_bytes(data)
    sections = [Section(s.type, change.get(s.type, bytes(s.data)), s.index) for s in stream.sections
                if change.get(s.type, b"") is not None]  # fmt: skip
    known = {s.type for s in sections}
    sections += [Section(kind, new) for kind, new in change.items() if new is not None and kind not in known]
    sections.sort(key=lambda s: (s.type, s.index))
    fields = {"sections": tuple(sections)}
    fields |= {} if level is None else {"level": level}
    fields |= {} if coding is None else {"coding": coding}
    return replace(stream, **fields).to_bytes()  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_hostile_streams_raise_and_stay_in_bounds(seed: int) -> None:
    """Checksums hold, so the codec itself has to notice: garbage, cut and lengthened streams, wrong states."""
    profile = synthetic.profile(KVShape(2, 2, 16, 8))
    codec, slow = Codec(profile), Codec(profile, reference=True)
    data = codec.encode(synthetic.kv(profile, 40), 1)
    stream = bytes(Bitstream.from_bytes(data).section(SECTION_STREAM, 0))
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, rng.integers(0, len(stream) + 200)).astype(np.uint8).tobytes()
    flipped = bytearray(stream)
    flipped[rng.integers(len(stream))] ^= 1 << rng.integers(8)
    for bad in (
        noise,
        stream[:128],
        stream[:-2],
        stream[:-1],
        stream + b"\0\0",
        b"",
        bytes(len(stream)),
        bytes(flipped),
    ):
        hostile = resealed(data, {SECTION_STREAM: bad})
        for c in (codec, slow):
            with pytest.raises(BitstreamError):
                c.decode(hostile)
            with pytest.raises(BitstreamError):
                c.decode_symbols(hostile)


def test_hostile_sections_raise() -> None:
    profile = synthetic.profile(KVShape(2, 2, 16, 8))
    codec = Codec(profile, sinks=True)
    data = codec.encode(synthetic.kv(profile, 40, outliers=3), 1)
    row = profile.shape.fp16_bytes_per_token
    rows = bytes(Bitstream.from_bytes(data).section(SECTION_ROWS))
    escapes = bytes(Bitstream.from_bytes(data).section(SECTION_ESCAPES))
    nan = rows[:12] + b"\xff" * (len(rows) - 12)
    cases: list[dict[int, bytes | None]] = [
        {SECTION_ESCAPES: escapes + b"\1"},
        {SECTION_ESCAPES: escapes[:-1]},
        {SECTION_ESCAPES: b"\xff" * 9 + b"\0" + escapes},
        {SECTION_ESCAPES: None},
        {SECTION_ROWS: b""},
        {SECTION_ROWS: b"\1"},
        {SECTION_ROWS: b"\0\0\0\0"},
        {SECTION_ROWS: b"\xff\xff\xff\xff" + rows[4:]},
        {SECTION_ROWS: b"\1\0\0\0" + b"\x28\0\0\0" + bytes(row)},
        {SECTION_ROWS: b"\2\0\0\0" + b"\1\0\0\0\1\0\0\0" + bytes(2 * row)},
        {SECTION_ROWS: rows[:-2]},
        {SECTION_ROWS: nan},
        {SECTION_STREAM: None},
    ]
    for change in cases:
        with pytest.raises(BitstreamError):
            codec.decode(resealed(data, change))
    for level, coding in ((0, 1), (1, 0), (9, 1), (1, 7)):
        with pytest.raises(CorruptBitstreamError):
            codec.decode(resealed(data, {}, level=level, coding=coding))


def test_any_flipped_byte_is_noticed() -> None:
    profile = synthetic.profile(KVShape(1, 1, 8, 8))
    codec = Codec(profile)
    data = codec.encode(synthetic.kv(profile, 12), 1)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises((BitstreamError, CodecError)):
            codec.decode(bytes(damaged))


def test_a_level_with_nothing_to_code() -> None:
    """A step so wide that every component is below it: only means are left, and no streams."""
    profile = synthetic.profile(KVShape(2, 1, 8, 8))
    coarse = replace(profile, levels=(Level(1, 1.0, 0.1, 400),), _bytes=None)
    kv = synthetic.kv(profile, 6)
    back = Codec(coarse).decode(Codec(coarse).encode(kv, 1), np.float32)
    for block in profile.blocks:
        for cell in block.cells:
            got = (back.values if cell.is_value else back.keys)[cell.layer].reshape(6, -1)
            np.testing.assert_allclose(got, np.tile(cell.mean, (6, 1)), atol=1e-6)


@pytest.mark.parametrize("path", ["numba", "portable", "avx2", "avx512"])
def test_every_kernel_decodes_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = synthetic.profile(KVShape(4, 3, 32, 16), layers_a_block=3)
    kv = synthetic.kv(profile, 77, outliers=2)
    data = Codec(profile).encode(kv, 1)
    want = Codec(profile, reference=True).decode(data, np.float32)
    monkeypatch.setenv("CACHEGEN_RAG_KERNELS", path)
    native.library.cache_clear()
    try:
        if path != "numba" and native.library() is None:
            pytest.skip("the C kernels were not built")
        assert Codec(profile).encode(kv, 1) == data
        back, half = Codec(profile).decode(data, np.float32), Codec(profile).decode(data)
        assert_close(back, want)
        np.testing.assert_array_equal(half.keys, back.keys.astype(np.float16))
        np.testing.assert_array_equal(half.values, back.values.astype(np.float16))
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native.library()


def test_threads_share_a_codec() -> None:
    from concurrent.futures import ThreadPoolExecutor

    profile = synthetic.profile(KVShape(4, 2, 32, 32))
    codec = Codec(profile)
    kvs = [synthetic.kv(profile, 50, seed=i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        data = list(pool.map(lambda kv: codec.encode(kv, 1), kvs))
        back = list(pool.map(codec.decode, data))
    fresh = Codec(profile)
    for one, bytes_, kv in zip(back, data, kvs, strict=True):
        assert fresh.encode(kv, 1) == bytes_
        np.testing.assert_array_equal(one.keys, fresh.decode(bytes_).keys)
