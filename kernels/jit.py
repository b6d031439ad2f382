"""The codec's loops in numba, for installations without the C library. The loops of codec.c, element by element."""

from __future__ import annotations

from typing import Any

from numba import njit, uint32

from cachegen_rag.kernels.reference import GROUP, LANES, LOW, PROB_BITS, SLOTS

_MASK = SLOTS - 1


@njit(nogil=True, cache=True, boundscheck=False)
def _context(up: int, left: int, low: int, high: int) -> int:
    m = 2 * abs(up) + abs(left)
    return (1 if m > low else 0) + (1 if m > high else 0)


@njit(nogil=True, cache=True, boundscheck=False)
def decode(words: Any, state: Any, slots: Any, model: Any, low: Any, high: Any, out: Any) -> int:
    """Decode a stream into ``out``; 0, -1 (ends early) or -2 (inconsistent)."""
    for lane in range(LANES):
        if state[lane] < LOW:
            return -2
    at = 0
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            up = int(out[r - 1, c]) if r > 0 else 0
            left = int(out[r, c - GROUP]) if c >= GROUP else 0
            lane = c % LANES
            x = state[lane]
            e = slots[model[c] + _context(up, left, low[c], high[c]), x & uint32(_MASK)]
            x = uint32((e >> uint32(8)) & uint32(_MASK)) * (x >> uint32(PROB_BITS)) + (e >> uint32(20))
            if x < LOW:
                if at == len(words):
                    return -1
                x = (x << 16) | words[at]
                at += 1
            state[lane] = uint32(x)
            symbol = int(e & uint32(0xFF))
            out[r, c] = symbol - 256 if symbol > 127 else symbol
    if at != len(words):
        return -2
    for lane in range(LANES):
        if state[lane] != LOW:
            return -2
    return 0


@njit(nogil=True, cache=True, boundscheck=False)
def encode(symbols: Any, codes: Any, model: Any, low: Any, high: Any, state: Any, words: Any) -> int:
    """Encode backwards into the end of ``words``; the number of words, or -2 if a symbol has no model."""
    rows, columns = symbols.shape
    at = rows * columns
    for lane in range(LANES):
        state[lane] = LOW
    for r in range(rows - 1, -1, -1):
        for c in range(columns - 1, -1, -1):
            up = int(symbols[r - 1, c]) if r > 0 else 0
            left = int(symbols[r, c - GROUP]) if c >= GROUP else 0
            k = model[c] + _context(up, left, low[c], high[c])
            code = int(codes[k, int(symbols[r, c]) & 0xFF])
            f = code & 0xFFFF
            if f == 0:
                return -2
            lane = c % LANES
            v = int(state[lane])
            if v >> 20 >= f:
                at -= 1
                words[at] = v & 0xFFFF
                v >>= 16
            state[lane] = (v // f << PROB_BITS) + v % f + (code >> 16)
    return rows * columns - at
