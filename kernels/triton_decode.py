"""Decoding on a GPU: the kernels of ``reference.py`` in Triton, for all chunks of one level in three launches.

    symbols     rANS: one stream a warp's worth of lanes; many streams, one a block and chunk, run at once
    coefficients  symbols to float32, escapes put in, columns put in the transform's order
    rows        inverse transform (one matrix a head), rotary, fp16 / bf16 / float32 written into the engine's cache

Symbols are the reference's exactly; rows agree within the tolerance of SPEC.md. What a kernel needs to know of a
profile at one level is in :class:`cachegen_rag.kernels.triton_tables.LevelTables`; what it needs of the chunks in
:class:`Batch`. The same code runs under ``TRITON_INTERPRET=1`` on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from cachegen_rag.kernels.reference import ESCAPE, GROUP, LANES, LOW, PROB_BITS, KernelError
from cachegen_rag.kernels.triton_tables import ALIGN, LevelTables

_TRUNCATED, _INCONSISTENT = 1, 2
_STATE_WORDS = 2 * LANES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STREAMS = 16 if INTERPRETED else 1
"""Streams a program: one fills a warp; the interpreter is the faster the more it does at once."""

ROW_TILE = 64
"""Tokens of one program of the inverse transform."""

COEFFICIENT_ROWS, COEFFICIENT_COLUMNS = 16, 128
"""Tile of the program that makes coefficients of symbols."""


@triton.jit
def _next_group(
    x, at, columns, sizes, base, word_at, n_words, words, slots, symbols, r, previous, c, live, lane,
    n_columns, PROB: tl.constexpr, LOWEST: tl.constexpr, ESC: tl.constexpr,
):  # fmt: skip
    """Decode one group of every stream: states ``x``, the group's row ``r`` and first column ``c``."""
    on = live[:, None] & (lane >= 0)
    where = (base + r.to(tl.int64) * n_columns + c)[:, None] + lane
    up = tl.load(symbols + where - n_columns, mask=on & (r[:, None] > 0), other=0).to(tl.int32)
    left = tl.where(c[:, None] > 0, previous, 0)
    near = 2 * tl.abs(up) + tl.abs(left)
    column = tl.load(sizes + columns[:, None] + c[:, None] + lane, mask=on, other=0)
    model = (column & 0xFFF) + (near > ((column >> 12) & 0x3FF)).to(tl.int32) + (near > (column >> 22)).to(tl.int32)
    slot = (x & ((1 << PROB) - 1)).to(tl.int32)
    entry = tl.load(slots + (model << PROB) + slot, mask=on, other=0).to(tl.uint32, bitcast=True)
    y = ((entry >> 8) & ((1 << PROB) - 1)) * (x >> PROB) + (entry >> 20)
    reads = (on & (y < LOWEST)).to(tl.int32)
    symbol = (entry & 0xFF).to(tl.int8).to(tl.int32)
    # One sum counts words in its low half and escapes in its high half.
    escapes = (on & (symbol == ESC)).to(tl.int32)
    total = tl.sum(reads + (escapes << 16), 1)
    rank = tl.cumsum(reads, 1) - reads
    index = at[:, None] + rank
    word = tl.load(words + word_at[:, None] + index, mask=(reads > 0) & (index < n_words[:, None]), other=0)
    word = word.to(tl.uint32) & 0xFFFF
    y = tl.where(reads > 0, (y << 16) | word, y)
    tl.store(symbols + where, symbol.to(tl.int8), mask=on)
    return tl.where(on, y, x), at + (total & 0xFFFF), total >> 16, symbol


