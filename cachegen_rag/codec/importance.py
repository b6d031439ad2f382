"""How much a token matters: a gain for every token and block, so that what is looked at often is coded finer.

Attention is uneven: a few tokens of a document take most of what later tokens ever look at, and an error in the others
hardly shows. Which ones these will be can be told from the KV itself, before any question is known. Calibration
measures the attention that documents receive from the text behind them, and fits its logarithm as a linear function
of a block's channels; the blocks' estimates are then combined, for one layer's idea of importance helps the others.
The encoder multiplies a token's components by its gain before quantizing and the stream carries the gain.
(The idea of predicting attention from the KV alone: Devoto et al., "Expected Attention", 2025, for pruning.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import Block, Importance
from cachegen_rag.codec.transform import block_rows
from cachegen_rag.errors import CorruptBitstreamError
from cachegen_rag.kv import KV

EXPONENT = 0.45
"""Gains are the predicted attention to this power."""
RIDGE = 0.03
"""Ridge of the regressions, in units of the mean square of a (standardized) channel's sum."""
NEUTRAL = 8
"""Index of gain 1; one index up is a gain of sqrt(2)."""


def attention(kv: KV, keep: slice, queries: NDArray[np.float32], key_scale: float) -> NDArray[np.float32]:
    """Attention that tokens ``keep`` receive, mean over queries and heads: ``[layers, tokens]``.

    kv : keys *with* rotation. queries : ``[layers, queries, heads, key_dim]``, with rotation, all behind the keys.
    """
    layers, _, heads, _ = queries.shape
    out = np.zeros((layers, keep.stop - keep.start), np.float32)
    group = heads // kv.keys.shape[2]
    for layer in range(layers):
        for head in range(heads):
            scores = queries[layer, :, head] @ kv.keys[layer, :, head // group].T * np.float32(key_scale)
            scores -= scores.max(axis=1, keepdims=True)
            weights = np.exp(scores, out=scores)
            weights /= weights.sum(axis=1, keepdims=True)
            out[layer] += weights[:, keep].mean(axis=0) / heads
    return out


def fit(blocks: Sequence[Block], samples: Sequence[KV], received: Sequence[NDArray[np.float32]]) -> Importance:
    """Fit the prediction to samples and to the attention ``[layers, tokens]`` that each received."""
    targets, estimates, weights = [], [], []
    for block in blocks:
        layers = sorted({cell.layer for cell in block.cells})
        target = np.concatenate([_detrended(np.log2(a[layers].mean(0) + 1e-9)) for a in received])
        x = np.concatenate([_channels(block, kv) for kv in samples])
        mean, spread = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64) + 1e-6
        x = ((x - mean) / spread).astype(np.float32)
        gram = (x.T @ x).astype(np.float64)
        w = np.linalg.solve(gram + RIDGE * len(x) * np.eye(len(gram)), x.T @ target) / spread
        weights.append(np.append(w, -mean @ w).astype(np.float32))
        targets.append(target)
        estimates.append(x @ (w * spread).astype(np.float32))
    y, r = np.stack(targets, axis=1), np.stack(estimates, axis=1).astype(np.float64)
    gram = r.T @ r + 0.02 * np.trace(r.T @ r) / len(blocks) * np.eye(len(blocks))
    return Importance(tuple(weights), (EXPONENT * np.linalg.solve(gram, r.T @ y)).astype(np.float32))


def _detrended(log_attention: NDArray[np.float32]) -> NDArray[np.float64]:
    """Without its mean and its trend over positions: near tokens are attended more, whatever they are."""
    t = np.linspace(-1, 1, len(log_attention))
    basis = np.stack([np.ones_like(t), t, t**2, t**3], axis=1)
    trend = basis @ np.linalg.lstsq(basis, log_attention.astype(np.float64), rcond=None)[0]
    detrended: NDArray[np.float64] = log_attention.astype(np.float64) - trend
    return detrended


def _channels(block: Block, kv: KV) -> NDArray[np.float32]:
    """The channels of a block, cell by cell: float32 ``[tokens, channels]``."""
    return np.concatenate([a.reshape(len(kv), -1) for a in block_rows(block, kv)], axis=1).astype(np.float32)


def gain_indices(importance: Importance, estimates: Sequence[NDArray[np.float64]]) -> NDArray[np.uint8]:
    """Gain indices ``[blocks, tokens]``, 0 to 15, of all blocks' estimates: ``2 ** ((index - 8) / 2)`` is the gain."""
    combined = np.einsum("bt,bc->ct", np.stack(estimates), importance.combine)  # not BLAS: its threads spin on
    index: NDArray[np.uint8] = (np.rint(2 * np.clip(combined, -4, 3.5)) + NEUTRAL).astype(np.uint8)
    return index


def gains(indices: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The gains of indices."""
    gain: NDArray[np.float32] = np.exp2((indices.astype(np.float32) - NEUTRAL) / 2).astype(np.float32)
    return gain


def inverse_gains(indices: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What the decoder multiplies with."""
    inverse: NDArray[np.float32] = np.exp2((NEUTRAL - indices.astype(np.float32)) / 2).astype(np.float32)
    return inverse


def pack(indices: NDArray[np.uint8]) -> bytes:
    """Two indices a byte, the first in the low half; every block begins a byte."""
    padded = np.pad(indices, ((0, 0), (0, indices.shape[1] % 2)))
    return (padded[:, ::2] | padded[:, 1::2] << 4).tobytes()


def unpack(data: memoryview, blocks: int, tokens: int) -> NDArray[np.uint8]:
    """Inverse of :func:`pack`. Raises CorruptBitstreamError if the size is wrong or padding is not zero."""
    row = (tokens + 1) // 2
    if len(data) != blocks * row:
        raise CorruptBitstreamError(
            f"{len(data)} bytes of gains, {blocks} blocks of {tokens} tokens need {blocks * row}"
        )
    raw = np.frombuffer(data, np.uint8).reshape(blocks, row)
    indices = np.stack([raw & 15, raw >> 4], axis=2).reshape(blocks, 2 * row)
    if tokens % 2 and indices[:, -1].any():
        raise CorruptBitstreamError("padding of the gains is not zero")
    return np.ascontiguousarray(indices[:, :tokens])
