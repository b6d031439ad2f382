"""Entropy coding: symbol models from counts, and the sections of a bitstream's payload.

Components share symbol models by class, that is by their standard deviation in steps: a model is a property of the
shape of the distribution, and a level only shifts classes. The models are in the profile, so the stream has no tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import CLASS_OF_ONE_STEP, CLASSES
from cachegen_rag.errors import CorruptBitstreamError
from cachegen_rag.kernels import cpu, reference
from cachegen_rag.kernels.reference import CONTEXTS, LANES, SLOTS, Columns, KernelError, SymbolModels

_PRIOR_WEIGHT = 64.0
_STATE_BYTES = 4 * LANES


def frequencies(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Frequencies uint16 ``[3 * classes, 256]`` from counts ``[classes, contexts, 256]`` (index ``symbol & 0xff``).

    Counts are smoothed with a Laplace distribution of the class's width, so that every class has a model. What is
    too rare for a slot of its own is left to the escape.
    """
    symbols = np.arange(-128, 128)
    out = np.zeros((CLASSES, CONTEXTS, 256), np.uint16)
    for k in range(CLASSES):
        width = 2.0 ** ((k - CLASS_OF_ONE_STEP) / 4) / np.sqrt(2)
        edge = np.exp(-np.abs(np.abs(symbols) - 0.5) / width)
        prior = np.where(symbols == 0, 1 - np.exp(-0.5 / width), edge * (1 - np.exp(-1 / width)) / 2)
        prior[0] = 0
        rolled = np.roll(prior / prior.sum(), -128)
        for c in range(CONTEXTS):
            out[k, c] = _slots(counts[k, c] + _PRIOR_WEIGHT * rolled)
    return out.reshape(CLASSES * CONTEXTS, 256)


def _slots(weights: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Whole frequencies that sum to 4,096 for one model; index 128 is the escape."""
    escape = 0x80
    share = weights / weights.sum() * SLOTS
    kept = share >= 0.4
    kept[escape] = True
    share = np.where(kept, np.maximum(share, 1), 0)
    whole = np.maximum(np.floor(share), kept).astype(np.int64)
    whole[escape] = max(1, round(float((weights / weights.sum() * SLOTS)[~kept].sum())))
    # The rest goes to (or comes from) the likeliest symbol: it notices least.
    best = int(np.argmax(whole))
    whole[best] += SLOTS - whole.sum()
    if whole[best] >= SLOTS:
        whole[best] -= 1
        whole[1 if best != 1 else 0] += 1
    return whole.astype(np.uint16)


def cost(models: SymbolModels) -> NDArray[np.float64]:
    """Bits of every symbol ``[models, 256]``; infinite where a model lacks it."""
    with np.errstate(divide="ignore"):
        return PROB_BITS_OF_MODEL - np.log2(models.frequency.astype(np.float64))


PROB_BITS_OF_MODEL = np.log2(SLOTS)


def encode_stream(symbols: NDArray[np.int8], columns: Columns, models: SymbolModels, *, slow: bool = False) -> bytes:
    """One stream: 32 little-endian 32-bit states, then 16-bit words. ``slow`` takes the reference path."""
    state, words = (reference if slow else cpu).encode(symbols, columns, models)
    return state.astype("<u4").tobytes() + words.astype("<u2").tobytes()


def decode_stream(
    data: memoryview, rows: int, columns: Columns, models: SymbolModels, *, slow: bool = False
) -> NDArray[np.int8]:
    """The symbols ``[rows, columns]`` of a stream. Raises CorruptBitstreamError if it is not exactly that."""
    if len(data) < _STATE_BYTES or len(data) % 2:
        raise CorruptBitstreamError(f"a stream of {len(data)} bytes; it must be even and at least {_STATE_BYTES}")
    state, words = np.frombuffer(data, "<u4", LANES), np.frombuffer(data, "<u2", offset=_STATE_BYTES)
    try:
        return (reference if slow else cpu).decode(words, state, rows, columns, models)
    except KernelError as error:
        raise CorruptBitstreamError(f"the symbols cannot be decoded: {error}") from None


def pack_integers(values: NDArray[np.int32]) -> bytes:
    """Signed integers, of at most 27 bits, as zigzag LEB128."""
    wide = values.astype(np.int64)
    rest = np.where(wide >= 0, wide << 1, (-wide << 1) - 1)
    length = np.ones_like(rest)
    for shift in (7, 14, 21):
        length += rest >> shift > 0
    start = np.cumsum(length) - length
    out = np.zeros(int(length.sum()), np.uint8)
    for i in range(int(length.max(initial=0))):
        has = length > i
        more = np.where(length[has] > i + 1, 0x80, 0)
        out[start[has] + i] = rest[has] >> 7 * i & 0x7F | more
    return out.tobytes()


def unpack_integers(data: memoryview) -> NDArray[np.int32]:
    """Inverse of :func:`pack_integers`. Raises CorruptBitstreamError for a number cut, too long or too large."""
    raw = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(last) or last[-1] != len(raw) - 1):
        raise CorruptBitstreamError("the list of escapes is cut")
    length = np.diff(last, prepend=-1)
    if np.any(length > 4):
        raise CorruptBitstreamError("an escape has more than 28 bits")
    if np.any(raw[last[length > 1]] == 0):
        raise CorruptBitstreamError("an escape is not in its shortest form")
    value = np.zeros(len(last), np.int64)
    for i in range(int(length.max(initial=0))):
        has = length > i
        value[has] |= (raw[last[has] - length[has] + 1 + i].astype(np.int64) & 0x7F) << (7 * i)
    return np.where(value & 1, -((value + 1) >> 1), value >> 1).astype(np.int32)
