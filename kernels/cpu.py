"""The codec's kernels for CPUs: the C library where it was built, numba elsewhere. Same bytes as ``reference.py``.

Everything here releases the GIL while it computes: chunks are decoded side by side on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.kernels import native, reference
from cachegen_rag.kernels.reference import (
    GROUP,
    LANES,
    BlockTransform,
    Columns,
    Escapes,
    FixedMatrix,
    Forward,
    KernelError,
    Quantizer,
    Rows,
    SymbolModels,
)

COLUMNS = 32
"""Columns of a product in fixed point that the C kernel sums at a time."""
TILE = 64
"""Columns of a basis that the C kernel sums at a time."""

_PROBLEMS = {-1: "the stream ends early", -2: "the stream is inconsistent", -3: "out of memory"}


def encode(
    symbols: NDArray[np.int8], columns: Columns, models: SymbolModels
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See :func:`cachegen_rag.kernels.reference.encode`."""
    symbols = np.ascontiguousarray(symbols)
    _check(columns, models)
    state = np.empty(LANES, np.uint32)
    words = np.empty(symbols.size, np.uint16)
    lib = native.library()
    arguments = (models.codes, columns.model, columns.low, columns.high, state, words)
    if lib is not None:
        count = lib.cg_encode(_at(symbols), *symbols.shape, *map(_at, arguments))
    else:
        from cachegen_rag.kernels import jit

        count = jit.encode(symbols, *arguments)
    if count < 0:
        raise KernelError("a symbol is missing from its model")
    return state, words[len(words) - count :].copy()


def decode(
    words: NDArray[np.uint16], state: NDArray[np.uint32], rows: int, columns: Columns, models: SymbolModels
) -> NDArray[np.int8]:
    """See :func:`cachegen_rag.kernels.reference.decode`."""
    words, state = np.ascontiguousarray(words, np.uint16), np.array(state, np.uint32)
    _check(columns, models)
    if len(state) != LANES:
        raise KernelError(f"a stream has {LANES} states, not {len(state)}")
    out = np.empty((rows, len(columns)), np.int8)
    lib = native.library()
    arguments = (models.slots, columns.model, columns.low, columns.high)
    if lib is not None:
        result = lib.cg_decode(_at(words), len(words), _at(state), *map(_at, arguments), *out.shape, _at(out))
    else:
        from cachegen_rag.kernels import jit

        result = jit.decode(words, state, *arguments, out)
    if result:
        raise KernelError(_PROBLEMS[result])
    return out


