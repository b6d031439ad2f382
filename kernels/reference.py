"""The codec's kernels in plain numpy: slow, readable, and the definition that every other path agrees with.

A *block* is a set of channels that is transformed and coded together. Its symbols are ``int8 [rows, columns]``, one row
a token, columns in the order of the profile, their number a multiple of 32. One stream holds one block of one chunk.

Entropy coding is interleaved rANS (Duda, "Asymmetric numeral systems", 2013; interleaving after Giesen, 2014): 32
states of 32 bits in [2^16, 2^32), renormalized by 16-bit words, frequencies of 12 bits. Elements are coded row by row;
column ``c`` belongs to state ``c % 32``. The symbol model of an element is chosen by its column and by the size of its
neighbours (:func:`context`), which the decoder knows already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
GROUP = 32
PROB_BITS = 12
SLOTS = 1 << PROB_BITS
LOW = 1 << 16
ESCAPE = -128
CONTEXTS = 3
NORM = 32000.0
HUGE_NORM = float(1 << 60)
MAX_SIZE = float(1 << 24)
"""Largest magnitude, in steps, that can be coded."""


class KernelError(ValueError):
    """Symbols and stream do not fit together; the caller turns this into an error of its own."""


@dataclass(frozen=True, eq=False)
class SymbolModels:
    """Symbol models, three a class (one a context): model ``3 * class + context``.

    frequency : uint16 ``[models, 256]``, indexed by ``symbol & 0xff``; every row sums to 4,096.
    start : uint16 ``[models, 256]``, the slots before each symbol (symbols in order of ``symbol & 0xff``).
    slots : uint32 ``[models, 4096]``, per slot ``symbol & 0xff | frequency << 8 | (slot - start) << 20``.
    """

    frequency: NDArray[np.uint16]
    start: NDArray[np.uint16]
    slots: NDArray[np.uint32]

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """uint32 ``[models, 256]``: ``frequency | start << 16``."""
        return self.frequency.astype(np.uint32) | self.start.astype(np.uint32) << np.uint32(16)

    @staticmethod
    def of(frequency: NDArray[np.uint16]) -> SymbolModels:
        """Build starts and slots. Raises KernelError unless every row sums to 4,096 with no entry above 4,095."""
        wide = frequency.astype(np.int64)
        if wide.ndim != 2 or wide.shape[1] != 256 or np.any(wide.sum(1) != SLOTS) or np.any(wide >= SLOTS):
            raise KernelError("frequencies must be [models, 256], each row summing to 4096, none above 4095")
        start = np.cumsum(wide, axis=1) - wide
        symbols = np.tile(np.arange(256), len(wide))
        flat = wide.ravel()
        entry = np.repeat(symbols | flat << 8, flat)
        entry |= (np.tile(np.arange(SLOTS), len(wide)) - np.repeat(start.ravel(), flat)) << 20
        slots = entry.astype(np.uint32).reshape(len(wide), SLOTS)
        return SymbolModels(np.ascontiguousarray(frequency, np.uint16), start.astype(np.uint16), slots)


@dataclass(frozen=True, eq=False)
class Columns:
    """How the columns of a block are coded: int32 ``[columns]`` each.

    model : the first of the three symbol models. low, high : the context's thresholds.
    """

    model: NDArray[np.int32]
    low: NDArray[np.int32]
    high: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.model)


@dataclass(frozen=True, eq=False)
class FixedMatrix:
    """A matrix for products in fixed point (:func:`multiply`): ``value * scale`` is close to the matrix.

    value : int16 ``[rows, columns]``, Euclidean norm of a column at most 32,000. scale : float32 ``[columns]``.
    """

    value: NDArray[np.int16]
    scale: NDArray[np.float32]

    @staticmethod
    def of(matrix: NDArray[np.floating[Any]]) -> FixedMatrix:
        """Round a matrix, column by column. Units are powers of two, so that they round nothing when multiplied."""
        exponent = _exponents(matrix.astype(np.float64).T)
        value = np.rint(np.ldexp(matrix.astype(np.float64), exponent)).astype(np.int16)
        return FixedMatrix(value, np.ldexp(np.float32(1), -exponent))

    @property
    def matrix(self) -> NDArray[np.float32]:
        """What the integers stand for."""
        matrix: NDArray[np.float32] = self.value * self.scale
        return matrix


@dataclass(frozen=True, eq=False)
class Forward:
    """From the channels of a block to the components that are coded.

    means : float32 ``[channels]`` of each cell, taken off first. cells : per cell ``[channels, joint + own]``. top :
    ``[cells * joint, active]``, for the joint parts of all cells. weights : float64 ``[channels]`` of each cell and
    constant : a linear estimate of a token's importance.
    """

    means: tuple[NDArray[np.float32], ...]
    cells: tuple[FixedMatrix, ...]
    joint: int
    top: FixedMatrix
    weights: tuple[NDArray[np.float64], ...]
    constant: float


def _exponents(rows: NDArray[np.float64]) -> NDArray[np.int32]:
    """The powers of two that bring each row's norm to 16,000 to 32,000. Raises KernelError if a row has no norm."""
    square = (rows * rows).sum(axis=1)
    if not np.all(square <= HUGE_NORM**2):
        raise KernelError("a row is not finite, or too large")
    exponent = (np.frexp(NORM**2 / np.where(square > 0, square, NORM**2))[1] - 1) // 2
    return np.minimum(exponent, 100).astype(np.int32)


