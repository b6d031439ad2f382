"""Loading a GGUF: wrong files, laziness, identity, vocabulary, closing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from splicing import TEXT, text_logits

from cachegen_rag.errors import ConfigError, ModelError, ModelLoadError
from cachegen_rag.models.llama_cpp import LlamaCppModel


def test_wrong_files(tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all")
    (tmp_path / "empty.gguf").touch()
    for path, reason in (
        (tmp_path / "missing.gguf", "there is no model file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "text.gguf", "is not a GGUF model"),
        (tmp_path / "empty.gguf", "is not a GGUF model"),
    ):
        with pytest.raises(ModelLoadError, match=reason) as caught:
            LlamaCppModel(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("fraction", [0.0001, 0.003, 0.5, 0.99])
def test_truncated_file(tmp_path: Path, tiny_gguf: Path, fraction: float, capfd: pytest.CaptureFixture[str]) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: max(4, int(len(data) * fraction))])
    model = LlamaCppModel(path)
    with pytest.raises(ModelLoadError, match="damaged") as caught:
        _ = model.shape
    assert str(path) in str(caught.value)
    assert capfd.readouterr() == ("", "")  # llama.cpp's own log stays silent
    with pytest.raises(ModelLoadError), model.session():
        pass


def test_not_a_language_model(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "nonsense")
    writer.add_name("x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="unknown model architecture"):
        _ = LlamaCppModel(tmp_path / "other.gguf").n_ctx


@pytest.mark.parametrize("wrong", [{"n_ctx": 0}, {"n_threads": 0}, {"n_batch": 0}, {"kv_type": "q9"}])
def test_settings_out_of_range(tiny_gguf: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LlamaCppModel(tiny_gguf, **wrong)


def test_a_context_too_large_for_memory(tiny_gguf: Path) -> None:
    model = LlamaCppModel(tiny_gguf, n_ctx=1 << 30, n_threads=1)
    with pytest.raises(ModelLoadError, match="needs a cache of"):
        _ = model.refusal
    model.close()


def test_nothing_loads_before_use(tiny_gguf: Path) -> None:
    code = (
        "import sys\n"
        "from cachegen_rag.models.llama_cpp import LlamaCppModel\n"
        f"m = LlamaCppModel({str(tiny_gguf)!r})\n"
        "assert not {'llama_cpp', 'numba', 'torch'} & set(sys.modules), 'loaded early'\n"
        "m.tokenize('x'); assert m._context is None and 'llama_cpp' in sys.modules\n"
        "m.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_identity(tiny_path: Callable[..., Path], tiny_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())

    def digest(path: Path, **options: Any) -> bytes:
        with LlamaCppModel(path, **options) as model:
            return model.fingerprint.digest()

    same = digest(tiny_gguf)
    assert digest(copy) == same == digest(tiny_gguf, n_ctx=64, n_threads=1, n_batch=8)
    others = [
        digest(tiny_path(seed=8)),
        digest(tiny_path(rope_base=20000.0)),
        digest(tiny_path(merges=200)),
        digest(tiny_gguf, kv_type="q8_0"),
    ]
    assert len({same, *others}) == 5
    data = bytearray(tiny_gguf.read_bytes())
    data[-1] ^= 1  # one bit of one weight
    copy.write_bytes(data)
    assert digest(copy) != same


def test_a_file_replaced_after_loading_has_no_identity(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    """The loaded weights would get the new file's name, and their KV would be spliced into the new model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path().read_bytes())
    with LlamaCppModel(path, n_ctx=64, n_threads=1) as model:
        text_logits(model, [1, 2])
        other = tmp_path / "other.gguf"
        other.write_bytes(tiny_path(seed=8).read_bytes())
        other.replace(path)
        with pytest.raises(ModelLoadError, match="has changed since it was loaded"):
            _ = model.fingerprint
        path.unlink()
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            _ = model.fingerprint
        assert text_logits(model, [1, 2]).shape == (2, model.n_vocab)


def test_rope_is_canonical_in_the_fingerprint(tiny_path: Callable[..., Path]) -> None:
    with LlamaCppModel(tiny_path(arch="qwen2")) as model:
        assert model.rope.layout == "half" and model.fingerprint.rope.layout == "interleaved"


def test_bos(tiny_path: Callable[..., Path], tiny_model: Any) -> None:
    assert tiny_model.bos_id is None
    with LlamaCppModel(tiny_path(bos="<s>")) as model:
        assert model.detokenize([model.bos_id]) == "<s>"
        assert model.bos_id not in model.tokenize("the king") and model.tokenize("") == []


