"""A linear correction of documents' values, learned once per model: from KV in the warm context to KV in prompts.

A document's KV in a prompt differs from its KV in the warm context at random, and also in a way that is the same for
every document: it now stands among texts on its own subject. That part can be learned. Per layer, a ridge regression
predicts the difference of the values from keys (before rotary) and values, over prompts of related documents; it is
added to every document at index time and costs nothing at query time. Correcting the keys as well gains nothing.
Ours; low-rank patches stored with each document (2026) are the nearest relative.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import family
from cachegen_rag.errors import ConfigError, EncodeError, ProfileError
from cachegen_rag.fingerprint import ModelFingerprint
from cachegen_rag.kv import KV, KVShape, as_numpy

RIDGE = 1.0
"""Weight of the penalty, in units of the features' mean square. Strong: there are few documents to learn from."""

RANK = 16
"""Rank that each layer's map is cut to."""

SKIP = 2
"""First tokens of a document that are not learned from: their KV is an outlier."""

MAX_BYTES = 64 << 20
_MAGIC = b"CGRCORR1"
_HEADER = struct.Struct("<8s5I")


@dataclass(frozen=True, eq=False)
class Correction:
    """``values + [keys, values, 1] @ left @ right`` per layer.

    left : float16 ``[layers, key_channels + value_channels + 1, rank]``; right : float16
    ``[layers, rank, value_channels]``.
    """

    shape: KVShape
    left: NDArray[np.float16]
    right: NDArray[np.float16]

    @property
    def hash(self) -> str:
        """SHA-256 of the bytes: part of what documents are stored under."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def apply(self, kv: KV) -> KV:
        """The corrected KV, float32. Raises EncodeError if it is of another shape."""
        if kv.shape != self.shape:
            raise EncodeError(f"this correction is for KV of {self.shape}, not of {kv.shape}")
        keys, values = as_numpy(kv.keys).astype(np.float32), as_numpy(kv.values).astype(np.float32)
        for layer in range(len(keys)):
            features = _features(keys[layer], values[layer])
            change = features @ self.left[layer].astype(np.float32) @ self.right[layer].astype(np.float32)
            values[layer] += change.reshape(values[layer].shape)
        return KV(keys, values, kv.token_ids, kv.positions)

    def to_bytes(self) -> bytes:
        """Magic, u32 layers, kv_heads, key_dim, value_dim, rank; then both maps as little-endian fp16."""
        s = self.shape
        header = _HEADER.pack(_MAGIC, s.layers, s.kv_heads, s.key_dim, s.value_dim, self.left.shape[2])
        return header + self.left.astype("<f2").tobytes() + self.right.astype("<f2").tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Correction:
        """Read what :meth:`to_bytes` wrote. Raises ProfileError if it is anything else."""
        if len(data) < _HEADER.size or len(data) > MAX_BYTES:
            raise ProfileError(f"a correction of {len(data)} bytes; wanted {_HEADER.size} to {MAX_BYTES}")
        magic, layers, heads, key_dim, value_dim, rank = _HEADER.unpack_from(data)
        shape = KVShape(layers, heads, key_dim, value_dim)
        features = shape.key_channels + shape.value_channels + 1
        first, second = layers * features * rank, layers * rank * shape.value_channels
        if magic != _MAGIC or len(data) != _HEADER.size + 2 * (first + second):
            raise ProfileError("not a correction, or cut short")
        numbers = np.frombuffer(data, "<f2", offset=_HEADER.size).astype(np.float16)
        if not np.isfinite(numbers).all():
            raise ProfileError("the correction holds numbers that are not finite")
        left = numbers[:first].reshape(layers, features, rank)
        right = numbers[first:].reshape(layers, rank, shape.value_channels)
        return Correction(shape, left, right)


class Fit:
    """Learns a correction from pairs of KV: add documents, then :meth:`solve`."""

    def __init__(self, shape: KVShape) -> None:
        features = shape.key_channels + shape.value_channels + 1
        self._shape = shape
        self._gram = np.zeros((shape.layers, features, features), np.float32)
        self._cross = np.zeros((shape.layers, features, shape.value_channels), np.float32)
        self.tokens = 0

    def add(self, stored: KV, wanted: KV) -> None:
        """A document in the warm context, and the same in a prompt, row by row. Its first tokens are left out."""
        if len(stored) != len(wanted):
            raise EncodeError(f"{len(stored)} and {len(wanted)} tokens are not the same document")
        rows = slice(SKIP, None)
        for layer in range(self._shape.layers):
            keys, values, there = (as_numpy(a[layer])[rows] for a in (stored.keys, stored.values, wanted.values))
            features = _features(keys, values)
            target = (there.astype(np.float32) - values).reshape(len(features), -1)
            error = np.square(target).sum(axis=1)
            weight = 1.0 / (error / max(float(np.median(error)), 1e-9) + 1.0)  # outliers count less
            weighted = features * weight[:, None].astype(np.float32)
            self._gram[layer] += weighted.T @ features
            self._cross[layer] += weighted.T @ target
        self.tokens += max(0, len(stored) - SKIP)

    def solve(self, ridge: float = RIDGE, rank: int = RANK) -> Correction:
        """The ridge solution, each layer cut to ``rank`` where that changes its predictions least.

        Raises ConfigError if nothing was added.
        """
        if not self.tokens:
            raise ConfigError("a correction needs documents to learn from")
        rank = min(rank, self._shape.value_channels)
        left, right = [], []
        for gram, cross in zip(self._gram, self._cross, strict=True):
            gram = gram + np.eye(len(gram), dtype=np.float32) * max(ridge * float(np.trace(gram)) / len(gram), 1e-6)
            root = np.linalg.cholesky(gram.astype(np.float64))
            full = np.linalg.solve(root.T, np.linalg.solve(root, cross.astype(np.float64)))
            _, _, basis = np.linalg.svd(root.T @ full, full_matrices=False)
            left.append(full @ basis[:rank].T)
            right.append(basis[:rank])
        # Balanced, so that neither factor leaves the range of fp16.
        scale = [np.sqrt(max(float(np.abs(a).max()), 1e-12)) for a in left]
        return Correction(
            self._shape,
            np.stack([a / s for a, s in zip(left, scale, strict=True)]).astype(np.float16),
            np.stack([b * s for b, s in zip(right, scale, strict=True)]).astype(np.float16),
        )


def shipped_correction(fingerprint: ModelFingerprint) -> Correction | None:
    """The correction that ships with this package for models with this tokenizer, shape and rotation, or None.

    It was learned on one of them: another fine-tune may need its own, which the gate shows.
    """
    path = files("cachegen_rag") / "data" / "corrections" / f"{family(fingerprint).hex()[:16]}.bin"
    return Correction.from_bytes(path.read_bytes()) if path.is_file() else None


def _features(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float32]:
    tokens = len(keys)
    ones = np.ones((tokens, 1), np.float32)
    return np.concatenate([keys.reshape(tokens, -1), values.reshape(tokens, -1), ones], axis=1, dtype=np.float32)