@dataclass(frozen=True, eq=False)
class _Pairs:
    """A :class:`FixedMatrix` as the C kernel reads it: rows in pairs, columns in groups, padded with zeros."""

    pairs: NDArray[np.int16]
    scale: NDArray[np.float32]

    @staticmethod
    def of(matrix: FixedMatrix) -> _Pairs:
        rows, columns = matrix.value.shape
        padded = np.pad(matrix.value, ((0, rows % 2), (0, -columns % COLUMNS)))
        pairs = padded.reshape(-(-rows // 2), 2, -(-columns // COLUMNS), COLUMNS).transpose(2, 0, 3, 1)
        return _Pairs(np.ascontiguousarray(pairs), np.ascontiguousarray(matrix.scale))


@dataclass(frozen=True, eq=False)
class _Forward:
    """A block's forward transform as the C kernel reads it: ``cells`` lack the rows. ``kept`` : what they point to."""

    cells: Any
    top: _Pairs
    coefficients: int
    kept: list[_Pairs]

    @staticmethod
    def of(forward: Forward) -> _Forward:
        joint, kept = forward.joint, []
        cells = (native.ForwardCell * len(forward.cells))()
        for matrix, mean, weight, to in zip(forward.cells, forward.means, forward.weights, cells, strict=True):
            top = _Pairs.of(FixedMatrix(matrix.value[:, :joint], matrix.scale[:joint]))
            own = _Pairs.of(FixedMatrix(matrix.value[:, joint:], matrix.scale[joint:]))
            kept += [top, own]
            to.mean, to.weight = _at(mean), _at(weight)
            to.top, to.top_scale, to.own, to.own_scale = (_at(a) for a in (top.pairs, top.scale, own.pairs, own.scale))
            to.channels, to.n_own = len(matrix.value), matrix.value.shape[1] - joint
        coefficients = forward.top.value.shape[1] + sum(cell.n_own for cell in cells) + 1
        return _Forward(cells, _Pairs.of(forward.top), coefficients, kept)


_forwards: WeakKeyDictionary[Forward, _Forward] = WeakKeyDictionary()


def components(arrays: Sequence[NDArray[Any]], forward: Forward) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """See :func:`cachegen_rag.kernels.reference.components`."""
    lib = native.library()
    if lib is None or any(a.dtype not in (np.float16, np.float32) for a in arrays):
        return reference.components(arrays, forward)
    layout = _forwards.get(forward)
    if layout is None:
        layout = _forwards[forward] = _Forward.of(forward)
    rows = len(arrays[0])
    kept = [np.ascontiguousarray(a) if _apart(a) else a for a in arrays]
    cells = type(layout.cells).from_buffer_copy(layout.cells)
    for array, to in zip(kept, cells, strict=True):
        if len(array) != rows or array.shape[1] * array.shape[2] != to.channels:
            raise KernelError(f"rows of shape {array.shape} for {(rows, to.channels)}")
        to.rows, to.stride, to.half = _at(array), array.strides[0], array.dtype == np.float16
    out, estimate = np.empty((rows, layout.coefficients), np.float32), np.full(rows, forward.constant)
    result = lib.cg_components(
        cells, len(cells), rows, forward.joint, _at(layout.top.pairs), _at(layout.top.scale),
        forward.top.value.shape[1], _at(out), layout.coefficients, _at(estimate),
    )  # fmt: skip
    if result == -2:
        raise KernelError("a row is not finite, or too large")
    if result:
        raise KernelError(_PROBLEMS[result])
    return out, estimate


def _apart(array: NDArray[Any]) -> bool:
    """Whether a token's channels are not next to each other."""
    return array.strides[1:] != (array.shape[2] * array.itemsize, array.itemsize)


def quantize(
    components: NDArray[np.float32], gain: NDArray[np.float32], quantizer: Quantizer
) -> tuple[NDArray[np.int8], Escapes]:
    """See :func:`cachegen_rag.kernels.reference.quantize`."""
    lib = native.library()
    if lib is None:
        return reference.quantize(components, gain, quantizer)
    components, gain = np.ascontiguousarray(components, np.float32), np.ascontiguousarray(gain, np.float32)
    rows, columns = len(components), len(quantizer.order)
    if int(quantizer.order.max(initial=-1)) >= components.shape[1] or len(gain) != rows:
        raise KernelError("a column's component, or a row's gain, does not exist")
    threshold = np.ascontiguousarray(quantizer.threshold.T)
    symbols = np.empty((rows, columns), np.int8)
    room = 64 + rows * columns // 64
    while True:
        at, value = np.empty(room, np.int64), np.empty(room, np.int32)
        count = lib.cg_quantize(
            _at(components), rows, components.shape[1], _at(gain), _at(quantizer.order), columns, quantizer.per_step,
            reference.MAX_SIZE, _at(threshold), _at(quantizer.reach), _at(symbols), _at(at), _at(value), room,
        )  # fmt: skip
        if count >= 0:
            return symbols, Escapes(at[:count].copy(), value[:count].copy())
        if count != -3 or room > rows * columns:
            raise KernelError("a component is too large for this step, or not a number")
        room = rows * columns + 1


@dataclass(frozen=True, eq=False)
class _Inverse:
    """A block's transform as the C kernel reads it: ``cells`` lack the rows. ``kept`` : what they point to."""

    columns: NDArray[np.void]
    joint_basis: NDArray[np.int8]
    cells: Any
    kept: list[Any]

    @staticmethod
    def of(transform: BlockTransform) -> _Inverse:
        joint, place, kept = transform.joint, transform.place, []
        sizes = [transform.active, *(cell.own for cell in transform.cells), 1]  # the last one: padding columns
        units = [transform.joint_unit, *(cell.unit[joint : joint + cell.own] for cell in transform.cells), [0.0]]
        columns = np.zeros(len(place), native.COLUMN)
        columns["scale"] = transform.step * np.concatenate(units)[place]
        columns["shrink"] = transform.shrink
        columns["part"] = np.repeat(np.arange(len(sizes)), sizes)[place]
        columns["row"] = np.concatenate([np.arange(size) for size in sizes])[place]
        cells = (native.Cell * len(transform.cells))()
        for cell, to in zip(transform.cells, cells, strict=True):
            head = _Pairs.of(FixedMatrix.of(_padded(cell.matrix[:joint])))
            tail, mean = _tiled(cell.basis[joint : joint + cell.own]), _padded(cell.mean)
            kept += [head, tail, mean]
            to.head, to.scale, to.tail, to.mean = (_at(a) for a in (head.pairs, head.scale, tail, mean))
            to.own, to.heads, to.dim, to.width = cell.own, cell.heads, cell.dim, len(mean)
        return _Inverse(columns, _tiled(transform.joint_basis), cells, kept)


_inverses: WeakKeyDictionary[BlockTransform, _Inverse] = WeakKeyDictionary()


def reconstruct(
    symbols: NDArray[np.int8], escapes: Escapes, transform: BlockTransform, rows: Rows, gain: NDArray[np.float32]
) -> None:
    """See :func:`cachegen_rag.kernels.reference.reconstruct`."""
    lib = native.library()
    if lib is None or not all(_plain(a) for a in rows.arrays):
        reference.reconstruct(symbols, escapes, transform, rows, gain)
        return
    layout = _inverses.get(transform)
    if layout is None:
        layout = _inverses[transform] = _Inverse.of(transform)
    cells = type(layout.cells).from_buffer_copy(layout.cells)
    for cell, out, to in zip(transform.cells, rows.arrays, cells, strict=True):
        if out.shape != (len(symbols), cell.heads, cell.dim):
            raise KernelError(f"rows of shape {out.shape} for {(len(symbols), cell.heads, cell.dim)}")
        to.rows, (to.token_stride, to.head_stride, _) = _at(out), out.strides
        to.rotary = 0 if cell.is_value else 2 * rows.cosine.shape[1]
    gain = np.ascontiguousarray(gain, np.float32)
    cosine, sine = np.ascontiguousarray(rows.cosine), np.ascontiguousarray(rows.sine)
    half = {a.dtype for a in rows.arrays} == {np.dtype(np.float16)}
    result = lib.cg_reconstruct(
        _at(symbols), len(symbols), _at(layout.columns), len(layout.columns),
        _at(escapes.at), _at(escapes.value), len(escapes.at), _at(gain),
        _at(layout.joint_basis), transform.active, transform.joint, len(layout.joint_basis) * TILE,
        cells, len(transform.cells), _at(cosine), _at(sine), int(rows.halves), int(half),
    )  # fmt: skip
    if result:
        raise KernelError(f"the symbols cannot be made into rows: {_PROBLEMS[result]}")


def _padded(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """With zero channels added until their number is a multiple of a tile's."""
    extra = -array.shape[-1] % TILE
    return np.ascontiguousarray(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)]), np.float32)


def _tiled(basis: NDArray[np.int8]) -> NDArray[np.int8]:
    """``[rows, channels]`` as ``[tiles, rows, TILE]``, padded with zeros."""
    tiles = -(-basis.shape[1] // TILE)
    padded = np.pad(basis, ((0, 0), (0, tiles * TILE - basis.shape[1])))
    return np.ascontiguousarray(padded.reshape(len(basis), tiles, TILE).swapaxes(0, 1))


def _plain(array: Any) -> bool:
    """Whether the C kernel can write this array: fp16 or float32, channels contiguous."""
    plain = isinstance(array, np.ndarray) and array.dtype in (np.float16, np.float32)
    return plain and array.strides[-1] == array.itemsize and array.flags.writeable


def _check(columns: Columns, models: SymbolModels) -> None:
    if len(columns) % GROUP or int(columns.model.max(initial=0)) + 3 > len(models.slots):
        raise KernelError("columns must be a multiple of 32, their models among those given")


def _at(array: NDArray[Any]) -> int:
    """The address of an array's first element (``array.ctypes.data``, sooner)."""
    address: int = array.__array_interface__["data"][0]
    return address
