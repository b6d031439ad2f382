"""Calibration on a tiny model, through both engines' protocol: deterministic, usable, and better than no knowledge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cachegen_rag.codec import Codec, fit, importance
from cachegen_rag.codec import calibrate as calibration
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.codec.profile import Importance, Profile
from cachegen_rag.codec.transform import Transform, block_rows
from cachegen_rag.errors import ConfigError, CorruptBitstreamError, ModelError
from cachegen_rag.kernels import cpu
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.models.llama_cpp import LlamaCppModel

TEXT = " ".join(f"Line {i}: the {w} went to the {v}." for i in range(90) for w, v in (("cat", "mat"), ("dog", "fog")))


@pytest.fixture(scope="module")
def model(tiny_gguf: Path):  # type: ignore[no-untyped-def]
    with LlamaCppModel(tiny_gguf, n_ctx=512, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def profile(model: LlamaCppModel) -> Profile:
    return calibrate(model, [TEXT])


def test_calibration_is_deterministic_and_reports(model: LlamaCppModel, profile: Profile) -> None:
    seen: list[tuple[str, int, int]] = []
    again = calibrate(model, [TEXT], progress=lambda what, done, total: seen.append((what, done, total)))
    assert again.hash == profile.hash
    assert len({what for what, _, _ in seen}) >= 4 and all(0 <= done < total for _, done, total in seen)


def test_the_profile_codes_the_models_kv(model: LlamaCppModel, profile: Profile) -> None:
    ids = model.tokenize(TEXT[-700:])[:120]
    with model.session() as session:
        session.decode(ids)
        kv = session.export(0, len(ids))
    codec = Codec(profile)
    spread = float(kv.keys.astype(np.float32).std())
    errors, sizes = [], []
    for level in codec.lossy_levels:
        data = codec.encode(kv, level)
        sizes.append(len(data))
        errors.append(float(np.abs(codec.decode(data, np.float32).keys - kv.keys).mean()))
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)
    assert errors[0] < 0.2 * spread
    assert sizes[0] < 0.6 * len(codec.encode(kv, 0))
    kls = [level.kl for level in profile.levels]
    assert kls == sorted(kls) and profile.levels[profile.default_level - 1].kl == pytest.approx(0.02)


def test_too_little_text_and_refused_models(model: LlamaCppModel) -> None:
    with pytest.raises(ConfigError, match="too little"):
        calibrate(model, ["short"])

    class Refused:
        refusal, name = "its window slides", "windowed"

    with pytest.raises(ModelError, match="its window slides"):
        calibrate(Refused(), [TEXT])  # type: ignore[arg-type]


def correlated(shape: KVShape, tokens: int, seed: int) -> KV:
    """KV whose layers are noisy linear functions of one hidden state."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, 12))
    keys = np.stack([hidden @ maps for maps in MAPS[0]]).reshape(shape.layers, tokens, shape.kv_heads, -1)
    values = np.stack([hidden @ maps for maps in MAPS[1]]).reshape(shape.layers, tokens, shape.kv_heads, -1)
    keys = keys + 0.05 * rng.standard_normal(keys.shape)
    values = values + 0.05 * rng.standard_normal(values.shape)
    ids = np.arange(tokens, dtype=np.int32)
    return KV(keys.astype(np.float32), values.astype(np.float32), ids, ids)


WIDE = KVShape(4, 2, 16, 16)
MAPS = np.random.default_rng(5).standard_normal((2, 4, 12, 32))


def bits(profile: Profile, kv: KV, step: int) -> float:
    from dataclasses import replace

    from cachegen_rag.codec.profile import Level

    codec = Codec(replace(profile, levels=(Level(1, 0.0, 0.0, step),), default_level=1, _bytes=None))
    return len(codec.encode(kv, 1)) * 8 / (len(kv) * kv.shape.elements_per_token)


def test_joint_transforms_find_what_layers_share() -> None:
    samples = [correlated(WIDE, 300, s) for s in range(3)]
    held_out = correlated(WIDE, 300, 99)
    metric = fit.Metric.identity(WIDE)
    cost = {}
    for layers in (1, 4):
        blocks = fit.fit_blocks(samples, metric, layers=layers, width=96)
        profile = fit.fit_models(fit.draft(WIDE, bytes(32), 0, blocks), samples, [-8, -4])
        cost[layers] = bits(profile, held_out, -4)
    assert cost[4] < 0.6 * cost[1]


