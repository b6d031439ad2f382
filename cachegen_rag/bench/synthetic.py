"""Profiles and KV of any shape, made up: for kernels, which do not care whether a transform was learned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.entropy import frequencies
from cachegen_rag.codec.fit import head_groups
from cachegen_rag.codec.profile import CLASSES, Block, Cell, Importance, Level, Profile
from cachegen_rag.kernels.reference import CONTEXTS
from cachegen_rag.kv import KV, KVShape


def profile(
    shape: KVShape, *, layers_a_block: int = 2, joint: int = 24, narrow: int = 0, levels: int = 2, seed: int = 0
) -> Profile:
    """Random orthogonal bases; scales that fall from about 2^4 to 2^-5 steps of level 1.

    ``narrow`` takes that many quarter octaves off the scales: fewer components are coded then.
    """
    rng = np.random.default_rng(seed)

    def basis(n: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        q = np.linalg.qr(rng.standard_normal((n, n)))[0] if n else np.zeros((0, 0))
        unit = np.abs(q).max(1, initial=1e-3) / 127
        return np.round(q / unit[:, None]).astype(np.int8), unit.astype(np.float32)

    def scales(n: int, top: int) -> NDArray[np.int16]:
        return np.sort(np.round(top - narrow - 36 * rng.random(n) ** 0.7).astype(np.int16))[::-1]

    key_groups, value_groups = head_groups(shape.kv_heads, shape.key_dim), head_groups(shape.kv_heads, shape.value_dim)
    parts = max(len(key_groups), len(value_groups))

    def importance(blocks: list[Block], rng: np.random.Generator) -> Importance:
        channels = [rng.standard_normal(b.components + 1) / np.sqrt(b.components) for b in blocks]
        combine = np.eye(len(blocks)) * 0.3 + 0.1 * rng.standard_normal((len(blocks), len(blocks)))
        return Importance(tuple(c.astype(np.float32) for c in channels), combine.astype(np.float32))

    blocks = []
    for first in range(0, shape.layers, layers_a_block):
        for part in range(parts):
            cells = []
            for layer in range(first, min(first + layers_a_block, shape.layers)):
                for is_value, dim, groups in (
                    (False, shape.key_dim, key_groups),
                    (True, shape.value_dim, value_groups),
                ):
                    for head, heads in groups[part::parts]:
                        matrix, unit = basis(heads * dim)
                        mean = rng.standard_normal(len(unit)).astype(np.float32)
                        cells.append(Cell(layer, is_value, head, heads, mean, unit, matrix))
            n_joint = min(joint, *(c.channels for c in cells)) if len(cells) > 1 else 0
            matrix, unit = basis(len(cells) * n_joint)
            scale = [scales(len(cells) * n_joint, 16), *(scales(c.channels - n_joint, 4) for c in cells)]
            blocks.append(Block(tuple(cells), n_joint, unit, matrix, np.concatenate(scale)))
    classes = np.arange(CLASSES)
    context = np.stack([np.minimum(classes // 8, 20), np.minimum(2 + classes // 3, 60)], axis=1).astype(np.uint8)
    shrink = np.stack([0.1 - classes * 0.001, np.full(CLASSES, 0.03)], axis=1).astype(np.float32)
    threshold = np.stack([np.full(CLASSES, 0.6), np.full(CLASSES, 0.45)], axis=1).astype(np.float32)
    counts = rng.random((CLASSES, CONTEXTS, 256)) * 0.01
    made = Profile(
        shape,
        bytes(range(32)),
        2,
        1,
        tuple(Level(i, 0.01 * i, 4.0 / i, 4 * (i - 1)) for i in range(1, levels + 1)),
        frequencies(counts),
        context,
        shrink,
        threshold,
        tuple(blocks),
        importance(blocks, rng),
    )
    return Profile.from_bytes(made.to_bytes())


def kv(profile: Profile, tokens: int, *, seed: int = 1, first: int = 0, outliers: int = 0) -> KV:
    """KV whose components have the scales that the profile says; ``outliers`` values far beyond the symbols' range."""
    rng = np.random.default_rng(seed)
    s = profile.shape
    keys = np.zeros((s.layers, tokens, s.kv_heads, s.key_dim), np.float32)
    values = np.zeros((s.layers, tokens, s.kv_heads, s.value_dim), np.float32)
    for block in profile.blocks:
        z = rng.standard_normal((tokens, block.components)) * 2.0 ** (block.scale / 4)
        for _ in range(outliers):
            z[rng.integers(tokens), rng.integers(min(40, block.components))] += 3000.0
        n_joint = len(block.cells) * block.joint
        top = z[:, :n_joint] @ block.joint_matrix
        own = n_joint
        for i, cell in enumerate(block.cells):
            rest = cell.channels - block.joint
            y = np.concatenate([top[:, i * block.joint : (i + 1) * block.joint], z[:, own : own + rest]], axis=1)
            own += rest
            x = (cell.mean + y @ cell.matrix).reshape(tokens, cell.heads, -1)
            (values if cell.is_value else keys)[cell.layer, :, cell.head : cell.head + cell.heads] = x
    ids = rng.integers(0, 1000, tokens).astype(np.int32)
    return KV(keys, values, ids, np.arange(first, first + tokens, dtype=np.int32))
