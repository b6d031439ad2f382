"""The warm context: canonical, the engine's own start of a prompt, averaged, and the same for batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cachegen_rag.errors import ConfigError, ContextOverflowError
from cachegen_rag.prompt import DEFAULT_SEPARATOR
from cachegen_rag.warm import WarmContext, context_ids, passages


def short(model, *texts: str) -> WarmContext:
    """Contexts of a few words: the real ones are long for tests."""
    return WarmContext(tuple(context_ids(model, [text]) for text in texts), model.n_ctx)


def test_contexts_are_prompts_that_end_where_a_document_begins(tiny_model):
    warm = WarmContext.for_model(tiny_model, contexts=2, passages_each=1)
    separator = tuple(tiny_model.tokenize(DEFAULT_SEPARATOR))
    for ids, passage in zip(warm.contexts, passages(), strict=False):
        assert ids[-len(separator) :] == separator
        assert passage in tiny_model.detokenize(ids)
    assert warm.contexts[0] != warm.contexts[1]
    assert warm.tokens == max(map(len, warm.contexts))


def test_the_digest_is_the_contexts_and_nothing_else(tiny_model):
    a, b = (WarmContext.for_model(tiny_model, contexts=2, passages_each=1) for _ in range(2))
    assert a.digest == b.digest and len(a.digest) == 64
    assert a.digest != WarmContext.for_model(tiny_model, contexts=1, passages_each=2).digest
    assert a.digest == replace(a, n_ctx=99).digest


def test_enough_passages_are_shipped(tiny_model):
    assert len(passages()) >= 6
    WarmContext.for_model(tiny_model)
    with pytest.raises(ConfigError, match="passages"):
        WarmContext.for_model(tiny_model, contexts=len(passages()) + 1, passages_each=1)


def test_a_document_is_the_mean_over_the_contexts(tiny_model):
    warm = short(tiny_model, "the river", "a king and his city")
    document = tiny_model.tokenize("the name of the stone is given first")
    with tiny_model.session() as session:
        kv = warm.compute(session, document)
    expected = []
    for context in warm.contexts:
        with tiny_model.session() as session:
            session.decode(context)
            session.decode(document)
            expected.append(session.export(len(context), len(context) + len(document)))
    for name in ("keys", "values"):
        mean = np.mean([np.asarray(getattr(e, name), np.float32) for e in expected], axis=0)
        assert np.abs(getattr(kv, name) - mean).max() < 2e-3
        assert np.abs(getattr(expected[0], name) - mean).max() > 2e-3
        assert getattr(kv, name).dtype == np.float32
    assert kv.token_ids.tolist() == document and kv.positions.tolist() == list(range(len(document)))


def test_a_batch_gives_what_single_documents_give(tiny_model):
    warm = short(tiny_model, "the river", "a king and his city")
    documents = [tiny_model.tokenize(t) for t in ("the name of the stone", "a", "second passage about science")]
    with tiny_model.session() as session:
        batch = list(warm.compute_many(session, documents))
    for document, kv in zip(documents, batch, strict=True):
        with tiny_model.session() as session:
            single = warm.compute(session, document)
        assert kv.token_ids.tolist() == list(document)
        assert np.abs(single.keys - kv.keys).max() < 2e-3 and np.abs(single.values - kv.values).max() < 2e-3


def test_no_context_at_all_is_a_document_alone(tiny_path):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    for bos in (None, "<s>"):
        with LlamaCppModel(tiny_path(bos=bos), n_ctx=256, n_threads=1) as model:
            warm = WarmContext.for_model(model, contexts=0)
            assert warm.contexts == (() if bos is None else (model.bos_id,),)
            document = model.tokenize("the name of the stone")
            with model.session() as session:
                kv = warm.compute(session, document)
            assert len(kv) == len(document)


def test_a_long_document_stands_behind_a_shorter_context(tiny_gguf):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1) as model:
        warm = short(model, "the river and the king of the city")
        assert 20 < warm.tokens < 60
        document = (model.tokenize("the name of the stone is given ") * 20)[:60]
        other = document[:10]
        with model.session() as session:
            kv, second = warm.compute_many(session, [document, other])
        with model.session() as session:
            session.decode(warm.contexts[0][:4])
            session.decode(document)
            expected = session.export(4, 64)
        assert np.abs(kv.keys - expected.keys).max() < 2e-3
        with model.session() as session:
            assert np.abs(second.keys - warm.compute(session, other).keys).max() < 2e-3
            with pytest.raises(ContextOverflowError, match="65 tokens"):
                warm.compute(session, [*document, 1, 1, 1, 1, 1])


def test_a_template_that_refuses_the_chat_gets_the_passages_alone(tiny_path):
    from cachegen_rag.models.llama_cpp import LlamaCppModel

    with LlamaCppModel(tiny_path(chat_template="{{ raise_exception('no') }}"), n_ctx=64, n_threads=1) as model:
        ids = context_ids(model, ["the river"])
        assert model.detokenize(ids) == f"{DEFAULT_SEPARATOR}the river{DEFAULT_SEPARATOR}"
