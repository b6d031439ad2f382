"""Integers of the escapes: packed as SPEC.md says, and back."""

from __future__ import annotations

import numpy as np
import pytest

from cachegen_rag.codec.entropy import pack_integers, unpack_integers


def leb128(value: int) -> bytes:
    rest, out = value << 1 if value >= 0 else (-value << 1) - 1, bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


@pytest.mark.parametrize(
    "values",
    [[], [0], [-1, 1], [63, -64, 64, -65, 8191, -8192, 8192, -8193], [1 << 20, -(1 << 20), 1 << 24, -(1 << 24)]],
)
def test_integers_are_zigzag_leb128(values: list[int]) -> None:
    data = pack_integers(np.array(values, np.int32))
    assert data == b"".join(map(leb128, values))
    np.testing.assert_array_equal(unpack_integers(memoryview(data)), values)