def test_wide_layers_are_split_into_cells_of_heads() -> None:
    shape = KVShape(2, 6, 96, 64)
    rng = np.random.default_rng(0)
    ids = np.arange(40, dtype=np.int32)
    kv = KV(rng.standard_normal((2, 40, 6, 96), np.float32), rng.standard_normal((2, 40, 6, 64), np.float32), ids, ids)
    blocks = fit.fit_blocks([kv], fit.Metric.identity(shape), layers=2, width=64)
    assert all(cell.channels <= fit.MAX_CELL_WIDTH for block in blocks for cell in block.cells)
    profile = Profile.from_bytes(fit.fit_models(fit.draft(shape, bytes(32), 0, blocks), [kv], [-8]).to_bytes())
    back = Codec(profile).decode(Codec(profile).encode(kv, 1), np.float32)
    assert back.keys.shape == kv.keys.shape


def test_a_metric_decides_where_errors_go() -> None:
    samples = [correlated(WIDE, 400, s) for s in range(2)]
    flat, steep = fit.Metric.identity(WIDE), fit.Metric.identity(WIDE)
    steep.keys[:, :16, :16] *= 100.0  # the first head matters ten times as much

    def errors(metric: fit.Metric) -> np.ndarray:
        blocks = fit.fit_blocks(samples, metric, layers=2, width=64)
        back = calibration.coded(fit.draft(WIDE, bytes(32), 0, blocks), samples[0], 0)
        return ((back.keys - samples[0].keys) ** 2).mean((0, 1, 3))

    plain, weighed = errors(flat), errors(steep)
    assert weighed[0] < 0.2 * weighed[1] and 0.5 < plain[0] / plain[1] < 2


def test_importance_is_learned_and_gives_gains() -> None:
    """Tokens whose first key channel is high are attended more: held-out tokens of that kind get higher gains."""
    samples = [correlated(WIDE, 400, s) for s in range(3)]
    received = [np.exp(0.8 * kv.keys[:, :, 0, 0]).astype(np.float32) / 400 for kv in samples]
    blocks = fit.fit_blocks(samples, fit.Metric.identity(WIDE), layers=2, width=64)
    learned = importance.fit(blocks, samples, received)
    held_out = correlated(WIDE, 200, 50)

    def gain_indices(learned: Importance) -> NDArray[np.uint8]:
        coders = Transform(replace(fit.draft(WIDE, bytes(32), 0, blocks), importance=learned)).coders(0)
        estimates = [cpu.components(block_rows(c.block, held_out), c.forward)[1] for c in coders]
        return importance.gain_indices(learned, estimates)

    indices = gain_indices(learned)
    assert indices.shape == (2, 200) and indices.max() <= 15
    for block in range(2):
        wanted = held_out.keys[2 * block : 2 * block + 2, :, 0, 0].mean(0)
        assert np.corrcoef(indices[block], wanted)[0, 1] > 0.8
    assert np.all(gain_indices(Importance.none(tuple(blocks))) == importance.NEUTRAL)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_gains_are_packed_in_nibbles(tokens: int) -> None:
    indices = np.random.default_rng(tokens).integers(0, 16, (3, tokens)).astype(np.uint8)
    data = importance.pack(indices)
    assert len(data) == 3 * ((tokens + 1) // 2)
    np.testing.assert_array_equal(importance.unpack(memoryview(data), 3, tokens), indices)
    for bad in (data[:-1], data + b"\0"):
        with pytest.raises(CorruptBitstreamError):
            importance.unpack(memoryview(bad), 3, tokens)
    if tokens % 2:
        with pytest.raises(CorruptBitstreamError):
            importance.unpack(memoryview(data[:-1] + bytes([data[-1] | 0x10])), 3, tokens)


def test_attention_counts_what_queries_look_at() -> None:
    shape = KVShape(1, 1, 4, 4)
    keys = np.zeros((1, 5, 1, 4), np.float32)
    keys[0, 3, 0, 0] = 50.0
    kv = KV(keys, keys, np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
    assert kv.shape == shape
    queries = np.zeros((1, 2, 2, 4), np.float32)
    queries[..., 0] = 1
    received = importance.attention(kv, slice(1, 5), queries, 0.5)
    np.testing.assert_allclose(received, [[0, 0, 1, 0]], atol=1e-6)
