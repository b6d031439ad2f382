"""Encoding on a GPU: the kernels of ``reference.py`` in Triton, for all chunks in two launches.

    integers    forward transform (one matrix a block), quantization; values that are no symbols go to a list
    words       rANS: one stream a warp, backwards through its symbols, the words written from the end of its room

Given the same integers, the bytes are the reference's exactly. The transform is computed in three tf32 passes, as
precise as float32, in another order of summation: an integer may differ by one where a component lies within float32's
rounding of a threshold.
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

from cachegen_rag.kernels.reference import ESCAPE, GROUP, LOW, MAX_SIZE, PROB_BITS, KernelError
from cachegen_rag.kernels.triton_tables import LevelTables

STREAMS = 16 if os.environ.get("TRITON_INTERPRET") == "1" else 1
ROWS, DEPTH = 64, 32


@triton.jit
def _integer_kernel(
    keys, tiles, cells, weights, mean, per_step, threshold, reach, gains, symbols, escape_at, escape_value, counters,
    n_rows, n_columns, n_blocks, room, R: tl.constexpr, G: tl.constexpr, K: tl.constexpr, ESC: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels to symbols: program (32 columns of one block, row tile).

    tiles int64 ``[n, 6]``: first column, first cell, cells, index of the weights, their columns, block. cells int64
    ``[n, 4]``: where a cell's channels are from ``keys`` (elements), elements from token to token, channels, the mean.
    gains float32 ``[rows, blocks]``. counters int32 ``[2]``: escapes found, components beyond the limit.
    """
    d = tiles + tl.program_id(0) * 6
    first = tl.multiple_of(tl.load(d).to(tl.int32), G)
    cell, n_cells = tl.load(d + 1).to(tl.int32), tl.load(d + 2).to(tl.int32)
    w = tl.multiple_of(tl.load(d + 3), G)
    width = tl.multiple_of(tl.load(d + 4).to(tl.int32), G)
    row = tl.program_id(1) * R + tl.arange(0, R)
    live = row < n_rows
    lane = tl.arange(0, G)
    acc = tl.zeros([R, G], tl.float32)
    for i in range(cell, cell + n_cells):
        at, stride = tl.load(cells + 4 * i), tl.load(cells + 4 * i + 1)
        channels, mean_at = tl.load(cells + 4 * i + 2).to(tl.int32), tl.load(cells + 4 * i + 3)
        for k in range(0, channels, K):
            c = k + tl.arange(0, K)
            x = tl.load(
                keys + at + row[:, None].to(tl.int64) * stride + c[None, :],
                mask=live[:, None] & (c[None, :] < channels), other=0.0,
            ).to(tl.float32)  # fmt: skip
            x -= tl.load(mean + mean_at + c, mask=c < channels, other=0.0)[None, :]
            b = tl.load(weights + w + c[:, None] * width + lane[None, :], mask=c[:, None] < channels, other=0.0)
            acc = tl.dot(x, b, acc, input_precision=PRECISION)
        w += channels * width
    gain = tl.load(gains + row.to(tl.int64) * n_blocks + tl.load(d + 5), mask=live, other=0.0)
    acc *= gain[:, None]
    column = first + lane
    size = tl.abs(acc) * tl.load(per_step + column)[None, :]
    zero, rounding = tl.load(threshold + 2 * column)[None, :], tl.load(threshold + 2 * column + 1)[None, :]
    beyond = (live[:, None] & ((size > LIMIT) | (size != size))).to(tl.int32)
    whole = tl.maximum(tl.where(beyond > 0, 0.0, size + rounding).to(tl.int32), 1)
    whole = tl.where(size >= zero, whole, 0)
    value = tl.where(acc < 0, -whole, whole)
    escaped = live[:, None] & (whole > tl.load(reach + column)[None, :])
    place = row[:, None].to(tl.int64) * n_columns + column[None, :]
    tl.store(symbols + place, tl.where(escaped, ESC, value).to(tl.int8), mask=live[:, None] & (lane[None, :] >= 0))
    n_escaped = tl.sum(tl.sum(escaped.to(tl.int32), 1), 0)
    if n_escaped > 0:
        start = tl.atomic_add(counters, n_escaped)
        per_row = tl.sum(escaped.to(tl.int32), 1)
        before = (tl.cumsum(per_row, 0) - per_row)[:, None]
        index = start + before + tl.cumsum(escaped.to(tl.int32), 1) - escaped.to(tl.int32)
        tl.store(escape_at + index, place, mask=escaped & (index < room))
        tl.store(escape_value + index, value, mask=escaped & (index < room))
    n_beyond = tl.sum(tl.sum(beyond, 1), 0)
    if n_beyond > 0:
        tl.atomic_add(counters + 1, n_beyond)


