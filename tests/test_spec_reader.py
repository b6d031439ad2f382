"""A second decoder, written from SPEC.md alone: the text is complete, and the package follows it.

Plain loops over small shapes; it shares no code with the package but numpy.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import synthetic

from cachegen_rag.codec import Codec
from cachegen_rag.kv import KVShape


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def numbers(self, layout: str) -> Any:
        found = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return found if len(found) > 1 else found[0]

    def array(self, kind: str, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        found = np.frombuffer(self.data, np.dtype(kind).newbyteorder("<"), count, self.at)
        self.at += found.nbytes
        return found.reshape(shape)


def read_profile(data: bytes) -> dict[str, Any]:
    """Section 5."""
    r = Reader(data)
    assert r.array("u1", 8).tobytes() == b"\x89CGP\r\n\x1a\n"
    version, sinks, default, *shape, n_blocks = r.numbers("HBBHHHHI")
    assert version == 1 and default >= 1
    r.array("u1", 32)
    profile: dict[str, Any] = {"shape": shape, "sinks": sinks, "hash": hashlib.sha256(data).digest()}
    profile["steps"] = [r.numbers("hff")[0] for _ in range(r.numbers("B"))]
    profile["context"], profile["shrink"] = r.array("u1", 44, 2), r.array("f4", 44, 2)
    r.array("f4", 44, 2)
    models = []
    for _ in range(132):
        first, last = r.numbers("bb")
        models.append(dict(zip(range(first, last + 1), r.array("u2", last - first + 1).tolist(), strict=True)))
        assert sum(models[-1].values()) == 4096
    profile["models"] = models
    profile["blocks"] = blocks = []
    for _ in range(n_blocks):
        n_cells, joint = r.numbers("HH")
        cells = []
        for _ in range(n_cells):
            layer, is_value, reserved, head, heads = r.numbers("HBBHH")
            assert reserved == 0
            channels = heads * shape[3 if is_value else 2]
            mean, unit = r.array("f4", channels), r.array("f4", channels)
            basis = r.array("i1", channels, channels) * unit[:, None]
            cells.append({"at": (layer, is_value, head, heads), "mean": mean, "basis": basis})
        unit = r.array("f4", n_cells * joint)
        basis = r.array("i1", n_cells * joint, n_cells * joint) * unit[:, None]
        scale = r.array("i2", sum(len(c["mean"]) for c in cells))
        blocks.append({"cells": cells, "joint": joint, "basis": basis, "scale": scale})
    for block in blocks:
        r.array("f4", len(block["scale"]) + 1)
    r.array("f4", n_blocks, n_blocks)
    assert r.at == len(data) - 4
    return profile


def read_bitstream(data: bytes) -> tuple[dict[str, Any], dict[tuple[int, int], bytes]]:
    """Section 2, without its checks."""
    r = Reader(data)
    r.array("u1", 8)
    version, level, segment, header = r.numbers("HBBI")
    assert (version, segment) == (1, 0)
    r.array("u1", 32)
    profile = r.array("u1", 32).tobytes()
    *shape, tokens, runs, sections, width, coding = r.numbers("HHHHIIHBB")
    positions = [first + i for first, length in r.array("u4", runs, 2).tolist() for i in range(length)]
    ids = [int.from_bytes(row.tobytes(), "little") for row in r.array("u1", tokens, width)]
    table = [r.numbers("HHII") for _ in range(sections)]
    found, at = {}, header
    for kind, index, length, _ in table:
        found[kind, index] = data[at : at + length]
        at += length + -length % 8
    head = {"level": level, "profile": profile, "shape": shape, "positions": positions, "ids": ids, "coding": coding}
    return head, found


def columns_of(block: dict[str, Any], step: int) -> list[tuple[int, int]]:
    """Section 5.5: (component or -1, class) of every column."""
    scale = block["scale"].tolist()
    order = sorted(range(len(scale)), key=lambda i: -scale[i])
    classes = [min(scale[i] - step + 12, 43) for i in order]
    count = sum(c >= 0 for c in classes)
    count += -count % 32
    found = [(i, max(c, 0)) for i, c in zip(order, classes, strict=True)][:count]
    return found + [(-1, 0)] * (count - len(found))


def read_stream(data: bytes, tokens: int, columns: list[tuple[int, int]], profile: dict[str, Any]) -> list[list[int]]:
    """Section 3.5."""
    r = Reader(data)
    state = list(r.numbers("32I"))
    words = iter(r.array("u2", (len(data) - 128) // 2).tolist())
    out: list[list[int]] = []
    for row in range(tokens):
        out.append([])
        for c, (_, cls) in enumerate(columns):
            up = out[row - 1][c] if row else 0
            left = out[row][c - 32] if c >= 32 else 0
            m = 2 * abs(up) + abs(left)
            low, high = profile["context"][cls].tolist()
            model = profile["models"][3 * cls + (m > low) + (m > high)]
            x = state[c % 32]
            slot, start = x % 4096, 0
            for symbol in [*range(128), *range(-128, 0)]:
                if slot < start + model.get(symbol, 0):
                    break
                start += model.get(symbol, 0)
            x = model[symbol] * (x >> 12) + slot - start
            if x < 1 << 16:
                x = x << 16 | next(words)
            state[c % 32] = x
            out[row].append(symbol)
    assert next(words, None) is None and state == [1 << 16] * 32
    return out


def read_escapes(data: bytes) -> list[int]:
    """Section 3.4."""
    found, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(-(value + 1) // 2 if value & 1 else value // 2)
            value = shift = 0
    return found


def decode(data: bytes, profile: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Sections 3.3, 3.6 and 3.7: keys and values in float32."""
    head, sections = read_bitstream(data)
    assert head["profile"] == profile["hash"]
    layers, heads, key_dim, value_dim = head["shape"]
    tokens = len(head["ids"])
    keys = np.zeros((layers, tokens, heads, key_dim), np.float32)
    values = np.zeros((layers, tokens, heads, value_dim), np.float32)

    def rows(r: Reader, which: list[int]) -> None:
        keys[:, which] = r.array("f2", layers, len(which), heads, key_dim)
        values[:, which] = r.array("f2", layers, len(which), heads, value_dim)

    if head["coding"] == 0:
        rows(Reader(sections[1, 0]), list(range(tokens)))
        return keys, values
    step = profile["steps"][head["level"] - 1]
    escapes = iter(read_escapes(sections.get((2, 0), b"")))
    packed = Reader(sections[4, 0]).array("u1", len(profile["blocks"]), (tokens + 1) // 2)
    for index, block in enumerate(profile["blocks"]):
        gains = [int(packed[index][t // 2]) >> 4 * (t % 2) & 15 for t in range(tokens)]
        columns = columns_of(block, step)
        components = np.zeros((tokens, len(block["scale"])))
        if columns:
            symbols = read_stream(sections[3, index], tokens, columns, profile)
            for t in range(tokens):
                for (component, cls), s in zip(columns, symbols[t], strict=True):
                    value = float(next(escapes)) if s == -128 else 0.0
                    if s not in (0, -128):
                        value = np.sign(s) * (abs(s) - float(profile["shrink"][cls][int(abs(s) > 1)]))
                    if component >= 0:
                        components[t, component] = value * 2 ** (step / 4) * 2 ** ((8 - gains[t]) / 2)
        joint, at = block["joint"], len(block["basis"])
        leading = components[:, :at] @ block["basis"]
        for number, cell in enumerate(block["cells"]):
            rest = len(cell["mean"]) - joint
            y = np.concatenate(
                [leading[:, number * joint : (number + 1) * joint], components[:, at : at + rest]], axis=1
            )
            at += rest
            layer, is_value, first, count = cell["at"]
            x = (cell["mean"] + y @ cell["basis"]).reshape(tokens, count, -1)
            (values if is_value else keys)[layer, :, first : first + count] = x
    assert next(escapes, None) is None
    if (1, 0) in sections:
        r = Reader(sections[1, 0])
        rows(r, r.array("u4", r.numbers("I")).tolist())
    return keys, values


@pytest.mark.parametrize(
    ("shape", "joint", "tokens"),
    [(KVShape(3, 2, 16, 24), 8, 19), (KVShape(1, 1, 6, 10), 3, 1), (KVShape(5, 3, 8, 8), 0, 7)],
)
def test_the_text_and_the_package_decode_alike(shape: KVShape, joint: int, tokens: int) -> None:
    made = synthetic.profile(shape, joint=joint, levels=2)
    codec, profile = Codec(made, bytes(32), sinks=True), read_profile(made.to_bytes())
    assert profile["shape"] == [shape.layers, shape.kv_heads, shape.key_dim, shape.value_dim]
    for first in (0, 40):
        kv = synthetic.kv(made, tokens, first=first, outliers=3)
        for level in range(3):
            data = codec.encode(kv, level)
            keys, values = decode(data, profile)
            ours = codec.decode(data, np.float32)
            for text, package in ((keys, ours.keys), (values, ours.values)):
                np.testing.assert_allclose(text, package, rtol=0, atol=1e-4 * np.abs(package).max())
            head, _ = read_bitstream(data)
            assert head["ids"] == kv.token_ids.tolist() and head["positions"] == kv.positions.tolist()
