"""Which models are spliced, which are refused and why; the refused still answer by plain prefill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splicing import TEXT, answer, export, splice, text_logits

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.models import llama_check, llama_cpp, llama_native
from cachegen_rag.models.base import Sampling
from cachegen_rag.models.llama_cpp import LlamaCppModel
from cachegen_rag.rope import RopeSpec

SPLICED = {
    "llama": {},
    "f16 weights": {"dtype": np.float16},
    "large base": {"rope_base": 500000.0},
    "neox": {"arch": "qwen2"},
    "normed keys": {"arch": "qwen3"},
    "partial": {"arch": "stablelm", "rotary_dim": 16},
    "linear": {"rope_scaling": "linear"},
    "yarn": {"rope_scaling": "yarn", "rope_original_context": 256},
    "llama 3": {"llama3_factors": True},
    "one kv head": {"kv_heads": 1},
    "head of 64": {"heads": 2, "kv_heads": 2, "head_dim": 64},
    "one layer": {"layers": 1},
}
REFUSED = {
    "sliding window": ({"arch": "gemma3"}, {}, "sliding window of 64"),
    "recurrent": ({"arch": "mamba"}, {}, "recurrent"),
    "hybrid": ({"arch": "jamba", "layers": 4}, {}, "hybrid"),
    "m-rope": ({"arch": "qwen2vl"}, {}, "M-RoPE"),
    "layers differ": ({"arch": "deci", "kv_heads": [2, 1, 2]}, {}, "keys of layer 1: found 64, expected 128"),
    "quantized keys": ({}, {"kv_type": "q8_0"}, "q8_0"),
    "f32 keys": ({}, {"kv_type": "f32"}, "f32"),
}


@pytest.mark.parametrize("kind", SPLICED)
def test_spliced(tiny_path: Callable[..., Path], kind: str) -> None:
    with LlamaCppModel(tiny_path(**SPLICED[kind]), n_ctx=1024, n_threads=1) as model:
        assert model.refusal is None
        prefix, document, question = [1, 2, 3], model.tokenize(TEXT * 8), [9, 8]
        expected = text_logits(model, prefix, document, question)
        kv = export(model, prefix, document)
        with model.session() as session:
            session.decode(prefix)
            splice(session, kv, len(prefix))
            np.testing.assert_allclose(session.decode(question, logits=True), expected, atol=5e-3)
        far = export(model, model.tokenize(TEXT * 30), document)  # layer 0 knows nothing of its context
        np.testing.assert_allclose(far.keys[0], kv.keys[0], atol=8e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_but_answers(tiny_path: Callable[..., Path], kind: str) -> None:
    spec, options, reason = REFUSED[kind]
    with LlamaCppModel(tiny_path(**spec), n_ctx=512, n_threads=1, **options) as model:
        assert reason in (model.refusal or "")
        prefix, question = model.tokenize(TEXT), model.tokenize("who is the king?")
        with model.session() as session:
            session.decode(prefix)
            session.decode(question)
            expected = answer(session)
            assert expected
            for call in (
                lambda: session.stage(np.array([99], np.int32)),
                lambda: session.commit(None),
                lambda: session.take(session.length, session.length + 1, [1]),
                lambda: session.export(0, 1),
                lambda: session.decode_with_queries([1]),
            ):
                with pytest.raises(SpliceRefusedError, match=kind.split()[0] if kind == "hybrid" else "."):
                    call()
            assert not session.keep(len(prefix))
            session.truncate(len(prefix))
            session.decode(question)
            assert answer(session) == expected
        with model.session() as session:
            assert session.reuse(prefix) == 0
        assert model.fingerprint.digest()


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (lambda rope: RopeSpec.plain(32, 9000.0), "keys of layer 0"),
        (lambda rope: RopeSpec.plain(32, 10000.0, scale=0.5), "keys of layer 0"),
        (lambda rope: RopeSpec(rope.inv_freq, "half"), "keys of layer 0"),
        (lambda rope: RopeSpec(rope.inv_freq[:8], "interleaved"), "keys of layer 0"),
        (lambda rope: RopeSpec((), "interleaved"), "keys of layer 0"),
        (lambda rope: RopeSpec((*rope.inv_freq[:-1], rope.inv_freq[-1] * 1.5), "interleaved"), "keys of layer 0"),
    ],
    ids=["base", "scale", "pairing", "partial", "none", "slowest pair"],
)
def test_self_check_finds_a_wrong_rotation(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[RopeSpec], RopeSpec], layer: str
) -> None:
    right = llama_cpp.rope_spec
    monkeypatch.setattr(llama_cpp, "rope_spec", lambda *arguments: change(right(*arguments)))
    with LlamaCppModel(tiny_gguf, n_ctx=2048, n_threads=1) as model:
        assert "are not those of position 0 rotated" in (model.refusal or "")


def test_unknown_scaling_is_refused(tiny_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_path()
    metadata = {"general.architecture": "llama", "llama.rope.scaling.type": "longrope"}
    with pytest.raises(SpliceRefusedError, match="longrope"):
        llama_cpp.rope_spec(metadata, 0, 32, 4096, path)


def test_another_state_layout_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that wrote one more field, or gave back other bytes than were restored."""
    read = llama_native.NativeContext.get_sequence
    for change, reason in (
        (lambda data: np.append(data, np.zeros(4, np.uint8)), "bytes: found"),
        (lambda data: np.concatenate([data[:4] * 0, data[4:]]), "magic"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(llama_native.NativeContext, "get_sequence", lambda s, n, c=change: c(read(s, n)))
            with LlamaCppModel(tiny_gguf, n_ctx=128, n_threads=1) as model:
                assert reason in (model.refusal or "")
    calls = [0]

    def unstable(context: Any, sequence: int) -> np.ndarray:
        calls[0] += 1
        data = read(context, sequence).copy()
        data[-1] ^= calls[0] > 1
        return data

    monkeypatch.setattr(llama_native.NativeContext, "get_sequence", unstable)
    with LlamaCppModel(tiny_gguf, n_ctx=128, n_threads=1) as model:
        assert "read back after a restore differs" in (model.refusal or "")


def test_the_check_leaves_nothing_behind(tiny_gguf: Path) -> None:
    with LlamaCppModel(tiny_gguf, n_ctx=128, n_threads=1) as model, model.session() as session:
        assert all(model.context.last_position(s) == -1 for s in range(5))
        session.decode([1])
        assert list(session.generate(Sampling(max_tokens=1)))
    assert llama_check.KEY_TOLERANCE <= 0.01