@triton.jit
def _word_kernel(
    symbols, streams, blocks, sizes, codes, states, words, counts, n_streams, n_blocks, n_columns,
    S: tl.constexpr, G: tl.constexpr, PROB: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Entropy coding. streams int64 ``[n, 3]``: first row, rows, end of the room for words."""
    for begin in range(tl.program_id(0) * S, n_streams, tl.num_programs(0) * S):
        stream = begin + tl.arange(0, S)
        live = stream < n_streams
        row = tl.load(streams + 3 * stream.to(tl.int64), mask=live, other=0)
        rows = tl.load(streams + 3 * stream.to(tl.int64) + 1, mask=live, other=0).to(tl.int32)
        end = tl.load(streams + 3 * stream.to(tl.int64) + 2, mask=live, other=0)
        block = stream % n_blocks
        first = tl.load(blocks + 2 * block, mask=live, other=0)
        width = tl.load(blocks + 2 * block + 1, mask=live, other=0)
        lane = tl.arange(0, G)[None, :]
        base = row * n_columns + first
        x = tl.zeros([S, G], tl.uint32) + LOWEST
        used = tl.zeros([S], tl.int32)
        groups = tl.where(live & (width > 0), rows * (width // G), 0)
        r, c = rows - 1, width - G
        for step in range(tl.max(groups, 0)):
            going = step < groups
            on = going[:, None] & (lane >= 0)
            at = symbols + (base + r.to(tl.int64) * n_columns + c)[:, None] + lane
            symbol = tl.load(at, mask=on, other=0).to(tl.int32)
            up = tl.load(at - n_columns, mask=on & (r[:, None] > 0), other=0).to(tl.int32)
            left = tl.load(at - G, mask=on & (c[:, None] > 0), other=0).to(tl.int32)
            near = 2 * tl.abs(up) + tl.abs(left)
            column = tl.load(sizes + first[:, None] + c[:, None] + lane, mask=on, other=0)
            model = (column & 0xFFF) + (near > ((column >> 12) & 0x3FF)).to(tl.int32)
            model += (near > (column >> 22)).to(tl.int32)
            code = tl.load(codes + (model << 8) + (symbol & 0xFF), mask=on, other=1).to(tl.uint32, bitcast=True)
            frequency = code & 0xFFFF
            frequency = tl.where(frequency == 0, 1, frequency)
            full = (on & ((x >> (32 - PROB)) >= frequency)).to(tl.int32)
            n = tl.sum(full, 1)
            to = (end - used - n)[:, None] + tl.cumsum(full, 1) - full
            tl.store(words + to, (x & 0xFFFF).to(tl.int16), mask=full > 0)
            used += n
            y = tl.where(full > 0, x >> 16, x)
            quotient = y // frequency
            y = (quotient << PROB) + (y - quotient * frequency) + (code >> 16)
            x = tl.where(on, y, x)
            c -= G
            wrap = c < 0
            c = tl.where(wrap, width - G, c)
            r = tl.where(wrap, r - 1, r)
        at_state = states + stream[:, None] * G + lane
        tl.store(at_state, x.to(tl.int32, bitcast=True), mask=live[:, None] & (lane >= 0))
        tl.store(counts + stream, used, mask=live)


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward transform of a level: what ``_integer_kernel`` needs, but for the KV's addresses."""

    tiles: torch.Tensor
    weights: torch.Tensor
    mean: torch.Tensor
    per_step: torch.Tensor
    threshold: torch.Tensor
    reach: torch.Tensor
    where: tuple[tuple[int, bool, int, int], ...]
    mean_at: NDArray[np.int64]

    @staticmethod
    def of(blocks: Sequence[BlockForward], tables: LevelTables) -> Forward:
        """Put the forward transforms of all blocks on the device of ``tables``."""
        tiles, weights, means, where, mean_at = [], [], [], [], []
        size = cell = column = mean_size = 0
        for index, block in enumerate(blocks):
            width = block.matrix.shape[1]
            for c in range(0, width, GROUP):
                tiles.append((column + c, cell, len(block.cells), size + c, width, index))
            for mean, place in zip(block.means, block.cells, strict=True):
                where.append(place)
                mean_at.append(mean_size)
                means.append(mean)
                mean_size += len(mean)
            weights.append(block.matrix.ravel())
            size += block.matrix.size
            cell, column = cell + len(block.cells), column + width
        put = tables.put
        return Forward(
            put(np.asarray(tiles, np.int64).reshape(-1, 6)),
            put(np.concatenate([*weights, np.zeros(GROUP, np.float32)]).astype(np.float32)),
            put(np.concatenate(means).astype(np.float32)),
            put(np.repeat([b.per_step for b in blocks], [b.matrix.shape[1] for b in blocks]).astype(np.float32)),
            put(np.concatenate([b.threshold for b in blocks]).astype(np.float32)),
            put(np.concatenate([b.reach for b in blocks]).astype(np.int32)),
            tuple(where),
            np.asarray(mean_at, np.int64),
        )


@dataclass(frozen=True, eq=False)
class BlockForward:
    """One block. matrix : float32 ``[channels of all cells, columns]``, from channels less their mean to components.

    cells : ``(layer, is_value, head, channels)`` each. per_step, threshold, reach : as in ``reference.Quantizer``.
    """

    matrix: NDArray[np.float32]
    means: Sequence[NDArray[np.float32]]
    cells: Sequence[tuple[int, bool, int, int]]
    per_step: float
    threshold: NDArray[np.float32]
    reach: NDArray[np.int32]


def quantize(
    forward: Forward, tables: LevelTables, keys: torch.Tensor, values: torch.Tensor, gains: torch.Tensor
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int32]]:
    """Symbols int8 ``[rows, columns]``, and where (row-major over all columns, increasing) and what the escapes are.

    keys, values : ``[layers, rows, kv_heads, dim]`` on the device, heads and channels contiguous, rotation removed.
    gains : float32 ``[rows, blocks]``, what components are multiplied by first.
    Raises KernelError if a component is beyond what a level can code.
    """
    rows, device = keys.shape[1], keys.device
    cells = []
    for (layer, is_value, head, channels), mean_at in zip(forward.where, forward.mean_at, strict=True):
        source = (values if is_value else keys)[layer]
        at = (source.data_ptr() - keys.data_ptr()) // keys.element_size() + head * source.stride(1)
        cells.append((at, source.stride(0), channels, mean_at))
    symbols = torch.empty(rows, tables.n_columns, dtype=torch.int8, device=device)
    room = max(1024, rows * tables.n_columns // 64)
    while True:
        escape_at = torch.empty(room, dtype=torch.int64, device=device)
        escape_value = torch.empty(room, dtype=torch.int32, device=device)
        counters = torch.zeros(2, dtype=torch.int32, device=device)
        if len(forward.tiles):
            _integer_kernel[(len(forward.tiles), triton.cdiv(rows, ROWS))](
                keys, forward.tiles, tables.put(np.asarray(cells, np.int64)), forward.weights, forward.mean,
                forward.per_step, forward.threshold, forward.reach, gains, symbols, escape_at, escape_value, counters,
                rows, tables.n_columns, tables.n_blocks, room, num_warps=8, **_INTEGER,
            )  # fmt: skip
        found, beyond = counters.tolist()
        if beyond:
            raise KernelError(f"{beyond} components are beyond what this level can code; use a finer one")
        if found <= room:
            break
        room = found
    order = torch.argsort(escape_at[:found])
    return symbols, escape_at[:found][order].cpu().numpy(), escape_value[:found][order].cpu().numpy()


def entropy_code(symbols: torch.Tensor, tables: LevelTables, rows: Sequence[int]) -> list[list[bytes]]:
    """The streams of chunks of ``rows`` tokens each, block by block: 32 states and then words, as a bitstream has them.

    symbols : int8 ``[sum of rows, columns]`` on the device.
    """
    device, n_blocks = symbols.device, tables.n_blocks
    first = np.cumsum([0, *rows])
    widths = tables.blocks[:, 1].cpu().numpy().astype(np.int64)
    room = np.asarray(rows, np.int64)[:, None] * widths
    ends = np.cumsum(room.ravel())
    streams = np.stack([np.repeat(first[:-1], n_blocks), np.repeat(np.asarray(rows), n_blocks), ends], axis=1)
    n = len(streams)
    words = torch.empty(max(int(ends[-1]), 1), dtype=torch.int16, device=device)
    states = torch.empty(n, GROUP, dtype=torch.int32, device=device)
    counts = torch.zeros(n, dtype=torch.int32, device=device)
    _word_kernel[(triton.cdiv(n, STREAMS),)](
        symbols, tables.put(streams.astype(np.int64)), tables.blocks, tables.columns, tables.codes, states, words,
        counts, n, n_blocks, tables.n_columns, S=STREAMS, G=GROUP, PROB=PROB_BITS, LOWEST=LOW, num_warps=1,
    )  # fmt: skip
    lengths = counts.cpu().numpy()
    joined = torch.cat([words[end - k : end] for end, k in zip(ends, lengths, strict=True)]).cpu().numpy()
    heads, at = states.cpu().numpy().astype("<i4"), np.cumsum([0, *lengths])
    out = [heads[i].tobytes() + joined[at[i] : at[i + 1]].astype("<i2").tobytes() for i in range(n)]
    return [
        [data if width else b"" for data, width in zip(out[i : i + n_blocks], widths, strict=True)]
        for i in range(0, n, n_blocks)
    ]


_INTEGER: dict[str, Any] = {
    "R": ROWS, "G": GROUP, "K": DEPTH, "ESC": ESCAPE, "LIMIT": float(MAX_SIZE), "PRECISION": "tf32x3",
}  # fmt: skip


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """How the kernels are launched; see :func:`cachegen_rag.kernels.triton_decode.variants`."""
    words = {"symbols": "*i8", "streams": "*i64", "words": "*i16"}
    words |= dict.fromkeys(("blocks", "sizes", "codes", "states", "counts"), "*i32")
    words |= dict.fromkeys(("n_streams", "n_blocks", "n_columns"), "i32")
    integers = {"tiles": "*i64", "cells": "*i64", "reach": "*i32", "symbols": "*i8", "escape_at": "*i64"}
    integers |= dict.fromkeys(("weights", "mean", "per_step", "threshold", "gains"), "*fp32")
    integers |= {"escape_value": "*i32", "counters": "*i32", "n_rows": "i32", "n_columns": "i32", "n_blocks": "i32"}
    integers |= {"room": "i32"}

    def ordered(kernel: Any, types: dict[str, str]) -> dict[str, str]:
        return {name: types[name] for name in kernel.arg_names if name in types}

    launch = {"num_warps": 8}
    constants = {"S": 1, "G": GROUP, "PROB": PROB_BITS, "LOWEST": LOW}
    return [
        ("", _word_kernel, ordered(_word_kernel, words), constants, {"num_warps": 1}),
        *((kind, _integer_kernel, ordered(_integer_kernel, {**integers, "keys": f"*{kind}"}), _INTEGER, launch)
          for kind in ("fp32", "fp16")),
    ]  # fmt: skip