@dataclass(frozen=True, eq=False)
class CellTransform:
    """The channels of some heads of one layer, keys or values.

    basis : int8 ``[joint + own or more, heads * dim]``, row ``i`` in units of ``unit[i]``. mean : float32
    ``[heads * dim]``. own : components of the cell's own that are coded at this level.
    """

    basis: NDArray[np.int8]
    unit: NDArray[np.float32]
    mean: NDArray[np.float32]
    own: int
    layer: int
    is_value: bool
    head: int
    heads: int
    dim: int

    @cached_property
    def matrix(self) -> NDArray[np.float32]:
        """The basis as float32."""
        matrix: NDArray[np.float32] = self.basis * self.unit[:, None]
        return matrix


@dataclass(frozen=True, eq=False)
class BlockTransform:
    """From the symbols of a block to its channels.

    shrink : float32 ``[columns, 2]``, how far inside its interval a magnitude of 1, and of more, is reconstructed.
    step : float32 ``[columns]``. place : int32 ``[columns]``, where a column's value goes among ``coefficients``:
    ``active`` joint components first, then each cell's own; the last one is for padding columns.
    joint_basis : int8 ``[active, cells * joint]``, row ``i`` in units of ``joint_unit[i]``.
    """

    shrink: NDArray[np.float32]
    step: NDArray[np.float32]
    place: NDArray[np.int32]
    coefficients: int
    joint_basis: NDArray[np.int8]
    joint_unit: NDArray[np.float32]
    active: int
    joint: int
    cells: tuple[CellTransform, ...]

    @cached_property
    def joint_matrix(self) -> NDArray[np.float32]:
        """The joint basis as float32."""
        matrix: NDArray[np.float32] = self.joint_basis * self.joint_unit[:, None]
        return matrix


@dataclass(frozen=True, eq=False)
class Escapes:
    """Values outside the symbols' range: int64 indices into the row-major symbols (increasing), int32 values."""

    at: NDArray[np.int64]
    value: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Quantizer:
    """How components become symbols.

    order : int32 ``[columns]``, the component of each column.
    per_step : steps per unit. threshold : float32 ``[columns, 2]``, the size in steps from which a value is not 0, and
    what is added before rounding down to its magnitude. reach : int32 ``[columns]``, the largest magnitude with a
    symbol of its own.
    """

    order: NDArray[np.int32]
    per_step: float
    threshold: NDArray[np.float32]
    reach: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rows:
    """Where a block's channels go: per cell a writable array ``[rows, heads, dim]`` of the engine's cache.

    cosine, sine : float32 ``[rows, rotary / 2]`` for the keys. halves : rotary pairs are ``(i, i + rotary/2)`` in the
    output instead of ``(2i, 2i+1)``.
    """

    arrays: Sequence[NDArray[Any]]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    halves: bool


def context(symbols: NDArray[np.int8], columns: Columns) -> NDArray[np.int64]:
    """The context (0, 1 or 2) of every symbol, from the token before and the column 32 places before."""
    size = np.abs(symbols.astype(np.int64))
    up = np.zeros_like(size)
    up[1:] = size[:-1]
    left = np.zeros_like(size)
    left[:, GROUP:] = size[:, :-GROUP]
    m = 2 * up + left
    return (m > columns.low).astype(np.int64) + (m > columns.high)


