"""The transform: from a token's channels to components worth coding, and back.

Each *cell* (some heads of a layer's keys, or values) has a basis of its own: the KLT in a metric that knows what an
error costs (see :mod:`cachegen_rag.codec.calibrate`). The leading components of the cells of neighbouring layers are
then transformed once more, jointly: neighbouring layers read almost the same residual stream, so their KV says much
the same twice. In the components' units an error costs the same everywhere: one quantization step serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import CLASS_OF_ONE_STEP, CLASSES, Block, Profile
from cachegen_rag.kernels.reference import CONTEXTS, GROUP, BlockTransform, CellTransform, Columns
from cachegen_rag.kv import KV


def _padded(matrix: NDArray[np.float32], multiple: int = 16) -> NDArray[np.float32]:
    """``matrix`` with zero columns added until their number is a multiple."""
    extra = -matrix.shape[-1] % multiple
    return np.ascontiguousarray(np.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, extra)]), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class BlockCoder:
    """A block of a profile at one step size, ready to use: ``columns`` of symbols and the way back to channels.

    order : which component each column codes, by decreasing scale; -1 for a padding column.
    """

    block: Block
    order: NDArray[np.int64]
    classes: NDArray[np.int64]
    columns: Columns
    transform: BlockTransform
    step: float


class Transform:
    """The transforms of a profile. Matrices are made on first use and shared by all levels."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._coders: dict[int, tuple[BlockCoder, ...]] = {}

    @cached_property
    def _bases(self) -> list[tuple[NDArray[np.float32], list[NDArray[np.float32]], list[NDArray[np.float32]]]]:
        """Per block: the joint basis, and the cells' bases and means, padded."""
        return [
            (_padded(b.joint_matrix), [_padded(c.matrix) for c in b.cells], [_padded(c.mean) for c in b.cells])
            for b in self.profile.blocks
        ]

    @cached_property
    def _forward(self) -> list[tuple[NDArray[np.float32], list[NDArray[np.float32]]]]:
        """Per block: the inverses of the joint basis and of the cells' bases."""

        def inverse(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.linalg.inv(matrix.astype(np.float64)).astype(np.float32)

        return [(inverse(b.joint_matrix), [inverse(c.matrix) for c in b.cells]) for b in self.profile.blocks]

    def components(self, kv: KV, index: int) -> NDArray[np.float32]:
        """Components float32 ``[tokens, components]`` of block ``index``, in the order of ``Block.scale``."""
        block, (joint_inverse, inverses) = self.profile.blocks[index], self._forward[index]
        joint, own = [], []
        for cell, inverse in zip(block.cells, inverses, strict=True):
            source = kv.values if cell.is_value else kv.keys
            x = source[cell.layer, :, cell.head : cell.head + cell.heads].reshape(len(kv), cell.channels)
            y = (x.astype(np.float32) - cell.mean) @ inverse
            joint.append(y[:, : block.joint])
            own.append(y[:, block.joint :])
        return np.concatenate([np.concatenate(joint, axis=1) @ joint_inverse, *own], axis=1)

    def coders(self, step: int) -> tuple[BlockCoder, ...]:
        """One coder a block for a step of ``2 ** (step / 4)``."""
        if step not in self._coders:
            self._coders[step] = tuple(self._coder(i, step) for i in range(len(self.profile.blocks)))
        return self._coders[step]

    def _coder(self, index: int, step: int) -> BlockCoder:
        profile, block = self.profile, self.profile.blocks[index]
        joint_basis, bases, means = self._bases[index]
        classes = block.scale.astype(np.int64) - step + CLASS_OF_ONE_STEP
        order = np.argsort(-classes, kind="stable")
        coded = int((classes >= 0).sum())
        coded += -coded % GROUP
        order = order[:coded]
        order = np.concatenate([order, np.full(coded - len(order), -1)])
        real = order >= 0
        column_class = np.where(real, np.clip(classes[order], 0, CLASSES - 1), 0)
        n_joint = len(block.cells) * block.joint
        # Scales decrease within the joint part and within every cell's own: what is coded is a prefix of each.
        bounds = np.cumsum([0, n_joint] + [c.channels - block.joint for c in block.cells])
        taken = [int(np.sum(real & (order >= a) & (order < b))) for a, b in pairwise(bounds)]
        starts = np.cumsum([0, *taken])
        part = np.searchsorted(bounds, np.maximum(order, 0), side="right") - 1
        place = np.where(real, starts[part] + order - bounds[part], starts[-1])
        size = np.float32(2.0 ** (step / 4))
        cells = tuple(
            CellTransform(basis, mean, own, c.layer, c.is_value, c.head, c.heads, c.channels // c.heads)
            for c, basis, mean, own in zip(block.cells, bases, means, taken[1:], strict=True)
        )
        transform = BlockTransform(
            shrink=np.ascontiguousarray(profile.shrink[column_class], np.float32),
            step=np.where(real, size, 0).astype(np.float32),
            place=place.astype(np.int32),
            coefficients=int(starts[-1]) + 1,
            joint_basis=np.ascontiguousarray(joint_basis[: taken[0]]),
            active=taken[0],
            joint=block.joint,
            cells=cells,
        )
        context = profile.context[column_class].astype(np.int32)
        columns = Columns(
            (CONTEXTS * column_class).astype(np.int32),
            np.ascontiguousarray(context[:, 0]),
            np.ascontiguousarray(context[:, 1]),
        )
        return BlockCoder(block, order, column_class, columns, transform, float(size))
