"""The Triton kernels in Triton's interpreter, on CPU tensors: symbols equal, rows within tolerance."""

# ruff: noqa: E402
from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, see test_triton_process.py", allow_module_level=True)

import synthetic

from cachegen_rag.codec import Codec
from cachegen_rag.errors import CorruptBitstreamError
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec

#        tokens, layers, kv_heads, key_dim, value_dim, rotary
SHAPES = {
    "1 token, 1 head": (1, 1, 1, 64, 64, 64),
    "3 tokens, 2 heads, 80 channels": (3, 1, 2, 80, 80, 80),
    "3 tokens, 256 channels, partial rotary": (3, 1, 1, 256, 256, 64),
    "3 tokens, 32 heads": (3, 1, 32, 64, 64, 64),
    "63 tokens, 3 heads, 3 layers": (63, 3, 3, 64, 64, 64),
    "64 tokens, 96 channels, partial rotary": (64, 1, 1, 96, 96, 48),
    "65 tokens, values narrower than keys": (65, 1, 1, 128, 64, 128),
    "1023 tokens": (1023, 1, 1, 64, 64, 64),  # as few columns as there can be: a step of the interpreter takes long
}


def targets(shape: KVShape, positions: np.ndarray, rope: RopeSpec, dtype=None):
    """The same target twice: numpy arrays, and views of one tensor in the engine's layout."""
    n, dtype = len(positions), dtype or torch.float32
    sizes = [(shape.layers, shape.kv_heads, n + 3, d) for d in (shape.key_dim, shape.value_dim)]
    memory = [torch.full(size, 7.0, dtype=dtype) for size in sizes]
    views = [list(m[:, :, 2 : n + 2].transpose(1, 2)) for m in memory]
    plain = [[np.zeros((n, shape.kv_heads, d), np.float32) for _ in range(shape.layers)] for d in
             (shape.key_dim, shape.value_dim)]  # fmt: skip
    return KVTarget(*plain, positions, rope), KVTarget(*views, positions, rope), memory


def decoded(case: str, *, layout="half", outliers=0, sinks=False, dtype=None):
    tokens, layers, heads, key_dim, value_dim, rotary = SHAPES[case]
    shape = KVShape(layers, heads, key_dim, value_dim)
    profile = synthetic.profile(shape, narrow=8 if tokens < 60 and heads < 9 else 24)
    kv = synthetic.kv(profile, tokens, outliers=outliers)
    codec = Codec(profile, sinks=sinks)
    data = codec.encode(kv, 1)
    rope = RopeSpec.plain(rotary, 1e4, layout)
    positions = np.arange(50, 50 + tokens, dtype=np.int32)
    cpu, device, memory = targets(shape, positions, rope, dtype)
    Codec(profile, sinks=sinks, reference=True).decode_into(data, cpu)
    codec.decode_into(data, device)
    return cpu, device, memory


def close(cpu: KVTarget, device: KVTarget, tolerance: float) -> None:
    for a, b in zip([*cpu.keys, *cpu.values], [*device.keys, *device.values], strict=True):
        scale = np.abs(a).max() + 1e-6
        assert np.abs(a - b.float().numpy()).max() <= tolerance * scale


@pytest.mark.parametrize("case", SHAPES)
def test_rows_equal_the_references(case):
    cpu, device, memory = decoded(case)
    close(cpu, device, 1e-5)
    for tensor in memory:
        assert (tensor[:, :, :2] == 7).all() and (tensor[:, :, -1:] == 7).all(), "written outside the target"


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_both_pair_layouts(layout):
    close(*decoded("3 tokens, 256 channels, partial rotary", layout=layout)[:2], 1e-5)


def test_escapes_and_exact_tokens():
    cpu, device, _ = decoded("65 tokens, values narrower than keys", outliers=9, sinks=True)
    close(cpu, device, 1e-5)
    assert max(np.abs(k).max() for k in cpu.keys) > 300, "there are outliers to be decoded"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_other_types(dtype, tolerance):
    close(*decoded("3 tokens, 2 heads, 80 channels", dtype=getattr(torch, dtype))[:2], tolerance)


def on_device(kv: KV) -> KV:
    return KV(torch.from_numpy(kv.keys), torch.from_numpy(kv.values), kv.token_ids, kv.positions)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "outliers"), [(1, 1, 64, 0), (3, 5, 80, 2), (65, 1, 96, 3)], ids=str
)
def test_encoding_gives_bytes_that_every_path_accepts(tokens, heads, dim, outliers):
    profile = synthetic.profile(KVShape(1, heads, dim, dim), narrow=16)
    kv = synthetic.kv(profile, tokens, outliers=outliers)
    codec, slow = Codec(profile, sinks=tokens > 9), Codec(profile, sinks=tokens > 9, reference=True)
    ours, theirs = codec.encode(on_device(kv), 1), slow.encode(kv, 1)
    # The device's float32 may round a component to the other side of a threshold than the host's fixed point: one in
    # thousands, by one step; where a row has an outlier, in proportion to it.
    a, b = slow.decode(ours, np.float32), slow.decode(theirs, np.float32)
    step = 2.0 ** (profile.levels[0].step / 4)
    for x, y in ((a.keys, b.keys), (a.values, b.values)):
        assert np.all(np.abs(x - y) <= 2 * step + 5e-4 * np.abs(y).max(axis=(2, 3), keepdims=True))
        assert (x != y).mean() < 0.02 + outliers / tokens
    assert np.array_equal(codec.decode(ours).keys, codec.decode(ours).keys)
    assert abs(len(ours) - len(theirs)) < 16
    assert codec.encode(on_device(kv), 0) == slow.encode(kv, 0), "the exact level"


