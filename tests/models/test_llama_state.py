"""The bytes of a llama.cpp sequence: what is laid out or written by the engine parses, anything else is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splicing import TEXT

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.kv import KVShape
from cachegen_rag.models.llama_native import MAIN
from cachegen_rag.models.llama_state import is_finite, layout, parse, state_bytes

SHAPE = KVShape(layers=2, kv_heads=3, key_dim=4, value_dim=6)


def sample(tokens: int = 5) -> np.ndarray:
    state = layout(SHAPE, np.arange(tokens, dtype=np.int32) * 3)
    for number, rows in enumerate(state.keys + state.values):
        rows[...] = np.arange(rows.size, dtype=np.float16).reshape(rows.shape) + number
    return state.data


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 257])
def test_layout_parses_back(tokens: int) -> None:
    data = sample(tokens)
    assert len(data) == state_bytes(SHAPE, tokens)
    state = parse(data, SHAPE)
    assert state.positions.tolist() == list(range(0, 3 * tokens, 3))
    for number, rows in enumerate(state.keys + state.values):
        assert rows.reshape(-1).tolist() == (np.arange(rows.size, dtype=np.float16) + number).tolist()


def test_rows_are_views_of_the_bytes() -> None:
    state = layout(SHAPE, np.array([4, 9], np.int32))
    for rows in state.keys + state.values:
        assert np.shares_memory(rows, state.data)
    state.values[1][...] = 7
    assert (parse(state.data, SHAPE).values[1] == 7).all()


@given(st.integers(0, len(sample()) - 1))
def test_truncated_anywhere_is_refused(size: int) -> None:
    with pytest.raises(SpliceRefusedError):
        parse(sample()[:size], SHAPE)


HEADER, TABLE = 0, 16 + 12 * 5
LAYER = TABLE + 8


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (HEADER, "<I", 1, "magic"),
        (HEADER + 8, "<I", 2, "streams"),
        (HEADER + 12, "<I", 1 << 31, "end before"),
        (16 + 4, "<I", 2, "sequences of a cell"),
        (TABLE, "<I", 1, "transposed"),
        (TABLE + 4, "<I", 3, "layers"),
        (LAYER, "<i", 8, "type of keys of layer 0"),
        (LAYER + 4, "<Q", 1 << 60, "bytes a row of keys of layer 0"),
    ],
)
def test_every_other_field_is_refused(offset: int, form: str, value: int, message: str) -> None:
    data = sample()
    struct.pack_into(form, data.data, offset, value)
    with pytest.raises(SpliceRefusedError, match=message):
        parse(data, SHAPE)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(SpliceRefusedError, match="bytes"):
        parse(np.append(sample(), np.uint8(0)), SHAPE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_is_finite(value: float) -> None:
    rows = np.zeros((3, 2, 4), np.float16)
    assert is_finite(rows)
    rows[0, 0, 0] = np.finfo(np.float16).max
    assert is_finite(rows)
    rows[2, 1, 3] = value
    assert not is_finite(rows)


@pytest.mark.parametrize("model_name", ["tiny_model", pytest.param("real_model", marks=pytest.mark.real)])
def test_engine_bytes_rebuilt_are_identical(model_name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(model_name)
    with model.session() as session:
        session.decode(model.tokenize(TEXT * 3))
        data = model.context.get_sequence(MAIN)
    state = parse(data, model.shape)
    rebuilt = layout(model.shape, state.positions, MAIN)
    for source, target in zip(state.keys + state.values, rebuilt.keys + rebuilt.values, strict=True):
        target[...] = source
    assert rebuilt.data.tobytes() == data.tobytes()
    with model.session():
        assert model.context.set_sequence(MAIN, rebuilt.data)
        assert model.context.get_sequence(MAIN).tobytes() == data.tobytes()
