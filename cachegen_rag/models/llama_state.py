"""The bytes of one llama.cpp sequence (``llama_state_seq_get_data``): parse them, and lay them out for writing.

Little-endian, with neither a version nor the model's identity (llama.cpp, ``llama_kv_cache::state_write``)::

    u32 magic | i32 source sequence | u32 streams (1)
    u32 cells; per cell: i32 position, u32 1, i32 sequence
    u32 transposed values (0) | u32 layers
    per layer, keys:    i32 ggml type | u64 bytes a row | rows
    per layer, values:  i32 ggml type | u64 bytes a row | rows

Only this form is understood: one stream, f16, untransposed values, every layer alike. Anything else raises
SpliceRefusedError with the first difference. Whether the engine's library writes what is parsed here is checked when
a model loads (``llama_check.py``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.kv import KVShape

MAGIC = 0xAF143CD8
GGML_TYPE_F16 = 1
CELL_BYTES = 12
_HEADER = struct.Struct("<IiII")  # magic, sequence, streams, cells
_TABLE = struct.Struct("<II")  # transposed, layers
_LAYER = struct.Struct("<iQ")  # ggml type, bytes a row


@dataclass(frozen=True)
class SequenceState:
    """A sequence's bytes and the rows in them, as views: what is written to the views is written to ``data``.

    data : uint8 ``[bytes]``.
    positions : int32 ``[tokens]``, in the order of the rows (not necessarily sorted).
    keys, values : per layer float16 ``[tokens, kv_heads, key_dim]`` and ``[tokens, kv_heads, value_dim]``; keys are
        rotated to ``positions``, in the engine's pair layout.
    """

    data: NDArray[np.uint8]
    positions: NDArray[np.int32]
    keys: list[NDArray[np.float16]]
    values: list[NDArray[np.float16]]


def state_bytes(shape: KVShape, tokens: int) -> int:
    """Bytes of a state of ``tokens`` rows."""
    fixed = _HEADER.size + _TABLE.size + 2 * shape.layers * _LAYER.size
    return fixed + tokens * (CELL_BYTES + shape.fp16_bytes_per_token)


def layout(shape: KVShape, positions: NDArray[np.int32], sequence: int = 0) -> SequenceState:
    """A state with rows at ``positions``, complete but for the rows themselves (uninitialised memory).

    ``sequence`` is recorded in the bytes; llama.cpp ignores it when the state is restored.
    """
    tokens = len(positions)
    data = np.empty(state_bytes(shape, tokens), dtype=np.uint8)
    _HEADER.pack_into(data.data, 0, MAGIC, sequence, 1, tokens)
    cells = _cells(data, tokens)
    cells[:, 0], cells[:, 1], cells[:, 2] = positions, 1, sequence
    offset = _HEADER.size + CELL_BYTES * tokens
    _TABLE.pack_into(data.data, offset, 0, shape.layers)
    offset += _TABLE.size
    rows: list[NDArray[np.float16]] = []
    for dim in [shape.key_dim] * shape.layers + [shape.value_dim] * shape.layers:
        row = 2 * shape.kv_heads * dim
        _LAYER.pack_into(data.data, offset, GGML_TYPE_F16, row)
        offset += _LAYER.size
        rows.append(_rows(data, offset, tokens, shape.kv_heads, dim))
        offset += tokens * row
    return SequenceState(data, cells[:, 0], rows[: shape.layers], rows[shape.layers :])


def parse(data: NDArray[np.uint8], shape: KVShape) -> SequenceState:
    """The rows in ``data``, as views of it.

    Raises
    ------
    SpliceRefusedError
        The bytes are not exactly one state of this shape in the form described above.
    """
    if len(data) < _HEADER.size:
        raise _refused(f"{len(data)} bytes are fewer than a header")
    magic, _, streams, tokens = _HEADER.unpack_from(data.data, 0)
    _expect("magic", magic, MAGIC)
    _expect("streams", streams, 1)
    offset = _HEADER.size + CELL_BYTES * tokens
    _need(data, offset + _TABLE.size)
    cells = _cells(data, tokens)
    _expect("sequences of a cell", cells[:, 1].tolist(), [1] * tokens)
    transposed, layers = _TABLE.unpack_from(data.data, offset)
    _expect("transposed values", transposed, 0)
    _expect("layers", layers, shape.layers)
    offset += _TABLE.size
    rows: list[NDArray[np.float16]] = []
    for index in range(2 * layers):
        dim = shape.key_dim if index < layers else shape.value_dim
        what = f"{'keys' if index < layers else 'values'} of layer {index % layers}"
        _need(data, offset + _LAYER.size)
        kind, row = _LAYER.unpack_from(data.data, offset)
        _expect(f"type of {what}", kind, GGML_TYPE_F16)
        _expect(f"bytes a row of {what}", row, 2 * shape.kv_heads * dim)
        offset += _LAYER.size
        _need(data, offset + tokens * row)
        rows.append(_rows(data, offset, tokens, shape.kv_heads, dim))
        offset += tokens * row
    _expect("bytes", len(data), offset)
    return SequenceState(data, cells[:, 0], rows[:layers], rows[layers:])


def is_finite(rows: NDArray[np.float16]) -> bool:
    """Whether no element is NaN or infinite (a masked NaN still spoils what is computed beside it)."""
    bits = rows.view(np.uint16)
    return not bool(np.any((bits & 0x7C00) == 0x7C00))


def _cells(data: NDArray[np.uint8], tokens: int) -> NDArray[np.int32]:
    return data[_HEADER.size : _HEADER.size + CELL_BYTES * tokens].view("<i4").reshape(tokens, 3)


def _rows(data: NDArray[np.uint8], offset: int, tokens: int, heads: int, dim: int) -> NDArray[np.float16]:
    return data[offset : offset + 2 * tokens * heads * dim].view("<f2").reshape(tokens, heads, dim)


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _refused(f"{what}: found {found}, expected {expected}")


def _need(data: NDArray[np.uint8], size: int) -> None:
    if len(data) < size:
        raise _refused(f"{len(data)} bytes end before byte {size}")


def _refused(difference: str) -> SpliceRefusedError:
    return SpliceRefusedError(f"this llama.cpp lays out its sequence state differently ({difference})")
