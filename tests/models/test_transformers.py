# ruff: noqa: E402
"""The transformers engine on tiny random models: equal to the model itself, spliced or not."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cachegen_rag.errors import (
    ConfigError,
    ContextOverflowError,
    CorruptBitstreamError,
    ModelError,
    ModelLoadError,
    SpliceRefusedError,
)
from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVTarget, Sampling
from cachegen_rag.models.transformers import TransformersModel
from cachegen_rag.rope import from_interleaved, rotate

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": 257,
    "bos_token_id": 256,
    "pad_token_id": 258,
}
SPLICED = {
    "llama": ("LlamaConfig", {}),
    "linear rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
                "rope_theta": 5e5,
            }
        },
    ),
    "yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "rope_theta": 1e4,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3, query and key norms, wide heads": ("Qwen3Config", {"head_dim": 32}),
    "mistral, sliding window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2, some layers sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "gemma2, soft-capped, some layers sliding": ("Gemma2Config", {"sliding_window": 16, "head_dim": 16}),
    "gpt_oss, attention sinks": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3, partial rotary": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "glm, half of the channels in interleaved pairs": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere, interleaved pairs": ("CohereConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "mixtral, experts": ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
}
REFUSED = {
    "learned positions": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 300},
        "rotary",
    ),
    "dynamic NTK": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "NTK",
    ),
    "longrope beyond the switch": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "rope_theta": 1e4,
            }
        },
        "LongRoPE.*n_ctx=256",
    ),
    "no attention interface": ("StableLmConfig", {}, "mask"),
    "two rotary bases": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 16}, "different"),
    "layers without rotary": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}, "layer 1"),
    "recurrent": ("MambaConfig", {"num_hidden_layers": 2, "state_size": 4}, "rotary|layers|state|attention"),
}


def byte_tokenizer():
    """256 bytes, then <bos>, <eos>, <pad>; ids beyond are never text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def make(kind: str, changes: dict, n_ctx: int = 512):
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))  # norms, biases and sinks that are not all alike
    return TransformersModel.from_loaded(model, byte_tokenizer(), n_ctx=n_ctx), model


@pytest.fixture(scope="module")
def llama():
    return make("LlamaConfig", {})


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def direct_logits(model, ids: list[int]) -> np.ndarray:
    """What the model itself says, with its own cache and masks."""
    ours, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).logits[0].numpy()
    finally:
        model.set_attn_implementation(ours)


def fill(target: KVTarget, kv: KV) -> None:
    """What a decoder does: rotate to the target's positions, in the engine's layout."""
    for layer in range(kv.shape.layers):
        keys = rotate(np.asarray(kv.keys[layer]), target.positions, target.rope)
        target.keys[layer][...] = from_interleaved(keys, target.rope)
        target.values[layer][...] = np.asarray(kv.values[layer])


def export(model, before: list[int], ids: list[int]) -> KV:
    with model.session() as s:
        s.decode(before)
        s.decode(ids)
        return s.export(len(before), len(before) + len(ids))


def close(a, b, tolerance=0.02):
    scale = float(np.abs(b).max())
    assert np.abs(a - b).max() <= tolerance * scale, np.abs(a - b).max() / scale


@pytest.mark.parametrize("kind", SPLICED)
def test_decode_take_and_recompute_give_the_models_own_logits(kind):
    model, inner = make(*SPLICED[kind])
    assert model.refusal is None
    prefix, document, question = ids_of(9), ids_of(70, 1), ids_of(12, 2)
    expected = direct_logits(inner, prefix + document + question)
    kv = export(model, prefix, document)
    with model.session() as s:
        s.decode(prefix)
        target = s.stage(np.arange(9, 79, dtype=np.int32))
        fill(target, kv)
        s.commit(target, document)
        s.decode(document[:5])  # recomputed, in one pass with what follows
        s.take(14, 40, document[5:31])
        s.decode(document[31:36])
        s.take(45, 79, document[36:])
        got = s.decode(question, logits=True)
        assert s.length == 91 and s.token_ids == prefix + document + question
        again = s.export(9, 79)
    close(got, expected[-12:])
    close(again.keys, kv.keys)
    close(again.values, kv.values)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_spliced_is_refused_and_answers_by_prefill(kind):
    name, changes, reason = REFUSED[kind]
    model, inner = make(name, changes)
    assert model.refusal is not None
    assert re.search(reason, model.refusal), model.refusal
    ids = ids_of(90)
    with model.session() as s:
        s.decode(ids[:40])
        s.decode(ids[40:70])
        s.truncate(60)
        close(s.decode(ids[60:], logits=True), direct_logits(inner, ids)[60:], 1e-3)
        assert len(list(s.generate(Sampling(max_tokens=3)))) in (1, 2, 3)
        with pytest.raises(SpliceRefusedError, match="not spliced"):
            s.stage(np.arange(4, dtype=np.int32))
        with pytest.raises(SpliceRefusedError):
            s.export(0, 4)


