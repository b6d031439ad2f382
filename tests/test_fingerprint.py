"""Identities: the same on every machine, different for every model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cachegen_rag.codec.profile import family
from cachegen_rag.fingerprint import ModelFingerprint, canonical_bytes, document_key
from cachegen_rag.kv import KVShape
from cachegen_rag.rope import RopeSpec

MODEL = ModelFingerprint("aa" * 32, "bb" * 32, KVShape(2, 1, 64, 64), RopeSpec.plain(64, 10000.0))


def test_digests_are_pinned():
    """Every store in use is keyed by them."""
    assert MODEL.digest().hex() == "9c6a63eb000c80cd25dde04cfdb9fae4e792633fab2605f220e89883004f925c"
    assert family(MODEL).hex() == "5ed473d55636aa12a747015133982f6e48ff7e02d0564ff3fb9d9ff7a217bb44"
    key = document_key(MODEL.digest(), [1, 2, 3], profile="p", salt="s")
    assert key == "ab4cdd9977540496490ae746292acb4182f944bfbd533b55293f4dedd6940597"


@pytest.mark.parametrize("rotary_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("base", [1e4, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
def test_the_last_bits_of_frequencies_play_no_part(rotary_dim, base, scale):
    """``base ** x`` has other last bits on other CPUs; a store is shared by all of them."""
    rope = RopeSpec.plain(rotary_dim, base, scale=scale)
    exact, model = np.array(rope.inv_freq), dataclasses.replace(MODEL, rope=rope)
    for ulps in (-4, -1, 1, 4):
        frequencies = (exact + ulps * np.spacing(exact)).tolist()
        other = dataclasses.replace(MODEL, rope=RopeSpec(tuple(frequencies), rope.layout))
        assert other.rope != rope
        assert other.digest() == model.digest() and family(other) == family(model)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "ab" * 32},
        {"tokenizer": "ab" * 32},
        {"shape": KVShape(2, 1, 64, 32)},
        {"rope": RopeSpec.plain(64, 10001.0)},
        {"rope": RopeSpec.plain(64, 10000.0, scale=0.5)},
        {"rope": RopeSpec.plain(64, 10000.0, layout="half")},
        {"kv_dtype": "bf16"},
        {"adapters": ("x",)},
        {"context": "c"},
        {"runtime": "r"},
    ],
)
def test_any_other_field_is_another_model(change):
    assert dataclasses.replace(MODEL, **change).digest() != MODEL.digest()


def test_encodings_are_unambiguous():
    values = [None, True, False, 0, 1, -1, 1.0, "", "1", b"", b"1", [], [1], [[1]], [1, 1], ["ab", "c"], ["a", "bc"]]
    assert len({canonical_bytes(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="complex"):
        canonical_bytes(1j)


def test_keys_tell_tokens_profiles_and_tenants_apart():
    fingerprint = MODEL.digest()
    given = [([1, 2], "", ""), ([1, 3], "", ""), ([1], "", ""), ([1, 2], "p", ""), ([1, 2], "", "p"), ([], "", "")]
    assert len({document_key(fingerprint, ids, profile=p, salt=s) for ids, p, s in given}) == len(given)
    assert document_key(fingerprint, np.array([1, 2])) == document_key(fingerprint, [1, 2])
