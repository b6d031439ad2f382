"""The GPU kernels: right in every bit, what their machine code uses, and, where there is a GPU, how fast they are.

Speed is bytes of fp16 KV written (decode) or read (encode) a second, beside a plain copy on the device and beside
torch's own dequantization of 4-bit blocks in the same run. Without a GPU correctness is checked in Triton's
interpreter, the machine code is compiled and measured all the same, and no speed is reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cachegen_rag.bench import environment, synthetic
from cachegen_rag.codec import Codec
from cachegen_rag.errors import MissingDependencyError
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec

LARGE = KVShape(layers=32, kv_heads=8, key_dim=128, value_dim=128)
"""The KV of an 8B model."""
SMALL = KVShape(layers=3, kv_heads=2, key_dim=64, value_dim=64)


def run(
    *, tokens: int = 8192, chunk: int = 256, repeats: int = 20, narrow: int = 14, cubins: bool = True
) -> dict[str, Any]:
    """Check and measure the Triton kernels.

    tokens, chunk : tokens decoded in one batch, in chunks of this many (GPU only), of the KV of an 8B model (32 layers,
        8 heads of 128). repeats : timed runs, whose median counts. narrow : how far the made-up components are
        narrowed, in quarter octaves: 14 gives about 1.4 bits an element. cubins : compile for sm_80 and sm_90.

    Returns the usual object. Summary: ``gpu`` (its name or None), ``symbols_equal`` (share), ``rows_error`` (relative
    to the largest value), ``speed_measured``, ``spills`` (bytes, worst), ``shared_bytes`` (worst), ``registers``
    (worst), and on a GPU ``decode_gb_s``, ``encode_gb_s``, ``decode_symbols_per_s``, ``copy_gb_s``,
    ``torch_4bit_gb_s``, ``upload_and_decode_gb_s``, ``bits_per_element``.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"bench kernels needs {error.name}: pip install 'cachegen-rag[gpu]'") from error
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"gpu": None, "speed_measured": False}
    if torch.cuda.is_available():
        summary["gpu"] = torch.cuda.get_device_name()
        check = correctness("cuda")
        rows += [check, *_speed(torch, tokens, chunk, repeats, narrow, summary)]
        summary["speed_measured"] = True
    else:
        check = _interpreted()
        rows.append(check)
    summary |= {"symbols_equal": check["symbols_equal"], "rows_error": check["rows_error"]}
    if cubins:
        from cachegen_rag.bench.cubins import compile_all

        compiled = compile_all()
        rows += [{"what": "cubin", **row} for row in compiled]
        summary |= {name: max(row[name] for row in compiled) for name in ("spills", "shared_bytes", "registers")}
    return {"benchmark": "kernels", "environment": environment(), "rows": rows, "summary": summary}


def correctness(device: str, shape: KVShape = SMALL, tokens: int = 70) -> dict[str, Any]:
    """Decode on ``device`` what the reference encoded, and the other way round; compare symbols and rows."""
    import torch

    profile = synthetic.profile(shape, narrow=12)
    kv = synthetic.kv(profile, tokens, outliers=3)
    codec, reference = Codec(profile), Codec(profile, reference=True)
    data = reference.encode(kv, 1)
    rope = RopeSpec.plain(shape.key_dim, 1e4, "half")
    positions = np.arange(100, 100 + tokens, dtype=np.int32)
    ours, theirs = _target(torch, shape, positions, rope, device), _host_target(shape, positions, rope)
    codec.decode_into(data, ours)
    reference.decode_into(data, theirs)
    worst = 0.0
    for a, b in zip([*ours.keys, *ours.values], [*theirs.keys, *theirs.values], strict=True):
        worst = max(worst, float(np.abs(a.float().cpu().numpy() - b).max() / (np.abs(b).max() + 1e-9)))
    symbols = _symbols_equal(torch, codec, data, device)
    back = reference.decode(codec.encode(_on_device(torch, kv, device), 1), np.float32)
    step = 2.0 ** (profile.levels[0].step / 4)
    apart = float(np.abs(back.keys - reference.decode(data, np.float32).keys).max() / step)
    return {
        "what": "correctness",
        "device": device,
        "tokens": tokens,
        "symbols_equal": symbols,
        "rows_error": worst,
        "encoded_apart_steps": apart,
    }


def _symbols_equal(torch: Any, codec: Codec, data: bytes, device: str) -> float:
    from cachegen_rag.codec.entropy import decode_stream

    batch = codec.on_device(torch.device(device)).batch([codec.parse(data)], [memoryview(data)])
    decoded = batch.symbols()
    decoded.check()
    got = decoded.symbols.cpu().numpy()
    stream = codec.parse(data)
    expected = [
        decode_stream(section, len(stream), coder.columns, codec.models, slow=True)
        for coder, section in zip(codec.coders(stream.level), codec.stream_sections(stream), strict=True)
    ]
    return float((got == np.concatenate(expected, axis=1)).mean())