@triton.jit
def _decode_kernel(
    payload32, payload16, streams, blocks, sizes, slots, symbols, escapes_before, counts, status,
    n_streams, n_blocks, n_columns, S: tl.constexpr, G: tl.constexpr,
    PROB: tl.constexpr, LOWEST: tl.constexpr, ESC: tl.constexpr, TRUNCATED: tl.constexpr, INCONSISTENT: tl.constexpr,
):  # fmt: skip
    """Entropy decoding. streams int64 ``[n, 5]``: state index, word index, words, first row, rows; stream ``i`` is of
    block ``i % n_blocks``. blocks int32 ``[n_blocks, 2]``: first column, columns."""
    for first in range(tl.program_id(0) * S, n_streams, tl.num_programs(0) * S):
        stream = first + tl.arange(0, S)
        live = stream < n_streams
        d = streams + stream.to(tl.int64) * 5
        state_at = tl.load(d, mask=live, other=0)
        word_at = tl.load(d + 1, mask=live, other=0)
        n_words = tl.load(d + 2, mask=live, other=0).to(tl.int32)
        row = tl.load(d + 3, mask=live, other=0)
        rows = tl.load(d + 4, mask=live, other=0).to(tl.int32)
        block = stream % n_blocks
        columns = tl.load(blocks + 2 * block, mask=live, other=0)
        width = tl.load(blocks + 2 * block + 1, mask=live, other=0)
        lane = tl.arange(0, G)[None, :]
        state = payload32 + state_at[:, None] + lane
        x = tl.load(state, mask=live[:, None] & (lane >= 0), other=LOWEST).to(tl.uint32, bitcast=True)
        bad = tl.max((x < LOWEST).to(tl.int32), 1)
        base = row * n_columns + columns
        at = tl.zeros([S], tl.int32)
        c = tl.zeros([S], tl.int32)
        r = tl.zeros([S], tl.int32)
        escapes = tl.zeros([S], tl.int32)
        symbol = tl.zeros([S, G], tl.int32)
        groups = tl.where(live, rows * (width // G), 0)
        for group in range(tl.max(groups, 0)):
            going = group < groups
            tl.store(escapes_before + (row + r) * n_blocks + block, escapes, mask=going & (c == 0))
            x, at, more, symbol = _next_group(
                x, at, columns, sizes, base, word_at, n_words, payload16, slots, symbols, r, symbol, c, going, lane,
                n_columns, PROB, LOWEST, ESC,
            )  # fmt: skip
            escapes += more
            c += G
            ends = c >= width
            c = tl.where(ends, 0, c)
            r = tl.where(ends, r + 1, r)
        tl.store(counts + stream, escapes, mask=live)
        bad |= tl.max((x != LOWEST).to(tl.int32), 1) | (at < n_words).to(tl.int32)
        bad = tl.where(at > n_words, TRUNCATED, bad * INCONSISTENT)
        tl.store(status + stream, tl.where(groups > 0, bad, 0), mask=live)


@triton.jit
def _coefficient_kernel(
    symbols, escapes_before, counts, chunks, row_chunk, blocks, shrink, step, place, values, gains, z,
    n_rows, n_blocks, n_columns, n_coefficients, BLOCKS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, ESC: tl.constexpr,
):  # fmt: skip
    """Symbols to coefficients: program (row tile, block). chunks int64 ``[n, 2]``: first escape, escapes. gains float32
    ``[rows, blocks]``."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    block = tl.program_id(1)
    live = row < n_rows
    first = tl.multiple_of(tl.load(blocks + 2 * block), G)
    width = tl.multiple_of(tl.load(blocks + 2 * block + 1), G)
    chunk = tl.load(row_chunk + row, mask=live, other=0)
    # Escapes of this row begin behind those of the chunk's earlier blocks and of the stream's earlier rows.
    earlier = tl.arange(0, BLOCKS)[None, :]
    before = tl.load(counts + chunk[:, None] * n_blocks + earlier, mask=live[:, None] & (earlier < block), other=0)
    rank = tl.sum(before, 1) + tl.load(escapes_before + row.to(tl.int64) * n_blocks + block, mask=live, other=0)
    gain = tl.load(gains + row.to(tl.int64) * n_blocks + block, mask=live, other=0.0)
    value_at = tl.load(chunks + 2 * chunk, mask=live, other=0)
    n_values = tl.load(chunks + 2 * chunk + 1, mask=live, other=0)
    for c in range(0, width, C):
        column = c + tl.arange(0, C)
        used = column < width
        on = live[:, None] & used[None, :]
        s = tl.load(symbols + row[:, None].to(tl.int64) * n_columns + first + column[None, :], mask=on, other=0).to(
            tl.int32
        )
        size = tl.abs(s)
        near = tl.load(shrink + 2 * (first + column), mask=used, other=0.0)
        far = tl.load(shrink + 2 * (first + column) + 1, mask=used, other=0.0)
        scale = tl.load(step + first + column, mask=used, other=0.0)
        value = size.to(tl.float32) - tl.where(size > 1, far[None, :], near[None, :])
        value = tl.where(size > 0, value, 0.0)
        value = tl.where(s < 0, -value, value)
        escaped = (on & (s == ESC)).to(tl.int32)
        if tl.sum(tl.sum(escaped, 1), 0) > 0:
            index = rank[:, None] + tl.cumsum(escaped, 1) - escaped
            known = (escaped > 0) & (index < n_values[:, None])
            exact = tl.load(values + value_at[:, None] + index, mask=known, other=0).to(tl.float32)
            value = tl.where(escaped > 0, exact, value)
            rank += tl.sum(escaped, 1)
        to = tl.load(place + first + column, mask=used, other=-1)
        tl.store(
            z + row[:, None].to(tl.int64) * n_coefficients + to[None, :],
            value * scale[None, :] * gain[:, None],
            mask=on & (to[None, :] >= 0),
        )


@triton.jit
def _row_kernel(
    z, heads, weights, mean, cosine, sine, targets, row_at, out, n_rows, n_coefficients,
    PAIRS: tl.constexpr, HALVES: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Coefficients to rows: program (head, row tile), a head being one of a layer's keys or values.

    heads int64 ``[n, 8]``: z's column and number of the joint part, the same of the own part, index of the weights,
    index of the mean, channels, whether keys. targets int64 ``[n]``: where a head is in ``out``, elements; row_at int32
    ``[2, rows]``: where each row is from there, for keys and for values.
    """
    d = heads + tl.program_id(0) * 8
    joint_at, joint = tl.load(d).to(tl.int32), tl.load(d + 1).to(tl.int32)
    own_at, own = tl.load(d + 2).to(tl.int32), tl.load(d + 3).to(tl.int32)
    w, mean_at = tl.load(d + 4), tl.load(d + 5)
    dim, is_key = tl.load(d + 6).to(tl.int32), tl.load(d + 7).to(tl.int32)
    row = tl.program_id(1) * R + tl.arange(0, R)
    live = row < n_rows
    pair = tl.arange(0, P)
    even = tl.zeros([R, P], tl.float32) + tl.load(mean + mean_at + pair)[None, :]
    odd = tl.zeros([R, P], tl.float32) + tl.load(mean + mean_at + P + pair)[None, :]
    # Offsets within a tile are small: 32 bits. Parts begin and end at multiples of K, rows are padded to R.
    deep = tl.arange(0, K)
    a = (
        z
        + (tl.program_id(1) * R).to(tl.int64) * n_coefficients
        + tl.arange(0, R)[:, None] * n_coefficients
        + deep[None, :]
    )
    b = weights + tl.multiple_of(w, 16) + deep[:, None] * (2 * P) + pair[None, :]
    for k in range(0, joint + own, K):
        at = tl.multiple_of(tl.where(k < joint, joint_at + k, own_at + k - joint), K)
        coefficients = tl.load(a + at)
        even = tl.dot(coefficients, tl.load(b), even, input_precision=PRECISION)
        odd = tl.dot(coefficients, tl.load(b + P), odd, input_precision=PRECISION)
        b += K * 2 * P
    # Keys: even and odd channels. Values: the lower and the upper half.
    second_at = tl.where(is_key > 0, 1, (dim + 1) // 2)
    first = tl.where(is_key > 0, 2 * pair, pair)
    second = first + second_at
    last = tl.where(is_key > 0, dim, (dim + 1) // 2)  # of the first accumulator
    if PAIRS > 0:
        # Values are turned by nothing: their angles are not loaded.
        on = live[:, None] & (pair < PAIRS * is_key)[None, :]
        angle = row[:, None] * PAIRS + pair[None, :]
        cos = tl.load(cosine + angle, mask=on, other=1.0)
        sin = tl.load(sine + angle, mask=on, other=0.0)
        even, odd = even * cos - odd * sin, even * sin + odd * cos
    kept_first, kept_second = first < last, second < dim
    if HALVES:
        turned = pair < PAIRS * is_key
        first = tl.where(turned, pair, first)
        second = tl.where(turned, pair + PAIRS, second)
    if out.dtype.element_ty == tl.float16:
        even = tl.clamp(even, -65504.0, 65504.0)
        odd = tl.clamp(odd, -65504.0, 65504.0)
    at = tl.load(row_at + (1 - is_key) * n_rows + row, mask=live, other=0)
    to = out + tl.load(targets + tl.program_id(0)) + at[:, None]
    tl.store(to + first[None, :], even.to(out.dtype.element_ty), mask=live[:, None] & kept_first[None, :])
    tl.store(to + second[None, :], odd.to(out.dtype.element_ty), mask=live[:, None] & kept_second[None, :])


@dataclass(frozen=True, eq=False)
class Chunk:
    """One coded chunk on the host: its streams, one a block (None where a block has no columns), and its escapes.

    A stream is 32 little-endian 32-bit states and then 16-bit words, contiguous in ``data`` at ``offsets`` (bytes,
    multiples of 4) with ``sizes`` bytes; 0 where a block has no columns. gains : float32 ``[blocks, rows]``, what the
    coefficients are multiplied by.
    """

    data: NDArray[np.uint8]
    offsets: Sequence[int]
    sizes: Sequence[int]
    rows: int
    escapes: NDArray[np.int32]
    gains: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Targets:
    """Where the rows of all chunks go.

    keys, values : per layer the engine's tensor ``[..., kv_heads, dim]`` of the first chunk, any strides, channels
        contiguous. row_at : int32 ``[2, rows]``, elements from there for keys and for values.
    cosine, sine : float32 ``[rows, pairs]``. halves : pairs are ``(i, i + pairs)`` in the output.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    row_at: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    halves: bool


class Batch:
    """Chunks of one level, decoded together. ``upload`` puts host memory on the device (perhaps asynchronously)."""

    def __init__(self, tables: LevelTables, chunks: Sequence[Chunk], payload: torch.Tensor, at: Sequence[int]) -> None:
        """payload : uint8 on the device, chunk ``i``'s data at byte ``at[i]``, a multiple of 16."""
        self.tables, self.chunks, self.payload = tables, chunks, payload
        self.rows = sum(c.rows for c in chunks)
        first_row = np.cumsum([0, *(c.rows for c in chunks)])
        first_escape = np.cumsum([0, *(len(c.escapes) for c in chunks)])
        streams = np.zeros((len(chunks), tables.n_blocks, 5), np.int64)
        for i, chunk in enumerate(chunks):
            start = np.asarray(chunk.offsets, np.int64) + at[i]
            streams[i, :, 0] = start // 4
            streams[i, :, 1] = start // 2 + _STATE_WORDS
            streams[i, :, 2] = np.maximum(np.asarray(chunk.sizes, np.int64) // 2 - _STATE_WORDS, 0)
            streams[i, :, 3], streams[i, :, 4] = first_row[i], chunk.rows
        put = tables.put
        self.streams = put(streams.reshape(-1, 5))
        self.row_chunk = put(np.repeat(np.arange(len(chunks), dtype=np.int32), [c.rows for c in chunks]))
        self.values = put(np.concatenate([*(c.escapes for c in chunks), np.zeros(1, np.int32)]))
        self.gains = put(np.concatenate([c.gains.T for c in chunks]).astype(np.float32))
        escapes = np.stack([first_escape[:-1], np.diff(first_escape)], axis=1)
        self.escapes = put(escapes.astype(np.int64))
        self._expected = np.diff(first_escape)

    def symbols(self) -> Decoded:
        """Launch the entropy decoding; :meth:`Decoded.check` waits for it and looks at the result."""
        t, n = self.tables, len(self.streams)
        symbols = torch.empty(self.rows, t.n_columns, dtype=torch.int8, device=t.device)
        before = torch.empty(self.rows, t.n_blocks, dtype=torch.int32, device=t.device)
        counts = torch.zeros(n, dtype=torch.int32, device=t.device)
        status = torch.zeros(n, dtype=torch.int32, device=t.device)
        grid = (triton.cdiv(n, STREAMS),)
        _decode_kernel[grid](
            self.payload.view(torch.int32), self.payload.view(torch.int16), self.streams, t.blocks, t.columns, t.slots,
            symbols, before, counts, status, n, t.n_blocks, t.n_columns,
            S=STREAMS, G=GROUP, PROB=PROB_BITS, LOWEST=LOW, ESC=ESCAPE,
            TRUNCATED=_TRUNCATED, INCONSISTENT=_INCONSISTENT, num_warps=1,
        )  # fmt: skip
        return Decoded(symbols, before, counts, status, self._expected)

    def coefficients(self, decoded: Decoded) -> torch.Tensor:
        """Float32 ``[rows, coefficients]``, rows padded to whole tiles; padding is 0."""
        t = self.tables
        padded = self.rows + -self.rows % ROW_TILE
        z = torch.zeros(padded, t.coefficients, dtype=torch.float32, device=t.device)
        _coefficient_kernel[(triton.cdiv(self.rows, COEFFICIENT_ROWS), t.n_blocks)](
            decoded.symbols, decoded.before, decoded.counts, self.escapes, self.row_chunk, t.blocks, t.shrink, t.step,
            t.place, self.values, self.gains, z, self.rows, t.n_blocks, t.n_columns, t.coefficients,
            BLOCKS=triton.next_power_of_2(t.n_blocks), R=COEFFICIENT_ROWS, C=COEFFICIENT_COLUMNS, G=GROUP, ESC=ESCAPE,
        )  # fmt: skip
        return z

    def reconstruct(self, z: torch.Tensor, targets: Targets) -> None:
        """Write every row of every head."""
        t, out = self.tables, targets.keys[0]
        at = [_elements(targets, w, out) for w in t.where]
        _row_kernel[(len(t.where), triton.cdiv(self.rows, ROW_TILE))](
            z, t.heads, t.weights, t.mean, targets.cosine, targets.sine, t.put(np.asarray(at, np.int64)),
            targets.row_at, out, self.rows, t.coefficients, PAIRS=targets.cosine.shape[1], HALVES=targets.halves,
            **row_options(t.half),
        )  # fmt: skip

    def decode(self, targets: Targets) -> Decoded:
        """All three launches. Nothing is waited for."""
        decoded = self.symbols()
        self.reconstruct(self.coefficients(decoded), targets)
        return decoded


@dataclass(frozen=True, eq=False)
class Decoded:
    """Symbols int8 ``[rows, columns]``, and what tells whether they are right."""

    symbols: torch.Tensor
    before: torch.Tensor
    counts: torch.Tensor
    status: torch.Tensor
    expected: NDArray[np.int64]

    def check(self) -> None:
        """Wait for the decoding. Raises KernelError if a stream is cut or inconsistent, or escapes do not add up."""
        found = self.counts.view(len(self.expected), -1).sum(1).cpu().numpy()
        worst = int(self.status.max()) if len(self.status) else 0
        if worst & _INCONSISTENT:
            raise KernelError("the stream is inconsistent")
        if worst & _TRUNCATED:
            raise KernelError("the stream ends early")
        if np.any(found > self.expected):
            raise KernelError("the symbols call for more escapes than there are")
        if np.any(found < self.expected):
            raise KernelError("there are more escapes than the symbols call for")


def row_options(half: int) -> dict[str, Any]:
    """Tile sizes of the inverse transform for heads of ``2 * half`` channels: at most 100 KB of shared memory."""
    wide = half > 64
    launch = {"num_warps": 8, "num_stages": 2} if wide else {"num_warps": 4, "num_stages": 3}
    return {"R": ROW_TILE, "P": half, "K": ALIGN, "PRECISION": "tf32", **launch}


def _elements(targets: Targets, where: tuple[int, bool, int], out: torch.Tensor) -> int:
    layer, is_value, head = where
    tensor = (targets.values if is_value else targets.keys)[layer]
    return (tensor.data_ptr() - out.data_ptr()) // out.element_size() + head * tensor.stride(-2)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """How the kernels are launched, for compiling them without a GPU: name, kernel, signature, constants, options."""
    i32 = {"n_rows": "i32", "n_blocks": "i32", "n_columns": "i32", "n_coefficients": "i32"}
    decode = dict.fromkeys(("streams",), "*i64") | dict.fromkeys(("payload16",), "*i16") | {"symbols": "*i8"}
    decode |= dict.fromkeys(("payload32", "blocks", "sizes", "slots", "escapes_before", "counts", "status"), "*i32") | {
        "n_streams": "i32",
        "n_blocks": "i32",
        "n_columns": "i32",
    }
    constants = {"G": GROUP, "PROB": PROB_BITS, "LOWEST": LOW, "ESC": ESCAPE}
    constants |= {"TRUNCATED": _TRUNCATED, "INCONSISTENT": _INCONSISTENT, "S": 1}
    rows = {"z": "*fp32", "heads": "*i64", "weights": "*fp32", "mean": "*fp32", "cosine": "*fp32", "sine": "*fp32"}
    rows |= {"targets": "*i64", "row_at": "*i32", "n_rows": "i32", "n_coefficients": "i32"}
    coefficient = {"symbols": "*i8", "chunks": "*i64", "shrink": "*fp32", "step": "*fp32", "z": "*fp32"}
    coefficient |= {"gains": "*fp32", **i32}
    coefficient |= dict.fromkeys(("escapes_before", "counts", "row_chunk", "blocks", "place", "values"), "*i32")
    tile = {"R": COEFFICIENT_ROWS, "C": COEFFICIENT_COLUMNS, "G": GROUP, "ESC": ESCAPE}
    out = [
        ("", _decode_kernel, _ordered(_decode_kernel, decode), constants, {"num_warps": 1}),
        *((f"{n} blocks", _coefficient_kernel, _ordered(_coefficient_kernel, coefficient), {**tile, "BLOCKS": n}, {})
          for n in (16, 256)),
    ]  # fmt: skip
    for dim, pairs in ((64, 32), (80, 40), (96, 48), (128, 64), (256, 128), (256, 32)):
        for kind in ("fp16", "bf16"):
            options = row_options(max(16, 1 << (dim // 2 - 1).bit_length()))
            launch = {k: options.pop(k) for k in ("num_warps", "num_stages")}
            signature = _ordered(_row_kernel, {**rows, "out": f"*{kind}"})
            name = f"head_dim {dim}, rotary {2 * pairs}, {kind}"
            out.append((name, _row_kernel, signature, {**options, "PAIRS": pairs, "HALVES": True}, launch))
    return out


def _ordered(kernel: Any, types: dict[str, str]) -> dict[str, str]:
    return {name: types[name] for name in kernel.arg_names if name in types}