def test_longrope_within_its_switch_is_spliced():
    name, changes, _ = REFUSED["longrope beyond the switch"]
    model, _ = make(name, changes, n_ctx=256)
    assert model.refusal is None


def test_the_self_check_notices_a_rotary_embedding_that_lies(llama):
    _, inner = llama
    torch.manual_seed(7)
    other = transformers.AutoModelForCausalLM.from_config(inner.config)
    other.model.rotary_emb.forward = lambda x, position_ids: inner.model.rotary_emb(x, position_ids * 1.01)
    model = TransformersModel.from_loaded(other, byte_tokenizer(), n_ctx=512)
    assert "not a rotation" in model.refusal
    inner.set_attn_implementation("cachegen_rag")


def test_a_document_moved_to_another_position_has_the_keys_computed_there(llama):
    model, _ = llama
    document = ids_of(20, 3)
    kv = export(model, [], document)
    with model.session() as s:
        target = s.stage(np.arange(300, 320, dtype=np.int32))
        fill(target, kv)
        moved = target.keys[0].copy()
    with model.session() as s:
        s.decode(ids_of(300))
        s.decode(document)
        there = s.export(300, 320)
    # Layer 0 sees no context, so its keys differ by position alone.
    close(moved, from_interleaved(rotate(there.keys[0], target.positions, model.rope), model.rope), 2e-3)
    close(there.keys[0], kv.keys[0], 2e-3)


def test_queued_runs_equal_runs_computed_one_by_one(llama):
    model, _ = llama
    prefix, document = ids_of(10), ids_of(100, 1)
    kv = export(model, prefix, document)
    results = []
    for eager in (False, True):
        with model.session() as s:
            target = s.stage(np.arange(10, 110, dtype=np.int32))
            fill(target, kv)
            s.commit(target)
            s.decode(prefix)
            for at in range(0, 100, 20):
                # Other tokens than the document's: their rows must reach everything behind them.
                s.decode(ids_of(3, at))
                if eager:
                    s.export(0, 0)
                s.take(10 + at + 3, 10 + at + 20, document[at + 3 : at + 20])
            results.append(s.decode([1, 2], logits=True))
    close(results[0], results[1], 1e-4)


def test_positions_that_the_library_lacks_are_not_seen(llama):
    model, _ = llama
    ids = ids_of(40)
    kv = export(model, [], ids)
    kept = np.r_[0:10, 20:40].astype(np.int32)
    pruned = KV(kv.keys[:, kept], kv.values[:, kept], kv.token_ids[kept], kept)
    with model.session() as s:
        target = s.stage(kept)
        fill(target, pruned)
        s.commit(target)
        s.take(0, 40, ids)
        assert s.length == 40
        got = s.decode([7], logits=True)
        back = s.export(5, 30)
    assert back.positions.tolist() == [*range(5), *range(15, 25)]
    close(back.values, pruned.values[:, 5:20], 1e-6)
    # The same from whole rows, where the missing ones are taken out of the mask by hand.
    with model.session() as s:
        s.decode(ids)
        s.export(0, 0)
        s._cells = kept.tolist()
        index = torch.from_numpy(kept.astype(np.int64))
        for memory in (s._cache.keys, s._cache.values):
            memory[:, :, :30] = memory[:, :, index].clone()
        close(got, s.decode([7], logits=True), 1e-4)


