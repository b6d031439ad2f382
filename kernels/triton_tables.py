"""What the Triton kernels need to know of a profile at one level, as tensors on the device; made once, used by every
chunk.

Blocks lie side by side: *column* means a column of all blocks together, *coefficient* likewise. A *head* is one head of
one layer's keys or values; its inverse transform is one matrix ``[joint + own, 2, P]``: the joint basis and the cell's
own basis multiplied out, for the even and the odd channels (keys), or for the lower and the upper half (values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cachegen_rag.kernels.reference import BlockTransform, Columns, KernelError, SymbolModels

ALIGN = 32
"""Coefficients of a part (a block's joint ones, a cell's own) begin at, and are padded to, a multiple of this, the
depth of one step of the inverse transform: no step straddles two parts, none needs a mask. Padding has weight 0."""


@dataclass(frozen=True, eq=False)
class LevelTables:
    """Tables of one level on one device.

    slots : int32 ``[models, 4096]``, bits of ``SymbolModels.slots``. codes : int32 ``[models, 256]``, ``frequency |
    start << 16``, for the encoder.
    columns : int32 ``[columns]``, ``first model | low << 12 | high << 22``.
    blocks : int32 ``[blocks, 2]``, first column and number of columns.
    shrink : float32 ``[columns, 2]``. step : float32 ``[columns]``. place : int32 ``[columns]``, coefficient or -1.
    heads : int64 ``[heads, 8]``, see ``_row_kernel``. weights : float32, flat. mean : float32, flat.
    where : per head ``(layer, is_value, head)``.
    """

    slots: torch.Tensor
    codes: torch.Tensor
    columns: torch.Tensor
    blocks: torch.Tensor
    shrink: torch.Tensor
    step: torch.Tensor
    place: torch.Tensor
    heads: torch.Tensor
    weights: torch.Tensor
    mean: torch.Tensor
    where: tuple[tuple[int, bool, int], ...]
    half: int
    coefficients: int

    @property
    def n_blocks(self) -> int:
        """Blocks, and streams, of a chunk."""
        return len(self.blocks)

    @property
    def n_columns(self) -> int:
        """Symbols of a token."""
        return len(self.columns)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.slots.device

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """A host array on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    @staticmethod
    def of(
        blocks: Sequence[tuple[Columns, BlockTransform]], models: SymbolModels, device: torch.device | str
    ) -> LevelTables:
        """Build the tables of a level from its blocks. Raises KernelError if a threshold or model is out of range."""
        columns = [_pack(c) for c, _ in blocks]
        widths = [len(c) for c in columns]
        starts = np.cumsum([0, *widths])
        place, heads, where, weights, means = [], [], [], [], []
        base = size = mean_size = 0
        half = _power_of_two(max((c.dim + 1) // 2 for _, t in blocks for c in t.cells))
        for _, transform in blocks:
            parts = [transform.active, *(c.own for c in transform.cells)]
            padded = [_aligned(n) for n in parts]
            begin = base + np.cumsum([0, *padded])
            # A block's last coefficient is where its padding columns go; here they go nowhere.
            to = np.concatenate([*(b + np.arange(n) for b, n in zip(begin, parts, strict=False)), [-1]])
            place.append(to[transform.place])
            for i, cell in enumerate(transform.cells):
                joint = transform.joint
                top = transform.joint_matrix[:, i * joint : (i + 1) * joint].astype(np.float64) @ cell.matrix[:joint]
                matrix = np.zeros((padded[0] + padded[i + 1], cell.matrix.shape[1]), np.float32)
                matrix[: len(top)] = top
                matrix[padded[0] : padded[0] + cell.own] = cell.matrix[joint : joint + cell.own]
                for h in range(cell.heads):
                    channels = slice(h * cell.dim, (h + 1) * cell.dim)
                    weights.append(_split(matrix[:, channels], half, cell.is_value).ravel())
                    means.append(_split(cell.mean[None, channels], half, cell.is_value).ravel())
                    where.append((cell.layer, cell.is_value, cell.head + h))
                    parts_at = (base, padded[0], begin[i + 1], padded[i + 1])
                    heads.append((*parts_at, size, mean_size, cell.dim, not cell.is_value))
                    size, mean_size = size + weights[-1].size, mean_size + means[-1].size
            base = int(begin[-1])

        def put(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return LevelTables(
            slots=put(models.slots.view(np.int32)),
            codes=put(models.codes.view(np.int32)),
            columns=put(np.concatenate(columns)),
            blocks=put(np.stack([starts[:-1], widths], axis=1).astype(np.int32)),
            shrink=put(np.concatenate([t.shrink for _, t in blocks]).astype(np.float32)),
            step=put(np.concatenate([t.step for _, t in blocks]).astype(np.float32)),
            place=put(np.concatenate(place).astype(np.int32)),
            heads=put(np.asarray(heads, np.int64)),
            weights=put(np.concatenate(weights)),
            mean=put(np.concatenate(means)),
            where=tuple(where),
            half=half,
            coefficients=base,
        )


def _pack(columns: Columns) -> NDArray[np.int32]:
    model, low, high = (np.asarray(x, np.int64) for x in (columns.model, columns.low, columns.high))
    if len(model) and (model.max() > 0xFFF or max(low.max(), high.max()) > 0x1FF or min(low.min(), high.min()) < 0):
        raise KernelError("a symbol model or a context threshold is out of the kernels' range")
    return (model | low << 12 | high << 22).astype(np.int32)


def _split(matrix: NDArray[np.float32], half: int, halves: bool) -> NDArray[np.float32]:
    """``[rows, dim]`` as ``[rows, 2, half]``: even and odd channels, or lower and upper half; padded with zeros."""
    dim = matrix.shape[1]
    middle = (dim + 1) // 2
    first, second = (matrix[:, :middle], matrix[:, middle:]) if halves else (matrix[:, 0::2], matrix[:, 1::2])
    out = np.zeros((len(matrix), 2, half), np.float32)
    out[:, 0, : first.shape[1]], out[:, 1, : second.shape[1]] = first, second
    return out


def _aligned(n: int) -> int:
    return n + -n % ALIGN


def _power_of_two(n: int) -> int:
    """The next power of two, at least 16: the smallest side of a tensor-core product."""
    return max(16, 1 << (n - 1).bit_length())
