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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import CLASS_OF_ONE_STEP, CLASSES, Block, Profile
from cachegen_rag.errors import ProfileError
from cachegen_rag.kernels.reference import (
    CONTEXTS,
    GROUP,
    BlockTransform,
    CellTransform,
    Columns,
    FixedMatrix,
    Forward,
    Quantizer,
)
from cachegen_rag.kv import KV


@dataclass(frozen=True, eq=False)
class BlockCoder:
    """A block of a profile at one step size, ready to use: ``columns`` of symbols and the way back to channels.

    classes : the symbol model class of every column.
    """

    block: Block
    classes: NDArray[np.int64]
    columns: Columns
    quantizer: Quantizer
    transform: BlockTransform
    forward: Forward
    step: float


def block_rows(block: Block, kv: KV) -> list[NDArray[Any]]:
    """Per cell of a block its rows ``[tokens, heads, dim]``, views of the KV."""
    return [(kv.values if c.is_value else kv.keys)[c.layer, :, c.head : c.head + c.heads] for c in block.cells]


class Transform:
    """The transforms of a profile. Matrices are made on first use and shared by all levels."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._coders: dict[int, tuple[BlockCoder, ...]] = {}

    @cached_property
    def _forward(self) -> list[tuple[NDArray[np.float32], list[NDArray[np.float32]]]]:
        """Per block: the inverses of the joint basis and of the cells' bases."""

        def inverse(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
            try:
                inverted: NDArray[np.float32] = np.linalg.inv(matrix.astype(np.float64)).astype(np.float32)
            except np.linalg.LinAlgError:
                raise ProfileError("a basis of the profile has no inverse") from None
            return inverted

        return [(inverse(b.joint_matrix), [inverse(c.matrix) for c in b.cells]) for b in self.profile.blocks]

    @cached_property
    def _reach(self) -> NDArray[np.int32]:
        """Per class the largest magnitude for which, and below which, every context has both symbols."""
        has = np.all(self.profile.frequency.reshape(CLASSES, CONTEXTS, 256) > 0, axis=1)
        sizes = np.arange(128)
        both = has[:, sizes] & has[:, -sizes & 0xFF]
        reach: NDArray[np.int32] = (np.argmin(np.pad(both, ((0, 0), (0, 1))), axis=1) - 1).astype(np.int32)
        if np.any(reach < 0):
            raise ProfileError("a symbol model lacks the symbol 0")
        return reach

    def coders(self, step: int) -> tuple[BlockCoder, ...]:
        """One coder a block for a step of ``2 ** (step / 4)``."""
        if step not in self._coders:
            self._coders[step] = tuple(self._coder(i, step) for i in range(len(self.profile.blocks)))
        return self._coders[step]

    def _coder(self, index: int, step: int) -> BlockCoder:
        profile, block = self.profile, self.profile.blocks[index]
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
            CellTransform(
                c.basis, c.unit, c.mean.astype(np.float32), own,
                c.layer, c.is_value, c.head, c.heads, c.channels // c.heads,
            )
            for c, own in zip(block.cells, taken[1:], strict=True)
        )  # fmt: skip
        transform = BlockTransform(
            shrink=np.ascontiguousarray(profile.shrink[column_class], np.float32),
            step=np.where(real, size, 0).astype(np.float32),
            place=place.astype(np.int32),
            coefficients=int(starts[-1]) + 1,
            joint_basis=block.joint_basis[: taken[0]],
            joint_unit=block.joint_unit[: taken[0]],
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
        joint_inverse, inverses = self._forward[index]
        weights = profile.importance.channels[index].astype(np.float64)
        cuts = np.cumsum([c.channels for c in block.cells])
        parts = np.split(weights[:-1], cuts[:-1])
        forward = Forward(
            tuple(np.ascontiguousarray(c.mean, np.float32) for c in block.cells),
            tuple(FixedMatrix.of(m[:, : block.joint + n]) for m, n in zip(inverses, taken[1:], strict=True)),
            block.joint,
            FixedMatrix.of(joint_inverse[:, : taken[0]]),
            tuple(parts),
            float(weights[-1] + sum(part @ c.mean for part, c in zip(parts, block.cells, strict=True))),
        )
        quantizer = Quantizer(
            transform.place,
            float(np.float32(1 / size)),
            np.ascontiguousarray(profile.threshold[column_class], np.float32),
            self._reach[column_class],
        )
        return BlockCoder(block, column_class, columns, quantizer, transform, forward, float(size))