def test_the_same_integers_give_the_same_bytes():
    from cachegen_rag.codec.entropy import encode_stream
    from cachegen_rag.kernels import triton_encode, triton_tables

    profile = synthetic.profile(KVShape(3, 1, 64, 32), narrow=12)
    codec = Codec(profile)
    coders = codec.coders(1)
    tables = triton_tables.LevelTables.of([(c.columns, c.transform) for c in coders], codec.models, "cpu")
    rng = np.random.default_rng(5)
    rows = [1, 7, 12]
    reach = np.concatenate([c.quantizer.reach for c in coders])
    symbols = np.clip(np.round(rng.standard_normal((20, tables.n_columns)) * 4), -reach, reach).astype(np.int8)
    symbols[rng.random(symbols.shape) < 0.01] = -128
    streams = triton_encode.entropy_code(torch.from_numpy(symbols), tables, rows)
    starts = np.cumsum([0, *rows])
    for i, chunk in enumerate(streams):
        column = 0
        for coder, data in zip(coders, chunk, strict=True):
            part = symbols[starts[i] : starts[i + 1], column : column + len(coder.columns)]
            assert data == encode_stream(np.ascontiguousarray(part), coder.columns, codec.models, slow=True)
            column += len(coder.columns)


@pytest.mark.parametrize("what", ["cut", "word", "state", "escapes"])
def test_damaged_streams_are_refused(what):
    from cachegen_rag.bitstream import Bitstream, Section

    profile = synthetic.profile(KVShape(1, 1, 64, 64), narrow=8)
    codec = Codec(profile)
    stream = Bitstream.from_bytes(codec.encode(synthetic.kv(profile, 9, outliers=9), 1))
    assert {2, 3} <= {s.type for s in stream.sections}
    sections = []
    for section in stream.sections:
        data = bytearray(section.data)
        if section.type == 3 and what == "cut":
            del data[-2:]
        elif section.type == 3 and what == "word":
            data[20] ^= 0x55
        elif section.type == 3 and what == "state":
            data[2:4] = b"\0\0"
        elif section.type == 2 and what == "escapes":
            data += b"\x02"
        sections.append(Section(section.type, bytes(data), section.index))
    bad = dataclasses.replace(stream, sections=tuple(sections)).to_bytes()
    _, device, _ = targets(profile.shape, stream.positions, RopeSpec.plain(64))
    with pytest.raises(CorruptBitstreamError):
        codec.decode_into(bad, device)
    with pytest.raises(CorruptBitstreamError):
        Codec(profile, reference=True).decode(bad)


def test_chunks_decode_together():
    from cachegen_rag.codec.device import DeviceCodec

    profile = synthetic.profile(KVShape(2, 2, 64, 64), narrow=20)
    codec = Codec(profile)
    rope = RopeSpec.plain(64, 1e4, "half")
    kv = synthetic.kv(profile, 21, outliers=2)
    cpu, device, _ = targets(profile.shape, np.arange(40, 61, dtype=np.int32), rope)
    cuts = [(0, 1), (1, 13), (13, 21)]
    data = [codec.encode(kv[a:b], 1) for a, b in cuts]
    for (a, b), chunk in zip(cuts, data, strict=True):
        Codec(profile, reference=True).decode_into(chunk, cpu.rows(a, b))
    streams = [codec.parse(chunk) for chunk in data]
    DeviceCodec(codec, torch.device("cpu")).fill(streams, data, [device.rows(a, b) for a, b in cuts])
    close(cpu, device, 1e-5)


def test_a_model_on_a_device_stores_and_splices_tensors(tiny_gguf, monkeypatch):
    """As on a GPU: the engine exports and hands out tensors, and the cache never asks for anything else."""
    from cachegen_rag import KVCache, Sampling
    from cachegen_rag.models.transformers import Loaded, TransformersModel
    from cachegen_rag.stores.memory import MemoryStore
    from cachegen_rag.warm import WarmContext

    monkeypatch.setattr(Loaded, "on_host", property(lambda self: False))
    model = TransformersModel(tiny_gguf, n_ctx=512)
    with model.session() as s:
        s.decode([5, 6, 7, 8])
        kv = s.export(0, 3)
        assert isinstance(kv.keys, torch.Tensor)
        assert isinstance(s.stage(np.arange(4, 6, dtype=np.int32)).keys[0], torch.Tensor)
    profile = synthetic.profile(model.shape, layers_a_block=3)
    monkeypatch.setattr(WarmContext, "for_model", staticmethod(lambda m, **_: WarmContext(((1, 2, 3),), m.n_ctx)))
    texts = ["the river in the city"]
    store, answers = MemoryStore(), []
    for on_host in (False, True):
        monkeypatch.setattr(Loaded, "on_host", property(lambda self, on_host=on_host: on_host))
        cache = KVCache(model, store, profile=profile, level=1)
        cache.prefill(texts)
        prompt = cache.prompt([{"role": "user", "content": "which river?"}], texts)
        stream = cache.stream(prompt, Sampling(max_tokens=3, logprobs=1))
        answers.append(list(stream))
        assert stream.record.spliced_tokens > 0, stream.record
    ids, logprobs = ([[getattr(t, name) for t in answer] for answer in answers] for name in ("id", "logprob"))
    assert ids[0] == ids[1], "the host splices the same stored bytes to the same answer"
    np.testing.assert_allclose(*logprobs, atol=3e-3)
    cache.close()
    model.close()
