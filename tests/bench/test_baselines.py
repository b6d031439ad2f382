"""Peer codecs: real bytes, sizes of the published formats, reconstruction within their own bounds."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from cachegen_rag.bench import arithmetic
from cachegen_rag.bench.baselines import Q4, Q8, CacheGen, Float16, Int8PerToken, LMCache, Peer, peers
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.rope import RopeSpec, rotate

SHAPE = KVShape(layers=3, kv_heads=2, key_dim=32, value_dim=64)
ROPE = RopeSpec.plain(32)


def make(tokens: int = 45, seed: int = 0, shape: KVShape = SHAPE) -> KV:
    """Smooth in time, with channels of very different widths, as KV is."""
    rng = np.random.default_rng(seed)

    def walk(dim: int) -> np.ndarray:
        size = (shape.layers, tokens, shape.kv_heads, dim)
        width = np.exp(np.random.default_rng(9).normal(0, 1, (size[0], 1, *size[2:])))
        return ((0.6 * rng.normal(size=size) + rng.normal(size=(size[0], 1, *size[2:]))) * width).astype(np.float32)

    positions = np.arange(tokens, dtype=np.int32)
    return KV(walk(shape.key_dim), walk(shape.value_dim), positions + 3, positions)


def relative_error(kv: KV, again: KV) -> float:
    exact = np.concatenate([kv.keys.ravel(), kv.values.ravel()])
    coded = np.concatenate([again.keys.ravel(), again.values.ravel()])
    return float(np.sqrt(np.mean((exact - coded) ** 2) / np.mean(exact**2)))


@functools.cache
def all_peers() -> list[Peer]:
    return peers(SHAPE, ROPE, [make(seed=s, tokens=120) for s in (5, 6, 7)], tokens=45)


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 45])
@pytest.mark.parametrize("index", range(len(all_peers())))
def test_round_trip_is_whole_and_close(index: int, tokens: int) -> None:
    peer, kv = all_peers()[index], make(tokens)
    data = peer.encode(kv)
    again = peer.decode(data, kv.token_ids, kv.positions)
    assert isinstance(data, bytes)
    assert again.shape == kv.shape and len(again) == tokens
    bound = {"fp16": 1e-3, "q8_0": 0.01, "q4_0": 0.15, "int8_per_token": 0.05}.get(peer.family, 0.9)
    assert relative_error(kv, again) < bound


def test_order_of_quality() -> None:
    kv = make()
    error = {
        (p.family, p.setting): relative_error(kv, p.decode(p.encode(kv), kv.token_ids, kv.positions))
        for p in all_peers()
    }
    assert error["fp16", "default"] < error["q8_0", "default"] < error["q4_0", "default"]
    scales = [error["cachegen_paper", f"bins x {s}"] for s in ("0.25", "0.5", "1", "1.5")]
    assert scales == sorted(scales)


def test_block_formats_have_their_published_sizes() -> None:
    kv = make(64)
    elements = 64 * SHAPE.elements_per_token
    assert 8 * len(Float16(SHAPE, ROPE).encode(kv)) / elements == 16
    assert 8 * len(Q8(SHAPE, ROPE).encode(kv)) / elements == 8.5
    assert 8 * len(Q4(SHAPE, ROPE).encode(kv)) / elements == 4.5
    scales = 4 * 64 * 2 * SHAPE.layers
    assert len(Int8PerToken(SHAPE, ROPE).encode(kv)) == elements + scales


@pytest.mark.parametrize(("peer", "kind"), [(Q8, GGMLQuantizationType.Q8_0), (Q4, GGMLQuantizationType.Q4_0)])
def test_block_formats_are_llama_cpps(peer: type[Peer], kind: GGMLQuantizationType) -> None:
    rows = np.random.default_rng(3).normal(size=(40, 96)).astype(np.float32)
    rows[3], rows[4, :32] = 0, 7.0
    ours = peer(SHAPE, ROPE).encode_rows(rows, 0, 0)
    assert ours == quants.quantize(rows, kind).tobytes()
    decoded, end = peer(SHAPE, ROPE).decode_rows(ours, 0, 40, 96, 0, 0)
    assert end == len(ours)
    np.testing.assert_array_equal(decoded, quants.dequantize(np.frombuffer(ours, np.uint8).reshape(40, -1), kind))


def test_rows_that_are_no_multiple_of_a_block() -> None:
    shape = KVShape(1, 1, 20, 44)
    kv = make(7, shape=shape)
    for peer in (Q8(shape, RopeSpec.plain(20)), Q4(shape, RopeSpec.plain(20))):
        again = peer.decode(peer.encode(kv), kv.token_ids, kv.positions)
        assert relative_error(kv, again) < 0.2


class TestLMCache:
    def test_bins_by_layer(self) -> None:
        peer = LMCache(SHAPE, ROPE)
        assert [peer.half_bins(i, 0) for i in (0, 9, 10, 29)] == [15, 15, 7, 7]
        assert [peer.half_bins(i, 1) for i in (0, 1, 2, 29)] == [15, 15, 7, 7]

    def test_size_is_tables_lengths_scales_and_streams(self) -> None:
        kv = make(40)
        for chunk, chunks in ((40, 1), (16, 3)):
            size = len(LMCache(SHAPE, ROPE, chunk).encode(kv))
            channels = SHAPE.layers * (SHAPE.key_channels + SHAPE.value_channels)
            fixed = chunks * channels * (33 * 2 + 4) + 40 * 2 * SHAPE.layers * 2
            symbols = 40 * channels
            assert fixed < size < fixed + symbols * 5.2 / 8 + chunks * channels

    def test_error_is_at_most_half_a_step_of_the_tokens_maximum(self) -> None:
        kv = make(33)
        again = LMCache(SHAPE, ROPE, 16).decode(LMCache(SHAPE, ROPE, 16).encode(kv), kv.token_ids, kv.positions)
        worst = np.abs(kv.values - again.values).max((2, 3))
        limit = np.abs(kv.values).max((2, 3)) / np.array([15, 15, 7])[:, None]
        assert (worst <= 0.502 * limit).all()


class TestCacheGen:
    def test_deltas_are_within_half_a_bin_of_the_deviation(self) -> None:
        calibration = [make(seed=s, tokens=120) for s in (5, 6)]
        peer = CacheGen(SHAPE, ROPE).fit(calibration)
        kv = make(50)
        again = peer.decode(peer.encode(kv), kv.token_ids, kv.positions)
        deltas = np.arange(50) % 10 != 0
        for layer, bins in enumerate((0.5, 1.0, 1.5)):
            step = bins * np.concatenate([c.values[layer].ravel() for c in calibration]).std()
            error = np.abs(kv.values[layer] - again.values[layer])[deltas]
            assert error.max() <= 0.501 * step
            assert error.max() > 0.4 * step

    def test_anchors_are_8_bit(self) -> None:
        peer, kv = CacheGen(SHAPE, ROPE).fit([make(seed=5, tokens=120)]), make(50)
        again = peer.decode(peer.encode(kv), kv.token_ids, kv.positions)
        error = np.abs(kv.values - again.values)[:, ::10].max((2, 3))
        assert (error <= 0.51 * np.abs(kv.values[:, ::10]).max((2, 3)) / 127).all()

    def test_values_far_outside_the_profile_are_clipped_not_wrapped(self) -> None:
        peer, kv = CacheGen(SHAPE, ROPE).fit([make(seed=5, tokens=120)]), make(20)
        kv.values[:, 5] = 1e6
        again = peer.decode(peer.encode(kv), kv.token_ids, kv.positions)
        assert (again.values[:, 5] > 0).all()


def test_keys_are_coded_with_rotary_position_applied() -> None:
    kv = make(32)
    rotated = rotate(kv.keys, kv.positions, ROPE)
    data = Float16(SHAPE, ROPE).encode(kv)
    np.testing.assert_array_equal(
        np.frombuffer(data, "<f2", 32 * SHAPE.key_channels), rotated[0].ravel().astype(np.float16)
    )


class TestArithmetic:
    def test_rate_is_the_entropy(self) -> None:
        rng = np.random.default_rng(0)
        p = np.array([[0.9, 0.06, 0.03, 0.01], [0.25, 0.25, 0.25, 0.25]])
        models = rng.integers(0, 2, 40000)
        symbols = np.where(models == 0, rng.choice(4, 40000, p=p[0]), rng.choice(4, 40000, p=p[1]))
        data = arithmetic.encode(symbols, models, arithmetic.cumulative(p))
        ideal = -np.log2(p[models, symbols]).sum() / 8
        assert ideal * 0.999 < len(data) < ideal * 1.002 + 4
        np.testing.assert_array_equal(arithmetic.decode(data, models, arithmetic.cumulative(p)), symbols)

    def test_rate_is_that_of_constriction(self) -> None:
        constriction = pytest.importorskip("constriction")
        p = np.array([0.7, 0.2, 0.05, 0.05], np.float32)
        symbols = np.random.default_rng(1).choice(4, 30000, p=p / p.sum()).astype(np.int32)
        encoder = constriction.stream.queue.RangeEncoder()
        encoder.encode(symbols, constriction.stream.model.Categorical(p, perfect=False))
        ours = arithmetic.encode(symbols, np.zeros(30000), arithmetic.cumulative(p[None]))
        assert len(ours) == pytest.approx(4 * len(encoder.get_compressed()), rel=0.002)

    @pytest.mark.parametrize("n", [0, 1, 2, 63, 1023])
    def test_awkward_lengths_and_skewed_tables(self, n: int) -> None:
        rng = np.random.default_rng(n)
        counts = np.zeros((3, 17))
        counts[0, 16], counts[1, 0], counts[2] = 1e9, 1, rng.random(17)
        tables = arithmetic.cumulative(counts)
        assert (np.diff(tables.astype(int), axis=1) >= 1).all() and (tables[:, -1] == 1 << 16).all()
        symbols, models = rng.integers(0, 17, n), rng.integers(0, 3, n)
        data = arithmetic.encode(symbols, models, tables)
        assert len(data) <= 2 * n + 8
        np.testing.assert_array_equal(arithmetic.decode(data, models, tables), symbols)
