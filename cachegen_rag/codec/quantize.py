"""Quantization: where a value stops being zero, and how the others are rounded, chosen by rate-distortion.

Steps are uniform. A value is rounded to the neighbour with the least ``error^2 + weight * bits``, with the bits of its
class's symbol model: a dead zone around zero that is wide where zeros are cheap, and rounding towards zero elsewhere.
Reconstruction points are the centroids of what falls into an interval (``Profile.shrink``). Nothing is ever clipped:
what has no symbol escapes (:func:`cachegen_rag.kernels.reference.quantize`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.codec.profile import CLASSES
from cachegen_rag.kernels.reference import CONTEXTS

RATE_WEIGHT = 0.09
"""Bits against squared error, in squared steps a bit."""


def thresholds(
    counts: NDArray[np.float64], frequency: NDArray[np.uint16], shrink: NDArray[np.float32], weight: float = RATE_WEIGHT
) -> NDArray[np.float32]:
    """Per class the size from which a value is not 0, and what larger sizes are rounded with, ``[classes, 2]``.

    counts ``[classes, contexts, 256]``: how often each symbol was met, to average the contexts' costs.
    """
    with np.errstate(divide="ignore"):
        bits = 12 - np.log2(frequency.astype(np.float64)).reshape(CLASSES, CONTEXTS, 256)
    bits = np.minimum(bits, 16)
    share = counts[:, :, [1, 2, 255, 254]].sum(-1) + 1e-3
    share /= share.sum(1, keepdims=True)
    sizes = np.arange(4)
    cost = ((bits[:, :, sizes] + bits[:, :, -sizes & 0xFF]) / 2 * share[..., None]).sum(1)
    point = np.stack([np.zeros(CLASSES), 1 - shrink[:, 0], 2 - shrink[:, 1], 3 - shrink[:, 1]], axis=1)

    def border(a: int, b: int) -> NDArray[np.float64]:
        gap = point[:, b] - point[:, a]
        border: NDArray[np.float64] = (point[:, a] + point[:, b]) / 2 + weight * (cost[:, b] - cost[:, a]) / (2 * gap)
        return border

    first = np.clip(border(0, 1), 0.5, 0.95)
    second = np.clip((border(1, 2) + border(2, 3) - 1) / 2, 1.4, 1.9)
    return np.stack([first, 2 - second], axis=1).astype(np.float32)
