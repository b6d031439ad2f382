"""Quantization: from components to symbols.

Uniform steps with a dead zone and reconstruction points inside the intervals, both chosen per class by
rate-distortion during calibration. Values outside the symbols' range escape: nothing is ever clipped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import EncodeError
from cachegen_rag.kernels.reference import ESCAPE, Escapes

MAX_VALUE = 1 << 24
"""Largest magnitude, in steps, that can be coded."""


def quantize(components: NDArray[np.float32], step: float, threshold: NDArray[np.float32]) -> NDArray[np.int32]:
    """Integers int32 ``[tokens, columns]``.

    threshold : float32 ``[columns, 2]``: a value of at least ``threshold[0]`` steps is not 0, and magnitudes above 1
    are ``floor(size + threshold[1])``.
    Raises EncodeError if a value exceeds 2^24 steps.
    """
    size = np.abs(components) * np.float32(1 / step)
    if not size.max(initial=0) <= MAX_VALUE:
        raise EncodeError(f"a component of {size.max():.3g} steps is beyond what this level can code; use a finer one")
    whole = np.floor(size + threshold[:, 1])
    np.minimum(whole, np.where(size >= threshold[:, 0], whole, 0), out=whole)
    np.maximum(whole, size >= threshold[:, 0], out=whole)
    return np.copysign(whole, components).astype(np.int32)


def to_symbols(values: NDArray[np.int32], known: NDArray[np.bool_]) -> tuple[NDArray[np.int8], Escapes]:
    """Symbols int8 and the values that are not among ``known [columns, 256]`` (indexed by ``symbol & 0xff``)."""
    fits = (values > ESCAPE) & (values <= 127)
    fits &= known[np.arange(values.shape[1]), values & 0xFF]
    symbols = np.where(fits, values, ESCAPE).astype(np.int8)
    at = np.flatnonzero(~fits)
    return symbols, Escapes(at.astype(np.int64), values.ravel()[at].astype(np.int32))
