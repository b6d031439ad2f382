"""The gate: the least budget that meets the threshold, closed where none does, kept in a store; shadow checks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cachegen_rag import gate
from cachegen_rag.errors import ConfigError, ProfileError
from cachegen_rag.gate import Gate, Shadow
from cachegen_rag.kv import KV
from cachegen_rag.recompute import Heads
from cachegen_rag.stores.base import open_store
from cachegen_rag.trial import place
from cachegen_rag.warm import WarmContext, context_ids


def measure(model, **options) -> Gate:
    warm = WarmContext((context_ids(model, ["the river"]), context_ids(model, ["a king"])), model.n_ctx)
    return gate.measure(model, **{"warm": warm, "questions": 1, "document_length": 24, "method": Heads(), **options})


def noise(scale: float):
    """A coder that spoils what it stores."""

    def coder(kv: KV):
        rng = np.random.default_rng(0)
        spoilt = kv.values + scale * rng.normal(size=kv.values.shape).astype(np.float32)
        return place(replace(kv, values=spoilt))

    return coder


def test_the_first_budget_that_meets_the_threshold_is_taken(tiny_model):
    strict = measure(tiny_model, threshold=0.0)
    assert not strict.open and strict.budget is None
    assert list(strict.kl) == ["0", "0.05", "0.1", "0.15", "0.3"]
    assert strict.kl["0.3"] < strict.kl["0"]
    assert "KL" in strict.refusal and "exact prefixes" in strict.refusal
    between = (strict.kl["0.3"] + strict.kl["0"]) / 2
    needed = measure(tiny_model, threshold=between)
    assert needed.open and needed.refusal is None and needed.budget > 0
    assert all(value > between for budget, value in needed.kl.items() if float(budget) < needed.budget)
    assert needed.kl[f"{needed.budget:g}"] <= between
    assert measure(tiny_model, threshold=1.0).budget == 0.0


def test_the_gate_sees_what_the_codec_does(tiny_model):
    clean, spoilt = (measure(tiny_model, threshold=1e9, coder=noise(scale)).kl["0"] for scale in (0.0, 2.0))
    assert spoilt > 4 * clean


def test_a_refused_model_and_a_short_context_get_a_closed_gate(tiny_path):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    for options, n_ctx in (({"arch": "gemma3"}, 1024), ({}, 64)):
        with LlamaCppModel(tiny_path(**options), n_ctx=n_ctx, n_threads=1) as model:
            assert (model.refusal is None) == (not options)
            warm = WarmContext((context_ids(model, ["the river"]),), model.n_ctx)
            assert not gate.measure(model, warm=warm, questions=1).open


def test_no_budgets_is_an_error(tiny_model):
    with pytest.raises(ConfigError, match="budget"):
        measure(tiny_model, budgets=())


EXAMPLE = Gate("ab" * 32, 0.1, 0.15, {"0": 0.2, "0.15": 0.09}, 4)


def test_a_gate_survives_its_bytes():
    assert Gate.from_bytes(EXAMPLE.to_bytes()) == EXAMPLE
    closed = replace(EXAMPLE, budget=None)
    assert Gate.from_bytes(closed.to_bytes()) == closed


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff", EXAMPLE.to_bytes()[:-1], b"[" * 100_000,
     json.dumps({"fingerprint": "a", "threshold": "x", "budget": None, "kl": {}, "questions": 1}).encode(),
     json.dumps({"fingerprint": "a", "threshold": 1, "budget": None, "kl": [], "questions": 1}).encode()],
)  # fmt: skip
def test_bytes_that_are_no_gate_are_refused(data):
    with pytest.raises(ProfileError):
        Gate.from_bytes(data)


def test_a_store_keeps_the_gate_of_each_model(tiny_model):
    store = open_store("memory://")
    fingerprint = tiny_model.fingerprint
    other = replace(fingerprint, context="00" * 32)
    kept = replace(EXAMPLE, fingerprint=fingerprint.digest().hex())
    assert gate.load(store, fingerprint) is None
    gate.save(store, fingerprint, kept)
    assert gate.load(store, fingerprint) == kept
    assert gate.load(store, other) is None
    assert gate.load(store, fingerprint, salt="tenant") is None
    gate.save(store, other, kept)  # a gate under the name of another model is not believed
    assert gate.load(store, other) is None
    store.delete("cas", next(iter(_objects(store, fingerprint))))
    assert gate.load(store, fingerprint) is None


def _objects(store, fingerprint):
    from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Manifest

    pointer = store.get("ac", gate.key(fingerprint), max_bytes=MAX_MANIFEST_BYTES)
    return [segment.sha256 for segment in Manifest.from_bytes(pointer).segments()]


def test_shadow_checks_a_fraction_and_counts_agreement():
    assert not any(Shadow(0.0).drawn() for _ in range(50))
    assert all(Shadow(1.0).drawn() for _ in range(50))
    shadow = Shadow(0.25, seed=1)
    assert 180 < sum(shadow.drawn() for _ in range(1000)) < 320
    assert shadow.agreement is None
    assert shadow.compare([1, 2, 3], [1, 2, 3]) == 1.0
    assert shadow.compare([1, 2, 9], [1, 2, 3, 4]) == 0.5
    assert shadow.compare([], []) == 1.0
    assert shadow.compare([7], [8]) == 0.0
    assert (shadow.checked, shadow.agreed, shadow.agreement) == (4, 2, 0.5)
    with pytest.raises(ConfigError, match="fraction"):
        Shadow(1.5)
