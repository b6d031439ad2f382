"""One GGUF file, two engines: the same identity, the same KV, each other's stored documents."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVTarget
from cachegen_rag.models.transformers import TransformersModel
from cachegen_rag.rope import from_interleaved, rotate


@pytest.fixture(scope="module")
def tiny_torch(tiny_gguf):
    model = TransformersModel(tiny_gguf, n_ctx=2048)
    yield model
    model.close()


def fill(target: KVTarget, kv: KV) -> None:
    for layer in range(kv.shape.layers):
        keys = rotate(kv.keys[layer], target.positions, target.rope)
        target.keys[layer][...] = from_interleaved(keys, target.rope)
        target.values[layer][...] = kv.values[layer]


def answer(model, prefix, document, question, kv=None):
    """Logits of the question; the document is decoded, or taken from ``kv``."""
    with model.session() as s:
        s.decode(prefix)
        if kv is None:
            s.decode(document)
        else:
            target = s.stage(np.arange(len(prefix), len(prefix) + len(document), dtype=np.int32))
            fill(target, kv)
            s.commit(target)
            s.take(len(prefix), len(prefix) + len(document), document)
        return s.decode(question, logits=True)


def document_of(model, prefix, document):
    with model.session() as s:
        s.decode(prefix)
        s.decode(document)
        return s.export(len(prefix), len(prefix) + len(document))


def kl(reference, other):
    def log_softmax(x):
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_both_engines_call_the_file_the_same(tiny_torch, tiny_model):
    assert tiny_torch.refusal is None
    assert tiny_torch.fingerprint == tiny_model.fingerprint
    assert tiny_torch.fingerprint.digest() == tiny_model.fingerprint.digest()
    assert tiny_torch.bos_id == tiny_model.bos_id
    text = "What is the name of the river in the passage? naïve 🙂"
    assert tiny_torch.tokenize(text) == tiny_model.tokenize(text)


def test_both_engines_compute_the_same_kv_and_take_each_others(tiny_torch, tiny_model):
    rng = np.random.default_rng(3)
    prefix, document, question = (rng.integers(10, 250, n).tolist() for n in (8, 90, 12))
    kvs = [document_of(m, prefix, document) for m in (tiny_torch, tiny_model)]
    for name in ("keys", "values"):
        a, b = (np.asarray(getattr(kv, name), np.float32) for kv in kvs)
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max(), name
    for model, foreign in ((tiny_torch, kvs[1]), (tiny_model, kvs[0])):
        reference = answer(model, prefix, document, question)
        assert kl(reference, answer(model, prefix, document, question, foreign)) < 1e-4
        assert kl(reference, answer(model, prefix, document, question, _wrong(foreign))) > 1e-2


def _wrong(kv: KV) -> KV:
    """The same values at the wrong tokens: what the test above must notice."""
    return KV(kv.keys, kv.values[:, ::-1], kv.token_ids, kv.positions)


@pytest.mark.real
def test_a_document_stored_by_one_engine_serves_the_other(real_model, real_gguf):
    """Coded from llama.cpp's KV at the default level, spliced into transformers: as good as that level is by itself."""
    from cachegen_rag.codec import Codec
    from cachegen_rag.codec.profile import shipped_profile

    profile = shipped_profile(real_model.fingerprint)
    if profile is None:
        pytest.skip("no profile ships for the real model")
    other = TransformersModel(real_gguf, n_ctx=1024)
    assert other.refusal is None and other.fingerprint.digest() == real_model.fingerprint.digest()
    codec = Codec(profile, real_model.fingerprint.digest())
    text = " ".join(
        f"The river {name} rises in the hills of {town}, runs {n} miles to the sea and turns {n % 7} mills on its way."
        for n, (name, town) in enumerate(
            [("Aune", "Dole"), ("Bess", "Corm"), ("Tavel", "Ersk"), ("Lune", "Holt")] * 3, 31
        )
    )
    prefix = real_model.tokenize("<|im_start|>user\nRead this:\n", special=True)
    document = real_model.tokenize(text)[:240]
    question = real_model.tokenize("\nHow many miles does the river Tavel run to the sea, and where does it rise?")
    data = codec.encode(document_of(real_model, prefix, document), codec.default_level)
    foreign = codec.decode(data, np.float32)
    own = kl(answer(real_model, prefix, document, question), answer(real_model, prefix, document, question, foreign))
    reference = answer(other, prefix, document, question)
    crossed = kl(reference, answer(other, prefix, document, question, foreign))
    # llama.cpp computes with 8-bit activations: the two engines differ by some hundredths even without a codec.
    assert crossed <= 1.5 * own + 0.02, (crossed, own)
    assert kl(reference, answer(other, prefix, document, question, _wrong(foreign))) > 5 * (crossed + 0.01)
    other.close()
