"""The learned correction: finds a linear difference, keeps its bytes, is part of what documents are stored under."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachegen_rag.correction import SKIP, Correction, Fit, shipped_correction
from cachegen_rag.errors import ConfigError, EncodeError, ProfileError
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.prompt import Document, plain_prompt
from cachegen_rag.trial import learn_correction
from cachegen_rag.warm import WarmContext, context_ids

SHAPE = KVShape(2, 2, 8, 8)


def random_kv(tokens: int, seed: int, shape: KVShape = SHAPE) -> KV:
    rng = np.random.default_rng(seed)
    size = (shape.layers, tokens, shape.kv_heads)
    ids = np.arange(tokens, dtype=np.int32)
    return KV(
        rng.normal(size=(*size, shape.key_dim)).astype(np.float32),
        rng.normal(size=(*size, shape.value_dim)).astype(np.float32),
        ids,
        ids,
    )


def shifted(kv: KV) -> KV:
    """Values that differ by a fixed linear function of keys and values, of rank 2, and a constant."""
    rng = np.random.default_rng(99)
    layers, tokens = kv.values.shape[:2]
    features = np.concatenate([kv.keys.reshape(layers, tokens, -1), kv.values.reshape(layers, tokens, -1)], axis=2)
    change = features @ rng.normal(size=(32, 2)) @ rng.normal(size=(2, 16)) * 0.1 + 0.3
    return replace(kv, values=(kv.values + change.reshape(kv.values.shape)).astype(np.float32))


def fitted(**options) -> Correction:
    fit = Fit(SHAPE)
    for seed in range(8):
        kv = random_kv(60, seed)
        fit.add(kv, shifted(kv))
    return fit.solve(**options)


def error(a: KV, b: KV) -> float:
    return float(np.square(a.values - b.values).mean())


def test_a_linear_difference_is_found_and_carries_over_to_other_documents():
    kv = random_kv(40, 1000)
    wanted = shifted(kv)
    exact = fitted(ridge=1e-4, rank=16).apply(kv)
    assert error(exact, wanted) < 0.01 * error(kv, wanted)
    assert exact.keys.tobytes() == kv.keys.tobytes() and exact.values.dtype == np.float32
    careful = fitted(ridge=0.3).apply(kv)
    assert error(exact, wanted) < error(careful, wanted) < 0.5 * error(kv, wanted)
    low = fitted(ridge=1e-4, rank=1).apply(kv)
    assert error(exact, wanted) < error(low, wanted) < error(kv, wanted)


def test_first_tokens_and_outliers_hardly_count():
    fit = Fit(SHAPE)
    for seed in range(8):
        kv = random_kv(60, seed)
        wanted = shifted(kv)
        wanted.values[:, :SKIP] = 1e6
        wanted.values[:, 30] += 1e3
        fit.add(kv, wanted)
    kv = random_kv(40, 1000)
    assert error(fit.solve(ridge=1e-3, rank=16).apply(kv), shifted(kv)) < 0.3 * error(kv, shifted(kv))


def test_nothing_to_correct_changes_nothing():
    fit = Fit(SHAPE)
    kv = random_kv(50, 3)
    fit.add(kv, kv)
    assert error(fit.solve().apply(kv), kv) < 1e-9


def test_a_correction_survives_its_bytes():
    correction = fitted()
    again = Correction.from_bytes(correction.to_bytes())
    assert again.hash == correction.hash and again.shape == SHAPE
    kv = random_kv(5, 7)
    assert again.apply(kv).values.tobytes() == correction.apply(kv).values.tobytes()


@given(st.data())
def test_damaged_bytes_are_refused_or_are_another_correction(data):
    raw = bytearray(_BYTES)
    kind = data.draw(st.sampled_from(["cut", "flip", "more"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if kind == "cut":
        raw = raw[:at]
    elif kind == "more":
        raw += b"\0" * (at + 1)
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = Correction.from_bytes(bytes(raw))
    except ProfileError:
        return
    assert kind == "flip" and found.hash != Correction.from_bytes(_BYTES).hash


_BYTES = fitted(rank=2).to_bytes()


def test_misuse_is_named():
    with pytest.raises(ConfigError, match="learn from"):
        Fit(SHAPE).solve()
    with pytest.raises(EncodeError, match="same document"):
        Fit(SHAPE).add(random_kv(5, 0), random_kv(6, 0))
    with pytest.raises(EncodeError, match="this correction is for"):
        fitted().apply(random_kv(5, 0, KVShape(2, 1, 8, 8)))


def test_documents_are_corrected_when_they_are_computed_and_stored_under_another_name(tiny_model):
    shape = tiny_model.shape
    fit = Fit(shape)
    for seed in range(3):
        kv = random_kv(40, seed, shape)
        fit.add(kv, replace(kv, values=kv.values + 1))
    plain = WarmContext((context_ids(tiny_model, ["the river"]),), tiny_model.n_ctx)
    corrected = replace(plain, correction=fit.solve())
    assert plain.digest != corrected.digest
    document = tiny_model.tokenize("the name of the stone")
    with tiny_model.session() as session:
        a = plain.compute(session, document)
    with tiny_model.session() as session:
        b = corrected.compute(session, document)
    assert np.abs(a.keys - b.keys).max() < 2e-3
    assert (b.values - a.values).mean() > 0.1


def test_learned_from_prompts_it_brings_documents_closer_to_what_they_are_there(tiny_model):
    warm = WarmContext((context_ids(tiny_model, ["the river"]),), tiny_model.n_ctx)
    texts = ["the king of the city on the river", "science and the name of the stone", "a question about the model"]

    def prompt(*order: int):
        parts = [part for n in order for part in ("\n\n", Document(texts[n] * 3))]
        return plain_prompt(tiny_model, [*parts, "what is it?"])

    correction = learn_correction(tiny_model, warm, [prompt(0, 1, 2), prompt(2, 0, 1)], ridge=0.1)
    other = prompt(1, 2, 0)
    with tiny_model.session() as session:
        session.decode(other.token_ids)
        wanted = session.export(0, session.length)
    for index in other.documents[1:]:
        rows = wanted[other.offsets[index] : other.offsets[index + 1]]
        with tiny_model.session() as session:
            stored = warm.compute(session, other.segments[index].token_ids)
        assert error(correction.apply(stored), rows) < 0.9 * error(stored, rows)


def test_a_model_of_another_family_gets_no_shipped_correction(tiny_model):
    assert shipped_correction(tiny_model.fingerprint) is None
    assert WarmContext.for_model(tiny_model).correction is None


@pytest.mark.real
def test_the_small_model_has_a_shipped_correction(real_model):
    correction = shipped_correction(real_model.fingerprint)
    assert correction is not None and correction.shape == real_model.shape
    assert WarmContext.for_model(real_model).correction.hash == correction.hash
    assert WarmContext.for_model(real_model, correction=None).digest != WarmContext.for_model(real_model).digest
