"""Rotary position embedding: apply it, remove it, and convert between the two pair layouts.

Source of the method: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
All rotation is done in float32 (angles in float64), because the position may be large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError

PairLayout = Literal["interleaved", "half"]


@dataclass(frozen=True)
class RopeSpec:
    """How an engine rotates its keys.

    inv_freq : ``rotary_dim / 2`` angles in radians per position, one a pair, any scaling already applied.
    layout : which channels form pair ``i``: ``interleaved`` is ``(2i, 2i+1)``; ``half`` is ``(i, i + rotary_dim/2)``.
    Channels at or beyond ``rotary_dim`` are not rotated. Stored KV always has interleaved pairs
    (see :class:`cachegen_rag.kv.KV`); ``layout`` says what the engine wants.
    """

    inv_freq: tuple[float, ...]
    layout: PairLayout

    @property
    def rotary_dim(self) -> int:
        """Number of leading key channels that are rotated."""
        return 2 * len(self.inv_freq)

    def identity(self) -> RopeSpec:
        """The same for telling models apart: frequencies rounded to float32.

        Powers differ in the last bit of a float64 from one CPU to the next, and with them every key of a store would.
        """
        return RopeSpec(tuple(np.asarray(self.inv_freq, np.float32).tolist()), self.layout)

    @staticmethod
    def plain(
        rotary_dim: int, base: float = 10000.0, layout: PairLayout = "interleaved", scale: float = 1.0
    ) -> RopeSpec:
        """The unscaled or linearly scaled rotary embedding: angle ``scale * base ** (-2i / rotary_dim)``."""
        if rotary_dim % 2:
            raise ConfigError(f"rotary_dim must be even, got {rotary_dim}")
        pairs = np.arange(rotary_dim // 2, dtype=np.float64)
        return RopeSpec(tuple((scale * base ** (-2.0 * pairs / max(rotary_dim, 1))).tolist()), layout)


def cos_sin(positions: NDArray[Any], spec: RopeSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of every angle, each float32 ``[tokens, rotary_dim / 2]``."""
    angles = positions.astype(np.float64)[:, None] * np.asarray(spec.inv_freq, dtype=np.float64)[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
    keys: NDArray[Any], positions: NDArray[Any], spec: RopeSpec, *, inverse: bool = False
) -> NDArray[np.float32]:
    """Rotate keys ``[..., tokens, kv_heads, key_dim]`` with interleaved pairs to ``positions [tokens]``; float32 out.

    ``inverse=True`` removes the rotation.
    """
    out = np.array(keys, dtype=np.float32)
    if spec.rotary_dim == 0:
        return out
    cos, sin = cos_sin(positions, spec)
    if inverse:
        sin = -sin
    cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = out[..., 0 : spec.rotary_dim : 2].copy(), out[..., 1 : spec.rotary_dim : 2].copy()
    out[..., 0 : spec.rotary_dim : 2] = even * cos - odd * sin
    out[..., 1 : spec.rotary_dim : 2] = even * sin + odd * cos
    return out


def to_interleaved(keys: NDArray[Any], spec: RopeSpec) -> NDArray[Any]:
    """Reorder the key channels of an engine with ``spec.layout`` into interleaved pairs."""
    return keys if spec.layout == "interleaved" else keys[..., interleaving(keys.shape[-1], spec)]


def from_interleaved(keys: NDArray[Any], spec: RopeSpec) -> NDArray[Any]:
    """Reorder interleaved key channels into the layout of an engine with ``spec.layout``."""
    return keys if spec.layout == "interleaved" else keys[..., np.argsort(interleaving(keys.shape[-1], spec))]


def interleaving(key_dim: int, spec: RopeSpec) -> NDArray[np.intp]:
    """Index ``[key_dim]`` that takes half-split channels to interleaved ones: ``interleaved = half[..., index]``."""
    half = spec.rotary_dim // 2
    index = np.arange(key_dim)
    index[0 : spec.rotary_dim : 2] = np.arange(half)
    index[1 : spec.rotary_dim : 2] = np.arange(half) + half
    return index
