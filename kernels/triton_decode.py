"""Decoding on a GPU: the kernels of ``reference.py`` in Triton, for all chunks of one level in three launches.

    symbols     rANS: one stream a warp's worth of lanes; many streams, one a block and chunk, run at once
    coefficients  symbols to float32, escapes put in, columns put in the transform's order
    rows        inverse transform (one matrix a head), rotary, fp16 / bf16 / float32 written into the engine's cache

Symbols are the reference's exactly; rows agree within the tolerance of SPEC.md. What a kernel needs to know of a
profile at one level is in :class:`cachegen_rag.kernels.triton_tables.LevelTables`; what it needs of the chunks in
:class:`Batch`. The same code runs under ``TRITON_INTERPRET=1`` on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from cachegen_rag.kernels.reference import ESCAPE, GROUP, LANES, LOW, PROB_BITS, KernelError
from cachegen_rag.kernels.triton_tables import LevelTables

_TRUNCATED, _INCONSISTENT = 1, 2
_STATE_WORDS = 2 * LANES

STREAMS = 2
"""Streams a program: two groups of 16 lanes fill a warp."""

ROW_TILE = 64
"""Tokens of one program of the transform; also of the coefficients."""


@triton.jit
def _next_group(
    x, at, columns, sizes, base, word_at, n_words, words, slots, symbols, row_start, previous, c, live, lane,
    SUM: tl.constexpr, PROB: tl.constexpr, LOWEST: tl.constexpr, ESC: tl.constexpr,
):  # fmt: skip
    """Decode one group of every stream: states ``x``, the group's first column ``c`` and row address ``row_start``."""
    on = live[:, None] & (lane >= 0)
    where = base[:, None] + row_start[:, None] + c[:, None] + lane
    up = tl.load(symbols + where - SUM, mask=on & (row_start[:, None] > 0), other=0).to(tl.int32)
    left = tl.where(c[:, None] > 0, previous, 0)
    near = 2 * tl.abs(up) + tl.abs(left)
    column = tl.load(sizes + columns[:, None] + c[:, None] + lane, mask=on, other=0)
    model = (column & 0xFFF) + (near > ((column >> 12) & 0x3FF)).to(tl.int32) + (near > (column >> 22)).to(tl.int32)
    slot = (x & ((1 << PROB) - 1)).to(tl.int32)
    entry = tl.load(slots + (model << PROB) + slot, mask=on, other=0).to(tl.uint32, bitcast=True)
    y = ((entry >> 8) & ((1 << PROB) - 1)) * (x >> PROB) + (entry >> 20)
    reads = (on & (y < LOWEST)).to(tl.int32)
    symbol = (entry & 0xFF).to(tl.int8, bitcast=False).to(tl.int32)
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
    n_streams, n_blocks, SUM: tl.constexpr, S: tl.constexpr, G: tl.constexpr, LANES_: tl.constexpr,
    PROB: tl.constexpr, LOWEST: tl.constexpr, ESC: tl.constexpr,
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
        on = live[:, None] & (lane >= 0)
        x0 = tl.load(payload32 + state_at[:, None] + lane, mask=on, other=LOWEST).to(tl.uint32, bitcast=True)
        x1 = tl.load(payload32 + state_at[:, None] + G + lane, mask=on, other=LOWEST).to(tl.uint32, bitcast=True)
        low_state = tl.max(((x0 < LOWEST) | (x1 < LOWEST)).to(tl.int32), 1)
        base = row * SUM + columns
        at = tl.zeros([S], tl.int32)
        c = tl.zeros([S], tl.int32)
        r = tl.zeros([S], tl.int32)
        row_start = tl.zeros([S], tl.int64)
        escapes = tl.zeros([S], tl.int32)
        symbol = tl.zeros([S, G], tl.int32)
        groups = tl.where(live & (width > 0), rows * (width // G), 0)
        for pair in range(0, (tl.max(groups, 0) + 1) // 2):
            for half in tl.static_range(2):
                going = 2 * pair + half < groups
                tl.store(escapes_before + (row + r) * n_blocks + block, escapes, mask=going & (c == 0))
                x = x0 if half == 0 else x1
                x, at, more, symbol = _next_group(
                    x, at, columns, sizes, base, word_at, n_words, payload16, slots, symbols, row_start, symbol, c,
                    going, lane, SUM, PROB, LOWEST, ESC,
                )  # fmt: skip
                if half == 0:
                    x0 = x
                else:
                    x1 = x
                escapes += more
                c = tl.where(going, c + G, c)
                ends = going & (c >= width)
                c = tl.where(ends, 0, c)
                r = tl.where(ends, r + 1, r)
                row_start = tl.where(ends, row_start + SUM, row_start)
        tl.store(counts + stream, escapes, mask=live)
        left_over = tl.max(((x0 != LOWEST) | (x1 != LOWEST)).to(tl.int32), 1)
        bad = ((at > n_words).to(tl.int32)) | (((at < n_words) | (low_state > 0) | (left_over > 0)).to(tl.int32) << 1)
        tl.store(status + stream, tl.where(groups > 0, bad, 0), mask=live)


@triton.jit
def _coefficient_kernel(
    symbols, escapes_before, counts, chunks, row_chunk, blocks, shrink, step, place, values, z,
    n_rows, n_blocks, SUM: tl.constexpr, Z: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ESC: tl.constexpr,
):  # fmt: skip
    """Symbols to coefficients: program (row tile, block). chunks int64 ``[n, 2]``: first escape, escapes."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    block = tl.program_id(1)
    live = row < n_rows
    first = tl.load(blocks + 2 * block)
    width = tl.load(blocks + 2 * block + 1)
    chunk = tl.load(row_chunk + row, mask=live, other=0)
    # Escapes of this row begin behind those of the chunk's earlier blocks and of the stream's earlier rows.
    earlier = tl.arange(0, BLOCKS)[None, :]
    before = tl.load(counts + chunk[:, None] * n_blocks + earlier, mask=live[:, None] & (earlier < block), other=0)
    rank = tl.sum(before, 1) + tl.load(
        escapes_before + row.to(tl.int64) * n_blocks + block, mask=live & (width > 0), other=0
    )
    value_at = tl.load(chunks + 2 * chunk, mask=live, other=0)
    n_values = tl.load(chunks + 2 * chunk + 1, mask=live, other=0)
    for c in range(0, width, C):
        column = c + tl.arange(0, C)
        used = column < width
        on = live[:, None] & used[None, :]
        s = tl.load(symbols + row[:, None].to(tl.int64) * SUM + first + column[None, :], mask=on, other=0).to(tl.int32)
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
        tl.store(z + row[:, None].to(tl.int64) * Z + to[None, :], value * scale[None, :], mask=on & (to[None, :] >= 0))


@triton.jit
def _product(
    acc0, acc1, z_row, weights, k, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, live, PRECISION: tl.constexpr
):
    """Add ``z[rows, k] @ weights[k, 2, P]`` to the accumulators of a head's even and odd channels."""
    for start in range(0, k, K):
        i = start + tl.arange(0, K)
        a = tl.load(z_row + i[None, :], mask=live[:, None] & (i[None, :] < k), other=0.0)
        b = weights + i[:, None] * (2 * P) + tl.arange(0, P)[None, :]
        acc0 = tl.dot(a, tl.load(b, mask=i[:, None] < k, other=0.0), acc0, input_precision=PRECISION)
        acc1 = tl.dot(a, tl.load(b + P, mask=i[:, None] < k, other=0.0), acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def _row_kernel(
    z, heads, weights, mean, cosine, sine, targets, out, out_row, n_rows,
    Z: tl.constexpr, TOKEN: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Coefficients to rows: program (head, row tile), a head being one of a layer's keys or values.

    heads int64 ``[n, 8]``: z's column and number of the joint part, the same of the own part, index of the weights,
    index of the mean, channels, whether keys. targets int64 ``[n]``: where a head's row 0 is in ``out``; out_row int64
    ``[rows]``: which row of it, ``TOKEN`` elements each, a row is.
    """
    d = heads + tl.program_id(0) * 8
    joint_at, joint = tl.load(d), tl.load(d + 1).to(tl.int32)
    own_at, own = tl.load(d + 2), tl.load(d + 3).to(tl.int32)
    w, mean_at = tl.load(d + 4), tl.load(d + 5)
    dim, is_key = tl.load(d + 6).to(tl.int32), tl.load(d + 7)
    row = tl.program_id(1) * R + tl.arange(0, R)
    live = row < n_rows
    pair = tl.arange(0, P)
    even = tl.zeros([R, P], tl.float32) + tl.load(mean + mean_at + pair)[None, :]
    odd = tl.zeros([R, P], tl.float32) + tl.load(mean + mean_at + P + pair)[None, :]
    z_row = z + row[:, None].to(tl.int64) * Z
    even, odd = _product(even, odd, z_row + joint_at, weights + w, joint, R, P, K, live, PRECISION)
    even, odd = _product(even, odd, z_row + own_at, weights + w + joint * (2 * P), own, R, P, K, live, PRECISION)
    first, second = 2 * pair, 2 * pair + 1
    if PAIRS > 0:
        if is_key > 0:
            turned = pair < PAIRS
            on = live[:, None] & turned[None, :]
            angle = row[:, None].to(tl.int64) * PAIRS + pair[None, :]
            cos = tl.load(cosine + angle, mask=on, other=1.0)
            sin = tl.load(sine + angle, mask=on, other=0.0)
            even, odd = even * cos - odd * sin, even * sin + odd * cos
            if HALVES:
                first = tl.where(turned, pair, first)
                second = tl.where(turned, pair + PAIRS, second)
    kind = out.dtype.element_ty
    if kind == tl.float16:
        even = tl.clamp(even, -65504.0, 65504.0)
        odd = tl.clamp(odd, -65504.0, 65504.0)
    to = out + tl.load(targets + tl.program_id(0)) + tl.load(out_row + row, mask=live, other=0)[:, None] * TOKEN
    tl.store(to + first[None, :], even.to(kind), mask=live[:, None] & (2 * pair[None, :] < dim))
    tl.store(to + second[None, :], odd.to(kind), mask=live[:, None] & (2 * pair[None, :] + 1 < dim))