def _interpreted() -> dict[str, Any]:
    """``correctness`` in a process of its own: Triton decides when it is imported whether it interprets."""
    code = "import json, cachegen_rag.bench.kernels as k; print(json.dumps(k.correctness('cpu', tokens=9)))"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"the kernels failed in the interpreter: {result.stderr.strip()[-2000:]}")
    row: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return row | {"device": "interpreter"}


def _speed(
    torch: Any, tokens: int, chunk: int, repeats: int, narrow: int, summary: dict[str, Any]
) -> list[dict[str, Any]]:
    count = max(1, tokens // chunk)
    profile = synthetic.profile(LARGE, narrow=narrow, layers_a_block=3, joint=64)
    codec = Codec(profile)
    kv = synthetic.kv(profile, chunk)
    data = codec.encode(kv, 1)
    positions = np.arange(count * chunk, dtype=np.int32)
    target = _target(torch, LARGE, positions, RopeSpec.plain(128, 5e5, "half"), "cuda", torch.float16)
    parts = [target.rows(i * chunk, (i + 1) * chunk) for i in range(count)]
    device = codec.on_device(torch.device("cuda"))
    streams, sources = [codec.parse(data)] * count, [memoryview(data)] * count
    out_bytes = count * chunk * LARGE.fp16_bytes_per_token
    batch, rows = device.batch(streams, sources), device.targets(device.tables(1), parts)
    seconds = {
        "decode": _time(torch, lambda: batch.decode(rows), repeats),
        "symbols": _time(torch, batch.symbols, repeats),
        "upload_and_decode": _time(torch, lambda: device.fill(streams, sources, parts), max(3, repeats // 4)),
    }
    symbols = count * chunk * device.tables(1).n_columns
    many = _on_device(torch, kv, "cuda", count, torch.float16)
    seconds["encode"] = _time(torch, lambda: device.encode_chunks(many, 1, [chunk] * count), max(3, repeats // 4))
    source = torch.empty(out_bytes // 2, dtype=torch.float16, device="cuda").normal_()
    copied = torch.empty_like(source)
    seconds["copy"] = _time(torch, lambda: copied.copy_(source), repeats)
    packed = torch.randint(0, 255, (out_bytes // 4,), dtype=torch.uint8, device="cuda")
    scales = torch.rand(out_bytes // 64, 1, dtype=torch.float16, device="cuda")

    def four_bit() -> Any:
        low, high = (packed & 15).half() - 8, (packed >> 4).half() - 8
        return torch.stack([low, high], -1).view(-1, 32) * scales

    seconds["torch_4bit"] = _time(torch, four_bit, repeats)
    summary |= {f"{name}_gb_s": out_bytes / s / 1e9 for name, s in seconds.items() if name != "symbols"}
    summary["decode_symbols_per_s"] = symbols / seconds["symbols"]
    summary["bits_per_element"] = 8 * len(data) / (chunk * LARGE.elements_per_token)
    return [
        {"what": name, "seconds": s, "gb_s": out_bytes / s / 1e9, "tokens": count * chunk, "chunk": chunk}
        for name, s in seconds.items()
    ]


def _time(torch: Any, work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of ``work`` on the device, compilation and first use left out."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(np.median(times))


def _on_device(torch: Any, kv: KV, device: str, count: int = 1, dtype: Any = None) -> KV:
    """``count`` copies of ``kv`` one behind the other, as tensors of a device."""
    arrays: list[Any] = [
        torch.from_numpy(x).to(dtype or torch.float32).to(device).repeat(1, count, 1, 1) for x in (kv.keys, kv.values)
    ]
    positions = np.arange(count * len(kv), dtype=np.int32)
    return KV(arrays[0], arrays[1], np.tile(kv.token_ids, count), positions)


def _target(torch: Any, shape: KVShape, positions: Any, rope: RopeSpec, device: str, dtype: Any = None) -> KVTarget:
    sizes = [(shape.layers, shape.kv_heads, len(positions), d) for d in (shape.key_dim, shape.value_dim)]
    keys, values = (torch.zeros(size, dtype=dtype or torch.float32, device=device) for size in sizes)
    return KVTarget(list(keys.transpose(1, 2)), list(values.transpose(1, 2)), positions, rope)


def _host_target(shape: KVShape, positions: Any, rope: RopeSpec) -> KVTarget:
    keys, values = (
        [np.zeros((len(positions), shape.kv_heads, d), np.float32) for _ in range(shape.layers)]
        for d in (shape.key_dim, shape.value_dim)
    )
    return KVTarget(keys, values, positions, rope)
