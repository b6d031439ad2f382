"""The Triton kernels in Triton's interpreter, on CPU tensors: symbols equal, rows within tolerance."""

# ruff: noqa: E402
from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, see test_triton_process.py", allow_module_level=True)

import synthetic

from cachegen_rag.codec import Codec
from cachegen_rag.kv import KVShape
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec

#        tokens, layers, kv_heads, key_dim, value_dim, rotary
SHAPES = {
    "one token, one head": (1, 1, 1, 64, 64, 64),
    "3 tokens, 80 channels": (3, 2, 2, 80, 80, 80),
    "63 tokens, 3 heads": (63, 3, 3, 64, 64, 64),
    "64 tokens, 96 channels, partial rotary": (64, 1, 2, 96, 96, 48),
    "65 tokens, values narrower than keys": (65, 2, 1, 128, 64, 128),
    "3 tokens, 256 channels": (3, 1, 1, 256, 256, 64),
    "3 tokens, 32 heads": (3, 1, 32, 64, 64, 64),
    "1023 tokens": (1023, 1, 1, 64, 64, 64),
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
    profile = synthetic.profile(shape)
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
    close(*decoded("64 tokens, 96 channels, partial rotary", layout=layout)[:2], 1e-5)
    close(*decoded("3 tokens, 80 channels", layout=layout)[:2], 1e-5)


def test_escapes_and_exact_tokens():
    cpu, device, _ = decoded("65 tokens, values narrower than keys", outliers=9, sinks=True)
    close(cpu, device, 1e-5)
    assert max(np.abs(k).max() for k in cpu.keys) > 300, "there are outliers to be decoded"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_other_types(dtype, tolerance):
    close(*decoded("63 tokens, 3 heads", dtype=getattr(torch, dtype))[:2], tolerance)