def encode(
    symbols: NDArray[np.int8], columns: Columns, models: SymbolModels
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Encode ``[rows, columns]`` symbols: the 32 states to begin decoding with, and the words in reading order.

    Raises KernelError if a symbol's model lacks it.
    """
    rows, width = symbols.shape
    model = columns.model.astype(np.int64) + context(symbols, columns)
    index = symbols.view(np.uint8).astype(np.int64)
    frequency = models.frequency[model, index].astype(np.uint64).reshape(-1, GROUP)
    start = models.start[model, index].astype(np.uint64).reshape(-1, GROUP)
    if np.any(frequency == 0):
        raise KernelError("a symbol is missing from its model")
    state = np.full(LANES, LOW, np.uint64)
    words: list[NDArray[np.uint16]] = []
    for group in range(rows * width // GROUP - 1, -1, -1):
        x, f = state, frequency[group]
        full = x >> np.uint64(20) >= f
        words.append((x[full] & np.uint64(0xFFFF)).astype(np.uint16))
        x = np.where(full, x >> np.uint64(16), x)
        state = (x // f << np.uint64(PROB_BITS)) + x % f + start[group]
    return state.astype(np.uint32), np.concatenate([*words[::-1], np.empty(0, np.uint16)])


def decode(
    words: NDArray[np.uint16], state: NDArray[np.uint32], rows: int, columns: Columns, models: SymbolModels
) -> NDArray[np.int8]:
    """Decode ``[rows, columns]`` symbols. Raises KernelError if the stream is too short, too long or inconsistent."""
    width = len(columns)
    out = np.zeros((rows + 1, GROUP + width), np.int8)  # a row and a group of zeros before the first
    state = state.astype(np.uint64)
    if np.any(state < LOW):
        raise KernelError("a state is below 2^16")
    at = 0
    for row in range(1, rows + 1):
        for c in range(0, width, GROUP):
            here = slice(c, c + GROUP)
            up = np.abs(out[row - 1, GROUP + c : 2 * GROUP + c].astype(np.int64))
            m = 2 * up + np.abs(out[row, here].astype(np.int64))
            model = columns.model[here] + (m > columns.low[here]) + (m > columns.high[here])
            x = state
            entry = models.slots[model, (x & np.uint64(SLOTS - 1)).astype(np.int64)].astype(np.uint64)
            x = (entry >> np.uint64(8) & np.uint64(SLOTS - 1)) * (x >> np.uint64(PROB_BITS)) + (entry >> np.uint64(20))
            empty = x < LOW
            read = words[at : at + int(empty.sum())]
            if len(read) < int(empty.sum()):
                raise KernelError("the stream ends early")
            at += len(read)
            x[empty] = x[empty] << np.uint64(16) | read
            state = x
            out[row, GROUP + c : 2 * GROUP + c] = (entry & np.uint64(0xFF)).astype(np.uint8).view(np.int8)
    if at != len(words) or np.any(state != LOW):
        raise KernelError("the stream does not end where it should")
    return np.ascontiguousarray(out[1:, GROUP:])


def multiply(rows: NDArray[np.float32], matrix: FixedMatrix) -> NDArray[np.float32]:
    """``rows @ matrix`` in integers: the same on every machine, whatever the order in which products are summed.

    Rows, too, are scaled by a power of two and rounded to integers, so no sum exceeds 31 bits (Cauchy-Schwarz) and all
    sums are exact. The result, float32, is off by some 1e-5 of the product of the norms of row and column.
    Raises KernelError for rows with NaN, infinity, or a norm above 2^60.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = _exponents(rows.astype(np.float64))
    fixed = np.rint(rows * np.ldexp(np.float32(1), exponent)[:, None])
    product = (fixed.astype(np.float64) @ matrix.value.astype(np.float64)).astype(np.float32)
    return product * np.ldexp(np.float32(1), -exponent)[:, None] * matrix.scale


def components(arrays: Sequence[NDArray[Any]], forward: Forward) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Components float32 ``[rows, coefficients]``, in the order of ``BlockTransform.place``, the last one 0; and the
    importance of the rows, float64 ``[rows]``.

    arrays : per cell ``[rows, heads, dim]``, fp16 or float32. Raises KernelError as :func:`multiply`.
    """
    tops, own, estimate = [], [], np.full(len(arrays[0]), forward.constant)
    for array, mean, cell, weight in zip(arrays, forward.means, forward.cells, forward.weights, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            x = array.reshape(len(array), -1).astype(np.float32) - mean
            estimate += x.astype(np.float64) @ weight
        y = multiply(x, cell)
        tops.append(y[:, : forward.joint])
        own.append(y[:, forward.joint :])
    joint = multiply(np.concatenate(tops, axis=1), forward.top)
    return np.concatenate([joint, *own, np.zeros((len(joint), 1), np.float32)], axis=1), estimate


def quantize(
    components: NDArray[np.float32], gain: NDArray[np.float32], quantizer: Quantizer
) -> tuple[NDArray[np.int8], Escapes]:
    """Symbols ``[rows, columns]`` of components ``[rows, any]``, row ``t`` multiplied by ``gain[t]``, and what lies
    beyond their reach.

    Raises KernelError for a size that is not a number or above ``MAX_SIZE`` steps.
    """
    taken = components[:, quantizer.order] * gain[:, None] * np.float32(quantizer.per_step)
    size = np.abs(taken)
    if not np.all(size <= np.float32(MAX_SIZE)):
        raise KernelError("a component is too large for this step, or not a number")
    whole = np.maximum(np.trunc(size + quantizer.threshold[:, 1]).astype(np.int32), 1)
    whole = np.where(size >= quantizer.threshold[:, 0], whole, 0)
    value = np.where(taken < 0, -whole, whole)
    escaped = whole > quantizer.reach
    at = np.flatnonzero(escaped)
    symbols = np.where(escaped, ESCAPE, value).astype(np.int8)
    return symbols, Escapes(at.astype(np.int64), value.ravel()[at].astype(np.int32))


def dequantize(
    symbols: NDArray[np.int8], escapes: Escapes, transform: BlockTransform, gain: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Coefficients float32 ``[rows, coefficients]`` of a block's symbols; row ``t`` is multiplied by ``gain[t]``."""
    size = np.abs(symbols.astype(np.int16))
    shrink = np.where(size > 1, transform.shrink[:, 1], transform.shrink[:, 0])
    value = np.where(size > 0, size.astype(np.float32) - shrink, np.float32(0))
    value = np.where(symbols < 0, -value, value) * transform.step
    column = escapes.at % symbols.shape[1]
    value[escapes.at // symbols.shape[1], column] = escapes.value.astype(np.float32) * transform.step[column]
    out = np.zeros((len(symbols), transform.coefficients), np.float32)
    out[:, transform.place] = value * gain[:, None]
    return out


def reconstruct(
    symbols: NDArray[np.int8], escapes: Escapes, transform: BlockTransform, rows: Rows, gain: NDArray[np.float32]
) -> None:
    """Dequantize a block, invert its transform, rotate the keys and write everything into ``rows``."""
    z = dequantize(symbols, escapes, transform, gain)
    top = z[:, : transform.active] @ transform.joint_matrix
    own = transform.active
    for i, (cell, out) in enumerate(zip(transform.cells, rows.arrays, strict=True)):
        joint = transform.joint
        x: NDArray[Any] = cell.mean + top[:, i * joint : (i + 1) * joint] @ cell.matrix[:joint]
        x += z[:, own : own + cell.own] @ cell.matrix[joint : joint + cell.own]
        own += cell.own
        x = x.reshape(len(z), cell.heads, cell.dim)
        if not cell.is_value:
            x = _rotate(x, rows)
        out[...] = np.clip(x, -65504, 65504) if out.dtype == np.float16 else x


def _rotate(x: NDArray[np.float32], rows: Rows) -> NDArray[np.float32]:
    cosine, sine = rows.cosine[:, None], rows.sine[:, None]
    pairs = cosine.shape[-1]
    even, odd = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    turned = x.copy()
    first, second = even * cosine - odd * sine, even * sine + odd * cosine
    if rows.halves:
        turned[..., :pairs], turned[..., pairs : 2 * pairs] = first, second
    else:
        turned[..., 0 : 2 * pairs : 2], turned[..., 1 : 2 * pairs : 2] = first, second
    return turned
