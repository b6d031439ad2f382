"""Fits a profile to samples of KV: transforms, scales, symbol models. The maths of calibration, without any model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.entropy import frequencies
from cachegen_rag.codec.importance import gain_indices, gains
from cachegen_rag.codec.profile import CLASSES, Block, Cell, Importance, Level, Profile
from cachegen_rag.codec.quantize import thresholds
from cachegen_rag.codec.transform import BlockCoder, Transform, block_rows
from cachegen_rag.kernels import cpu
from cachegen_rag.kernels.reference import CONTEXTS, ESCAPE, Escapes, context
from cachegen_rag.kv import KV, KVShape

Matrix = NDArray[np.float64]

RIDGE = 0.1
"""Added to a metric, in units of its mean eigenvalue: an error is never taken to be free."""
MAX_CELL_WIDTH = 256
"""Channels that are transformed at once; wider layers are split by heads, so that the cost a token stays small."""
BLOCK_LAYERS = 5
JOINT_WIDTH = 640
"""Layers that are coded together, and the size of their joint transform."""


@dataclass(frozen=True, eq=False)
class Metric:
    """What an error costs: for keys and for values, per layer, ``[layers, channels, channels]``, positive."""

    keys: Matrix
    values: Matrix

    @staticmethod
    def identity(shape: KVShape) -> Metric:
        """Every channel alike."""
        return Metric(
            np.tile(np.eye(shape.key_channels), (shape.layers, 1, 1)),
            np.tile(np.eye(shape.value_channels), (shape.layers, 1, 1)),
        )

    def scaled(self, weight: Matrix) -> Metric:
        """This metric times ``weight [layers, 2]`` (keys, values)."""
        return Metric(self.keys * weight[:, 0, None, None], self.values * weight[:, 1, None, None])

    def matched(self, measured: Metric, share: float) -> Metric:
        """``measured``, mixed with this metric scaled to its size layer by layer.

        What is measured is exact on average but noisy, what is derived is smooth: a mixture is better than either.
        """

        def mix(derived: Matrix, found: Matrix) -> Matrix:
            out = np.empty_like(derived)
            for layer, (a, b) in enumerate(zip(derived, found, strict=True)):
                root, vectors = metric_root(a)
                inverse = vectors / root
                scale = np.trace(inverse.T @ b @ inverse) / len(a)
                out[layer] = (1 - share) * scale * a + share * b
            return out

        return Metric(mix(self.keys, measured.keys), mix(self.values, measured.values))


def metric_root(metric: Matrix) -> tuple[Matrix, Matrix]:
    """Square roots of a metric's eigenvalues, ridge included, and its eigenvectors (columns)."""
    values, vectors = np.linalg.eigh(metric)
    values = np.maximum(values, 0)
    return np.sqrt(values + RIDGE * values.mean() + 1e-30), vectors