@pytest.mark.real
def test_real_vocabulary(real_model: Any) -> None:
    assert real_model.bos_id is None and real_model.detokenize([real_model.eos_id]) == "<|im_end|>"
    assert "<|im_start|>" in real_model.chat_template and real_model.refusal is None
    assert (real_model.shape.layers, real_model.shape.kv_heads, real_model.shape.key_dim) == (30, 3, 64)
    assert real_model.rope.inv_freq[1] == pytest.approx(100000.0 ** (-2 / 64))


def test_control_tokens_are_text_unless_asked(tiny_model: Any) -> None:
    markup = "<|im_start|>user\nhello<|im_end|>"
    plain, special = tiny_model.tokenize(markup), tiny_model.tokenize(markup, special=True)
    control = {tiny_model.tokenize(m, special=True)[0] for m in ("<|im_start|>", "<|im_end|>")}
    assert not control & set(plain) and control <= set(special)
    assert tiny_model.detokenize(plain) == tiny_model.detokenize(special) == markup


@pytest.mark.parametrize("text", ["", " ", "\n\n", "naïve 漢字 🙂\x00\t", "a" * 5000, "\ud800 lone surrogate"])
def test_tokenize_round_trip(tiny_model: Any, text: str) -> None:
    assert tiny_model.detokenize(tiny_model.tokenize(text)) == text.encode("utf-8", "replace").decode()


def test_half_a_character_is_replaced(tiny_model: Any) -> None:
    assert tiny_model.detokenize(tiny_model.tokenize("€")[:2]) == "�"


def test_a_separator_alone_and_in_running_text(tiny_model: Any) -> None:
    """The same characters are other tokens in running text: ids are spliced, never text."""
    whole = tiny_model.tokenize("passage\n\nquestion")
    parts = tiny_model.tokenize("passage") + tiny_model.tokenize("\n\n") + tiny_model.tokenize("question")
    assert tiny_model.detokenize(whole) == tiny_model.detokenize(parts) and whole != parts


def test_no_chat_template(tiny_path: Callable[..., Path]) -> None:
    with LlamaCppModel(tiny_path(chat_template=None)) as model:
        assert model.chat_template is None


def test_default_context(tiny_path: Callable[..., Path]) -> None:
    with LlamaCppModel(tiny_path(context=512)) as short, LlamaCppModel(tiny_path(context=1 << 20)) as long:
        assert (short.n_ctx, long.n_ctx) == (512, 8192)


def test_close(tiny_gguf: Path) -> None:
    model = LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1)
    model.close()
    model = LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1)
    text_logits(model, [1, 2])
    model.close()
    model.close()
    with pytest.raises(ModelError, match="closed"), model.session():
        pass
    for call in (lambda: model.tokenize("x"), lambda: model.detokenize([1])):
        with pytest.raises(ModelError, match="closed"):
            call()


def test_close_waits_for_the_session(tiny_gguf: Path) -> None:
    model = LlamaCppModel(tiny_gguf, n_ctx=256, n_threads=1)
    closing = threading.Thread(target=model.close)
    with model.session() as session:
        session.decode([1])
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        session.decode(model.tokenize(TEXT))
    closing.join(10)
    assert not closing.is_alive() and model._closed


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "stream = answer(); next(stream)",
        "threading.Thread(target=compute, daemon=True).start(); time.sleep(0.2)",
        "threading.Thread(target=lambda: next(answer())).start()",
    ],
    ids=["idle", "unfinished stream", "a thread computes", "a thread's unfinished stream"],
)
def test_the_process_ends_cleanly(tiny_gguf: Path, ending: str) -> None:
    """Freeing the engine under a thread that computes would be a crash at exit."""
    code = f"""
import threading, time
from cachegen_rag.models.base import Sampling
from cachegen_rag.models.llama_cpp import LlamaCppModel
model = LlamaCppModel({str(tiny_gguf)!r}, n_ctx=2048, n_threads=1)
model.context
def answer():
    with model.session() as session:
        session.decode([1, 2, 3])
        yield from session.generate(Sampling(max_tokens=100))
def compute():
    try:
        with model.session() as session:
            while True:
                session.decode([7] * 1000)
                session.truncate(0)
    except Exception:
        pass
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode()


def test_first_use_by_many_threads(tiny_gguf: Path) -> None:
    model = LlamaCppModel(tiny_gguf, n_ctx=64, n_threads=1)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append((model.refusal, id(model.context)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8 and len(set(found)) == 1
    model.close()