def test_the_library_stays_when_the_prompt_is_cut_or_computed_over(llama):
    model, _ = llama
    ids = ids_of(60)
    kv = export(model, [], ids)
    with model.session() as s:
        target = s.stage(np.arange(60, dtype=np.int32))
        fill(target.rows(0, 30), kv[0:30])
        fill(target.rows(30, 60), kv[30:60])
        s.commit(target)
        s.decode(ids_of(60, 9))
        s.export(0, 60)
        s.truncate(0)
        s.take(0, 60, ids)
        s.truncate(30)
        assert s.length == 30 and s.token_ids == ids[:30]
        s.take(30, 60, ids[30:])
        close(s.export(0, 60).keys, kv.keys, 1e-5)


def test_queries_meet_keys(llama):
    model, inner = llama
    ids = ids_of(30)
    with model.session() as s:
        s.decode(ids[:20])
        logits, queries = s.decode_with_queries(ids[20:])
        kv = s.export(0, 30)
    close(logits, direct_logits(inner, ids)[20:])
    assert queries.shape == (3, 10, 4, 16)
    # Scores from our queries and keys, rotated by us, are the model's own attention.
    rope = model.rope
    q = rotate(queries[1], np.arange(20, 30), rope)
    k = np.repeat(rotate(kv.keys[1], np.arange(30), rope), 2, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / 4.0
    scores[:, np.arange(30)[None, :] > np.arange(20, 30)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    inner.set_attn_implementation("eager")
    attentions = inner(input_ids=torch.tensor([ids]), output_attentions=True).attentions[1][0, :, 20:].detach().numpy()
    inner.set_attn_implementation("cachegen_rag")
    close(weights, attentions, 5e-3)


def test_greedy_generation_equals_transformers_own(llama):
    model, inner = llama
    ids = ids_of(50)
    own = inner.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, 50:].tolist()
    with model.session() as s:
        s.decode(ids)
        tokens = list(s.generate(Sampling(max_tokens=20, logprobs=3)))
    assert [t.id for t in tokens] == own
    assert tokens[-1].finish_reason == ("stop" if own[-1] == 257 else "length")
    assert all(t.top_logprobs[0][0] == t.id and t.logprob == pytest.approx(t.top_logprobs[0][1]) for t in tokens)
    assert "".join(t.text for t in tokens) == model._load().visible_text(own)


def generated(model, ids, **options) -> list:
    with model.session() as s:
        s.decode(ids)
        return list(s.generate(Sampling(**options)))


def test_seeds_repeat_and_temperature_varies(llama):
    model, _ = llama
    options = {"max_tokens": 30, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    runs = [[t.id for t in generated(model, ids_of(20), seed=seed, **options)] for seed in (1, 1, 2, None, None)]
    assert runs[0] == runs[1]
    assert len({tuple(r) for r in runs}) == 4


def test_sampling_keeps_to_top_k(llama):
    model, _ = llama
    for token in generated(
        model, ids_of(20), max_tokens=20, temperature=5.0, top_k=2, min_p=0.0, top_p=1.0, logprobs=2
    ):
        assert token.id in [i for i, _ in token.top_logprobs]


def test_penalties_look_back_over_spliced_tokens(llama):
    model, _ = llama
    ids = ids_of(40)
    with model.session() as s:
        s.decode(ids)
        likely = next(iter(s.generate(Sampling(max_tokens=1)))).id
    document = [likely, *ids_of(19, 4)]
    kv = export(model, [], document)

    def first(**options) -> int:
        with model.session() as s:
            target = s.stage(np.arange(20, dtype=np.int32))
            fill(target, kv)
            s.commit(target)
            s.take(0, 20, document)
            s.decode([5])
            return next(iter(s.generate(Sampling(max_tokens=1, **options)))).id

    free = first()
    document[3] = free  # as if the document held what the model wants to say
    for options in ({"frequency_penalty": 100.0}, {"presence_penalty": 100.0}, {"repeat_penalty": 1e6}):
        assert first(**options) != free
        assert first(repeat_last_n=5, **options) == free, "the token lies further back than repeat_last_n"


def test_generation_ends_before_a_stop_string(llama):
    model, _ = llama
    ids = ids_of(50)
    whole = "".join(t.text for t in generated(model, ids, max_tokens=30))
    stop = next(whole[i : i + 2] for i in range(3, len(whole) - 2) if "\ufffd" not in whole[i : i + 2])
    tokens = generated(model, ids, max_tokens=30, stop=(stop,))
    assert "".join(t.text for t in tokens) == whole[: whole.index(stop)]
    assert tokens[-1].finish_reason == "stop"


def test_generation_stops_where_the_context_ends():
    model, _ = make("LlamaConfig", {}, n_ctx=32)
    with model.session() as s:
        s.decode(ids_of(30))
        tokens = list(s.generate(Sampling()))
        assert len(tokens) <= 2
        with pytest.raises(ContextOverflowError, match="32"):
            s.decode([1, 2, 3])
        with pytest.raises(ContextOverflowError):
            s.stage(np.asarray([40], dtype=np.int32))


def test_misuse_is_named(llama):
    model, _ = llama
    with model.session() as s:
        with pytest.raises(ModelError, match="decode at least one token"):
            s.generate(Sampling())
        s.decode([1])
        with pytest.raises(SpliceRefusedError, match="no row for position 1"):
            s.take(1, 2, [7])
        target = s.stage(np.asarray([1], dtype=np.int32))
        for rows in (*target.keys, *target.values):
            rows[...] = 1
        target.values[2][0, 1, 3] = np.nan
        with pytest.raises(CorruptBitstreamError, match="layer 2"):
            s.commit(target)
        target.values[2][0, 1, 3] = 0
        s.commit(target)
        s.take(1, 2, [7])
        with pytest.raises(ModelError, match="decode at least one token"):
            s.generate(Sampling())
        s.decode([1])
        with pytest.raises(ModelError, match="only the 1 leading tokens"):
            s.keep()
        with pytest.raises(ModelError, match="vocabulary of 300"):
            s.decode([300])
        with pytest.raises(ModelError, match="truncate"):
            s.truncate(9)
        with pytest.raises(ConfigError, match="grammar"):
            s.generate(Sampling(grammar='root ::= "a"'))
        with pytest.raises(ModelError, match="do not continue"):
            s.take(5, 6, [1])
        with pytest.raises(ModelError, match="strictly increasing"):
            s.stage(np.asarray([3, 3], dtype=np.int32))
        with pytest.raises(ModelError, match="outside"):
            s.export(0, 9)
    with pytest.raises(ModelError, match="ended"):
        s.decode([1])
    with pytest.raises(ModelLoadError, match="no-such-model"):
        _ = TransformersModel("no-such-model/at-all").shape


def test_a_kept_run_begins_a_later_prompt(llama):
    model, inner = llama
    ids = ids_of(80)
    with model.session() as s:
        assert s.reuse(ids) == 0
        s.decode(ids[:50])
        assert s.keep(40)
    other = [*ids[:30], *ids_of(30, 5)]
    for prompt, kept in ((ids, 40), (other, 30), (ids, 40)):
        with model.session() as s:
            assert s.reuse(prompt) == kept == s.length
            close(s.decode(prompt[kept:], logits=True), direct_logits(inner, prompt)[kept:])
            with pytest.raises(ModelError, match="begins a prompt"):
                s.reuse(prompt)
    with model.session() as s:
        s.decode(ids_of(1100 - 700, 8))
        assert s.keep() and not s._kept.save(list(range(2049)), s._cache)
    with model.session() as s:
        assert s.reuse(ids) == 40, "both fit"


def test_sessions_wait_for_each_other(llama):
    model, _ = llama
    inside, order = threading.Event(), []

    def second():
        inside.wait(5)
        with model.session() as s:
            order.append("second")
            s.decode([1])

    thread = threading.Thread(target=second)
    thread.start()
    with model.session() as s:
        inside.set()
        s.decode(ids_of(100))
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_saved_model_loads_from_its_folder_with_the_same_identity(llama, tmp_path):
    _, inner = llama
    for name in ("a", "b"):
        inner.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    one, two = (TransformersModel(tmp_path / name, n_ctx=64) for name in ("a", "b"))
    assert one.fingerprint == two.fingerprint and one.fingerprint.digest() == two.fingerprint.digest()
    assert one.name == "a" and one.eos_id == 257 and one.bos_id is None and one.chat_template is None
    assert one.tokenize("a<eos>") != one.tokenize("a<eos>", special=True)
    assert one.detokenize(one.tokenize("naïve 🙂")) == "naïve 🙂"
    weights = one.output_weights()
    assert len(weights) == 3 and weights[0].shape == (64, 64)
    two.close()
    two.close()
    with pytest.raises(ModelError, match="closed"):
        _ = two.shape