def head_groups(heads: int, dim: int) -> list[tuple[int, int]]:
    """Split heads into equal runs ``(first, count)`` of at most ``MAX_CELL_WIDTH`` channels, one head at least."""
    most = max(1, MAX_CELL_WIDTH // dim)
    return [(first, min(most, heads - first)) for first in range(0, heads, most)]


def fit_blocks(
    samples: Sequence[KV], metric: Metric, *, layers: int = BLOCK_LAYERS, width: int = JOINT_WIDTH
) -> tuple[Block, ...]:
    """Transforms of all blocks, from samples (each from another text)."""
    shape = samples[0].shape
    groups = [
        [(is_value, first, count) for first, count in head_groups(shape.kv_heads, dim)]
        for is_value, dim in ((False, shape.key_dim), (True, shape.value_dim))
    ]
    count = max(map(len, groups))
    parts = [[cell for group in groups for cell in group[i::count]] for i in range(count)]
    blocks = []
    for first in range(0, shape.layers, layers):
        run = range(first, min(first + layers, shape.layers))
        for part in parts:
            wanted = [(layer, *kind) for layer in run for kind in part]
            narrowest = min(n * (shape.value_dim if is_value else shape.key_dim) for _, is_value, _, n in wanted)
            joint = min(width // len(wanted), narrowest) if len(wanted) > 1 else 0
            fitted = [_fit_cell(samples, metric, *which, joint) for which in wanted]
            blocks.append(_fit_block(*(list(column) for column in zip(*fitted, strict=True))))
    return tuple(blocks)


def _channels(samples: Sequence[KV], layer: int, is_value: bool, head: int, heads: int) -> NDArray[np.float32]:
    rows = [(kv.values if is_value else kv.keys)[layer, :, head : head + heads].reshape(len(kv), -1) for kv in samples]
    return np.concatenate(rows).astype(np.float32)


def _fit_cell(
    samples: Sequence[KV], metric: Metric, layer: int, is_value: bool, head: int, heads: int, joint: int
) -> tuple[Cell, NDArray[np.float32], Matrix]:
    """The KLT of one cell in its metric, rows by decreasing variance; its first ``joint`` components of all samples;
    and the variance of every component."""
    x = _channels(samples, layer, is_value, head, heads)
    dim = x.shape[1] // heads
    span = slice(head * dim, (head + heads) * dim)
    root, vectors = metric_root((metric.values if is_value else metric.keys)[layer, span, span])
    mean = x.mean(0, dtype=np.float64).astype(np.float32)
    x -= mean
    covariance = (x.T @ x).astype(np.float64) / len(x)
    forward = (vectors * root) @ vectors.T
    _, klt = np.linalg.eigh(forward @ covariance @ forward)
    basis = klt[:, ::-1].T @ (vectors / root) @ vectors.T
    unit = (np.maximum(np.abs(basis).max(1), 1e-30) / 127).astype(np.float32)
    whole = np.rint(basis / unit[:, None]).astype(np.int8)
    inverse = np.linalg.inv((whole * unit[:, None]).astype(np.float64))
    variance = np.einsum("ij,ik,kj->j", inverse, covariance, inverse, optimize=True)
    # Rows behind the joint ones are put in order of the variance that they have after rounding the basis.
    rows = np.concatenate([np.arange(joint), joint + np.argsort(-variance[joint:], kind="stable")])
    cell = Cell(layer, is_value, head, heads, mean, unit[rows], whole[rows])
    return cell, x @ inverse[:, :joint].astype(np.float32), variance[rows]


def _fit_block(cells: list[Cell], components: list[NDArray[np.float32]], variances: list[Matrix]) -> Block:
    """The joint KLT of the cells' leading components, and every component's scale."""
    joint = components[0].shape[1]
    top = np.concatenate(components, axis=1)
    covariance = (top.T @ top).astype(np.float64) / max(len(top), 1)
    unit, whole, variance = np.zeros(0, np.float32), np.zeros((0, 0), np.int8), np.zeros(0)
    if joint:
        basis = np.linalg.eigh(covariance)[1][:, ::-1].T
        unit = (np.abs(basis).max(1) / 127).astype(np.float32)
        whole = np.rint(basis / unit[:, None]).astype(np.int8)
        inverse = np.linalg.inv((whole * unit[:, None]).astype(np.float64))
        variance = np.einsum("ij,ik,kj->j", inverse, covariance, inverse, optimize=True)
        order = np.argsort(-variance, kind="stable")
        unit, whole, variance = unit[order], np.ascontiguousarray(whole[order]), variance[order]
    scales = [_scale(variance), *(_scale(v[joint:]) for v in variances)]
    return Block(tuple(cells), joint, unit, whole, np.concatenate(scales))


def _scale(variance: Matrix) -> NDArray[np.int16]:
    scale: NDArray[np.int16] = np.clip(np.rint(2 * np.log2(np.maximum(variance, 1e-24))), -4000, 4000).astype(np.int16)
    return scale


def draft(
    shape: KVShape, fingerprint: bytes, sinks: int, blocks: tuple[Block, ...], importance: Importance | None = None
) -> Profile:
    """A profile with these blocks, one placeholder level, and models for Laplace distributions."""
    tables = frequencies(np.zeros((CLASSES, CONTEXTS, 256)))
    shrink = np.tile(np.array([0.05, 0.02], np.float32), (CLASSES, 1))
    threshold = np.tile(np.array([0.6, 0.42], np.float32), (CLASSES, 1))
    scale = 2.0 ** ((np.arange(CLASSES) - 12) / 4)
    limits = np.clip(np.rint(np.stack([1.2 * scale, 3.6 * scale], 1)), 0, 250)
    return Profile(
        shape,
        fingerprint,
        sinks,
        1,
        (Level(1, 0.0, 0.0, 0),),
        tables,
        limits.astype(np.uint8),
        shrink,
        threshold,
        blocks,
        importance or Importance.none(blocks),
    )


def quantized(
    profile: Profile, samples: Sequence[KV], step: int
) -> Iterator[tuple[BlockCoder, NDArray[np.float32], NDArray[np.float32], NDArray[np.int8], Escapes]]:
    """Per block and sample: how it is coded, its columns in steps, what a token's coefficients are to be multiplied
    with when decoding, and the symbols and escapes."""
    coders = Transform(profile).coders(step)
    found = []
    for kv in samples:
        estimates = [cpu.components(block_rows(coder.block, kv), coder.forward)[1] for coder in coders]
        found.append(gains(gain_indices(profile.importance, estimates)))
    for index, coder in enumerate(coders):
        for kv, gain in zip(samples, found, strict=True):
            components, _ = cpu.components(block_rows(coder.block, kv), coder.forward)
            symbols, escapes = cpu.quantize(components, gain[index], coder.quantizer)
            size = components[:, coder.quantizer.order] * gain[index][:, None] * np.float32(coder.quantizer.per_step)
            yield coder, size, 1 / gain[index], symbols, escapes


def fit_models(profile: Profile, samples: Sequence[KV], steps: Sequence[int]) -> Profile:
    """Symbol models and reconstruction points from what the samples become at these steps."""
    counts = np.zeros((CLASSES * CONTEXTS, 256))
    pulled, seen = np.zeros((CLASSES, 2)), np.zeros((CLASSES, 2))
    for step in steps:
        for coder, size, _, symbols, _ in quantized(profile, samples, step):
            model = coder.columns.model + context(symbols, coder.columns)
            counts += np.bincount((model * 256 + symbols.view(np.uint8)).ravel(), minlength=counts.size).reshape(
                counts.shape
            )
            magnitude = np.abs(symbols.astype(np.int64))
            for j, chosen in enumerate((magnitude == 1, (magnitude > 1) & (symbols != ESCAPE))):
                pulled[:, j] += np.bincount(coder.classes, ((magnitude - np.abs(size)) * chosen).sum(0), CLASSES)
                seen[:, j] += np.bincount(coder.classes, chosen.sum(0), CLASSES)
    shrink = np.clip((pulled + 20 * profile.shrink) / (seen + 20), -0.45, 0.45).astype(np.float32)
    by_class = counts.reshape(CLASSES, CONTEXTS, 256)
    frequency = frequencies(by_class)
    threshold = thresholds(by_class, frequency, shrink)
    return replace(profile, frequency=frequency, shrink=shrink, threshold=threshold, _bytes=None)
