"""Arithmetic coding of symbol streams with static 16-bit distributions, for the peers that use it.

Source of the method: Witten, Neal and Cleary, "Arithmetic Coding for Data Compression" (1987), with 32-bit registers
as in torchac, which CacheGen's public code uses. Our own codec does not use this: it is here so that the peers' bytes
are real bytes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

TOTAL = 1 << 16
_HALF, _QUARTER = np.uint64(1 << 31), np.uint64(1 << 30)


def cumulative(counts: NDArray[Any]) -> NDArray[np.uint32]:
    """Cumulative frequencies ``[..., symbols + 1]`` of counts ``[..., symbols]``: total 2^16, at least 1 a symbol.

    This is torchac's normalization: scale what is left after one slot a symbol, round, add the slots.
    """
    symbols = counts.shape[-1]
    share = np.cumsum(counts, axis=-1, dtype=np.float64)
    share = np.divide(share, share[..., -1:], out=np.zeros_like(share), where=share[..., -1:] > 0)
    share[..., -1] = 1.0
    out = np.zeros((*counts.shape[:-1], symbols + 1), np.uint32)
    out[..., 1:] = np.round(share * (TOTAL - symbols)) + np.arange(1, symbols + 1)
    return out


def encode(symbols: NDArray[Any], models: NDArray[Any], tables: NDArray[np.uint32]) -> bytes:
    """Code ``symbols [n]`` (from 0), the i-th with the cumulative frequencies ``tables[models[i]]``."""
    out = np.zeros(2 * len(symbols) + 16, np.uint8)  # 16 bits is the most a symbol can cost
    size = _encode(symbols.astype(np.int32), models.astype(np.int32), tables, out)
    return out[:size].tobytes()


def decode(data: bytes, models: NDArray[Any], tables: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The ``len(models)`` symbols that :func:`encode` was given."""
    return _decode(np.frombuffer(data, np.uint8), models.astype(np.int32), tables)  # type: ignore[no-any-return]


@numba.njit(nogil=True)
def _put(out, at, bit):  # type: ignore[no-untyped-def]
    if bit:
        out[at >> 3] |= 128 >> (at & 7)
    return at + 1


@numba.njit(nogil=True)
def _encode(symbols, models, tables, out):  # type: ignore[no-untyped-def]
    low, high, pending, at = np.uint64(0), np.uint64(0xFFFFFFFF), 0, 0
    one, sixteen = np.uint64(1), np.uint64(16)
    for i in range(len(symbols)):
        table = tables[models[i]]
        span = high - low + one
        high = low + ((span * np.uint64(table[symbols[i] + 1])) >> sixteen) - one
        low = low + ((span * np.uint64(table[symbols[i]])) >> sixteen)
        while True:
            if high < _HALF:
                bit = 0
            elif low >= _HALF:
                bit = 1
                low -= _HALF
                high -= _HALF
            elif low >= _QUARTER and high < _HALF + _QUARTER:
                pending += 1
                low = (low - _QUARTER) << one
                high = ((high - _QUARTER) << one) | one
                continue
            else:
                break
            at = _put(out, at, bit)
            for _ in range(pending):
                at = _put(out, at, 1 - bit)
            pending = 0
            low = low << one
            high = (high << one) | one
    bit = 0 if low < _QUARTER else 1
    at = _put(out, at, bit)
    for _ in range(pending + 1):
        at = _put(out, at, 1 - bit)
    return (at + 7) >> 3


@numba.njit(nogil=True)
def _get(data, at):  # type: ignore[no-untyped-def]
    byte = at >> 3
    if byte >= len(data):
        return np.uint64(0)
    return np.uint64((data[byte] >> (7 - (at & 7))) & 1)


@numba.njit(nogil=True)
def _decode(data, models, tables):  # type: ignore[no-untyped-def]
    out = np.empty(len(models), np.int32)
    low, high, value, at = np.uint64(0), np.uint64(0xFFFFFFFF), np.uint64(0), 0
    one, sixteen = np.uint64(1), np.uint64(16)
    for _ in range(32):
        value = (value << one) | _get(data, at)
        at += 1
    for i in range(len(models)):
        table = tables[models[i]]
        span = high - low + one
        slot = (((value - low + one) << sixteen) - one) // span
        left, right = 0, len(table) - 1
        while right - left > 1:
            middle = (left + right) >> 1
            if np.uint64(table[middle]) <= slot:
                left = middle
            else:
                right = middle
        out[i] = left
        high = low + ((span * np.uint64(table[left + 1])) >> sixteen) - one
        low = low + ((span * np.uint64(table[left])) >> sixteen)
        while True:
            if high < _HALF:
                pass
            elif low >= _HALF:
                low -= _HALF
                high -= _HALF
                value -= _HALF
            elif low >= _QUARTER and high < _HALF + _QUARTER:
                low -= _QUARTER
                high -= _QUARTER
                value -= _QUARTER
            else:
                break
            low = low << one
            high = (high << one) | one
            value = (value << one) | _get(data, at)
            at += 1
    return out
