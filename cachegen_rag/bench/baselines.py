"""Peer codecs for KV caches, from their published descriptions, with real encoded bytes.

Each has ``encode(kv) -> bytes`` and ``decode(data, token_ids, positions) -> KV``. Shape, token ids and positions are
known to both sides and cost the peers nothing. Keys are coded as engines keep them, rotary position applied.

Sources: llama.cpp's block formats q8_0 and q4_0 (ggml-quants.c); CacheGen (Liu et al., SIGCOMM 2024) for the paper's
scheme; LMCache's public CacheGen serializer for the deployed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.bench import arithmetic
from cachegen_rag.kv import KV, KVShape
from cachegen_rag.rope import RopeSpec, rotate

Rows = NDArray[np.float32]
"""One tensor of one layer: ``[tokens, channels]``, channels over all KV heads."""


class Peer(ABC):
    """A codec that treats every layer's keys and values as matrices ``[tokens, channels]``.

    ``rope`` is the canonical one (interleaved pairs). ``family`` and ``setting`` name the peer in results; a family's
    settings are points of one curve.
    """

    family: str
    setting: str = "default"

    def __init__(self, shape: KVShape, rope: RopeSpec) -> None:
        self.shape, self.rope = shape, rope

    def encode(self, kv: KV) -> bytes:
        """The KV as bytes."""
        keys = rotate(kv.keys, kv.positions, self.rope)
        tokens = len(kv)
        parts = []
        for layer in range(self.shape.layers):
            parts.append(self.encode_rows(keys[layer].reshape(tokens, -1), layer, 0))
            parts.append(self.encode_rows(np.asarray(kv.values[layer], np.float32).reshape(tokens, -1), layer, 1))
        return b"".join(parts)

    def decode(self, data: bytes, token_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> KV:
        """The coded KV in float32, rotary position removed again."""
        shape, tokens, at = self.shape, len(token_ids), 0
        keys = np.empty((shape.layers, tokens, shape.kv_heads, shape.key_dim), np.float32)
        values = np.empty((shape.layers, tokens, shape.kv_heads, shape.value_dim), np.float32)
        for layer in range(shape.layers):
            for which, into in enumerate((keys, values)):
                channels = shape.value_channels if which else shape.key_channels
                rows, at = self.decode_rows(data, at, tokens, channels, layer, which)
                into[layer] = rows.reshape(into.shape[1:])
        return KV(rotate(keys, positions, self.rope, inverse=True), values, token_ids, positions)

    @abstractmethod
    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        """One layer's keys (``which=0``) or values (1) as bytes."""

    @abstractmethod
    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        """The rows coded at offset ``at``, and the offset after them."""


class Float16(Peer):
    """What an fp16 cache holds."""

    family = "fp16"

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        return rows.astype("<f2").tobytes()

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        count = tokens * channels
        rows = np.frombuffer(data, "<f2", count, at).astype(np.float32)
        return rows.reshape(tokens, channels), at + 2 * count


BLOCK = 32
"""Elements of a row that share a scale in llama.cpp's block formats."""


def _blocks(rows: Rows) -> Rows:
    """``[tokens, blocks, 32]``; a row that is no multiple of 32 is filled up (llama.cpp refuses it)."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(len(rows), -1, BLOCK)


def _inverse(scale: NDArray[Any]) -> Rows:
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


class Q8(Peer):
    """llama.cpp q8_0: blocks of 32, an fp16 scale, 8-bit integers. 8.5 bits an element."""

    family = "q8_0"
    record = np.dtype([("d", "<f2"), ("q", "i1", (BLOCK,))])

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        blocks = _blocks(rows)
        scale: NDArray[Any] = np.abs(blocks).max(-1, keepdims=True) / 127
        out = np.empty(blocks.shape[:2], self.record)
        scaled = blocks * _inverse(scale)
        out["d"], out["q"] = scale[..., 0], np.trunc(scaled + np.copysign(0.5, scaled))
        return out.tobytes()

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        per_row = -(-channels // BLOCK)
        blocks = np.frombuffer(data, self.record, tokens * per_row, at)
        rows = blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]
        return rows.reshape(tokens, -1)[:, :channels], at + blocks.nbytes


class Q4(Peer):
    """llama.cpp q4_0: blocks of 32, an fp16 scale, 4-bit integers. 4.5 bits an element."""

    family = "q4_0"
    record = np.dtype([("d", "<f2"), ("q", "u1", (BLOCK // 2,))])

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        blocks = _blocks(rows)
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
        scale = extreme / -8
        quantized = np.clip(np.trunc(blocks * _inverse(scale) + 8.5), 0, 15).astype(np.uint8)
        out = np.empty(blocks.shape[:2], self.record)
        out["d"], out["q"] = scale[..., 0], quantized[..., : BLOCK // 2] | quantized[..., BLOCK // 2 :] << 4
        return out.tobytes()

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        per_row = -(-channels // BLOCK)
        blocks = np.frombuffer(data, self.record, tokens * per_row, at)
        quantized = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32) - 8
        rows = quantized * blocks["d"].astype(np.float32)[:, None]
        return rows.reshape(tokens, -1)[:, :channels], at + blocks.nbytes


class Int8PerToken(Peer):
    """8-bit uniform quantization, one fp16 scale and minimum a token and layer (vectorwise, as CacheGen's baseline)."""

    family = "int8_per_token"

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        low = rows.min(1, keepdims=True).astype("<f2")
        low = np.where(low > rows.min(1, keepdims=True), np.nextafter(low, np.float16(-np.inf)), low)
        step = ((rows.max(1, keepdims=True) - low.astype(np.float32)) / 255).astype("<f2")
        quantized = np.clip(np.round((rows - low) * _inverse(step)), 0, 255).astype(np.uint8)
        return b"".join([low.astype("<f2").tobytes(), step.tobytes(), quantized.tobytes()])

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        low, step = np.frombuffer(data, "<f2", 2 * tokens, at).astype(np.float32).reshape(2, tokens, 1)
        quantized = np.frombuffer(data, np.uint8, tokens * channels, at + 4 * tokens).reshape(tokens, channels)
        return low + quantized * step, at + 4 * tokens + quantized.nbytes


class LMCache(Peer):
    """LMCache's CacheGen serializer: per token and layer one absolute maximum over all channels, symmetric uniform
    quantization (32 bins in the first layers, then 16), the chunk's own distribution per (layer, channel) shipped as a
    16-bit table of 33 entries, and one arithmetic-coded stream per (layer, channel) with a 32-bit length.

    ``chunk`` tokens are coded at a time, each chunk with its own tables (LMCache's default is 256).
    """

    # One family a chunk size: chunk sizes are deployments, not points of one curve.
    key_bins = ((10, 32), (None, 16))
    value_bins = ((2, 32), (None, 16))
    table_entries = 33

    def __init__(self, shape: KVShape, rope: RopeSpec, chunk: int = 256) -> None:
        super().__init__(shape, rope)
        self.chunk, self.family = chunk, f"lmcache_cachegen_{chunk}"

    def half_bins(self, layer: int, which: int) -> int:
        """The largest quantized magnitude, C = bins / 2 - 1."""
        for until, bins in self.value_bins if which else self.key_bins:
            if until is None or layer < until:
                return bins // 2 - 1
        raise AssertionError

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        return b"".join(self._encode_chunk(c, self.half_bins(layer, which)) for c in _chunks(rows, self.chunk))

    def _encode_chunk(self, rows: Rows, half: int) -> bytes:
        scale = np.abs(rows).max(1, keepdims=True).astype("<f2")
        symbols = np.clip(np.round(rows * (half * _inverse(scale))), -half, half).astype(int) + half
        counts = np.zeros((rows.shape[1], self.table_entries - 1))
        np.add.at(counts, (np.arange(rows.shape[1])[None, :], symbols), 1)
        tables = arithmetic.cumulative(counts)
        streams = [
            arithmetic.encode(np.ascontiguousarray(symbols[:, c]), np.full(len(rows), c), tables)
            for c in range(rows.shape[1])
        ]
        lengths = np.array([len(s) for s in streams], "<u4")
        return b"".join([scale.tobytes(), tables.astype("<u2").tobytes(), lengths.tobytes(), *streams])

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        half, parts = self.half_bins(layer, which), []
        for start in range(0, tokens, self.chunk):
            n = min(self.chunk, tokens - start)
            scale = np.frombuffer(data, "<f2", n, at).astype(np.float32)[:, None]
            at += 2 * n
            tables = np.frombuffer(data, "<u2", channels * self.table_entries, at).astype(np.uint32)
            tables = tables.reshape(channels, self.table_entries)
            at += 2 * tables.size
            tables[:, -1] = arithmetic.TOTAL  # 65,536 does not fit 16 bits and is stored as 0
            lengths = np.frombuffer(data, "<u4", channels, at).tolist()
            at += 4 * channels
            symbols = np.empty((n, channels), np.float32)
            for c, length in enumerate(lengths):
                symbols[:, c] = arithmetic.decode(data[at : at + length], np.full(n, c), tables)
                at += length
            parts.append((symbols - half) * (scale / half))
        return np.concatenate(parts), at


class CacheGen(Peer):
    """The scheme of the CacheGen paper: groups of 10 tokens, the first an anchor quantized to 8 bits (vectorwise), the
    others deltas against the decoded anchor, quantized with bins of 0.5, 1 and 1.5 in the first, middle and last third
    of the layers; both arithmetic-coded with a distribution per (layer, channel) profiled offline.

    Bins are in units of the layer's standard deviation. ``scale`` widens or narrows all of them: the paper's finer
    and coarser levels. :meth:`fit` profiles; tables are the model's and cost no bytes.
    """

    family = "cachegen_paper"
    group = 10
    bins = (0.5, 1.0, 1.5)
    limit = 127

    def __init__(self, shape: KVShape, rope: RopeSpec, scale: float = 1.0) -> None:
        super().__init__(shape, rope)
        self.scale, self.setting = scale, f"bins x {scale:g}"
        self._tables: dict[tuple[int, int], tuple[NDArray[np.uint32], NDArray[np.uint32]]] = {}
        self._deviation: dict[tuple[int, int], float] = {}

    def fit(self, calibration: Sequence[KV]) -> CacheGen:
        """Profile deviations and symbol distributions on KVs that no figure is reported on."""
        for layer, which, parts in self._layers(calibration):
            self._deviation[layer, which] = float(np.concatenate(parts).std()) or 1.0
            channels, symbols = parts[0].shape[1], 2 * self.limit + 1
            counts = np.full((2, channels, symbols), 1e-3)
            for rows in parts:
                _, anchors, deltas = self._quantize(rows, layer, which)
                for kind, found in enumerate((anchors, deltas)):
                    np.add.at(counts[kind], (np.arange(channels)[None, :], found), 1)
            anchor_table, delta_table = arithmetic.cumulative(counts)
            self._tables[layer, which] = anchor_table, delta_table
        return self

    def _layers(self, kvs: Sequence[KV]) -> Iterator[tuple[int, int, list[Rows]]]:
        rotated = [rotate(kv.keys, kv.positions, self.rope) for kv in kvs]
        for layer in range(self.shape.layers):
            yield layer, 0, [keys[layer].reshape(len(kv), -1) for keys, kv in zip(rotated, kvs, strict=True)]
            yield layer, 1, [np.asarray(kv.values[layer], np.float32).reshape(len(kv), -1) for kv in kvs]

    def _step(self, layer: int, which: int) -> float:
        third = min(2, 3 * layer // self.shape.layers)
        return self.scale * self.bins[third] * self._deviation[layer, which]

    def _quantize(self, rows: Rows, layer: int, which: int) -> tuple[Any, NDArray[Any], NDArray[Any]]:
        """Anchor scales fp16 ``[anchors, 1]``, anchor symbols and delta symbols, both from 0."""
        anchor_rows = rows[:: self.group]
        scale = (np.abs(anchor_rows).max(1, keepdims=True) / self.limit).astype("<f2")
        anchors = np.round(anchor_rows * _inverse(scale))
        anchors = np.clip(anchors, -self.limit, self.limit)
        base = np.repeat(anchors * scale.astype(np.float32), self.group, axis=0)[: len(rows)]
        deltas = np.round((rows - base) / self._step(layer, which))
        deltas = np.delete(deltas, np.s_[:: self.group], axis=0)
        deltas = np.clip(deltas, -self.limit, self.limit)
        return scale, anchors.astype(int) + self.limit, deltas.astype(int) + self.limit

    def encode_rows(self, rows: Rows, layer: int, which: int) -> bytes:
        scale, anchors, deltas = self._quantize(rows, layer, which)
        parts = [scale.tobytes()]
        for symbols, table in zip((anchors, deltas), self._tables[layer, which], strict=True):
            stream = arithmetic.encode(symbols.ravel(), _channel_models(symbols.shape), table)
            parts += [len(stream).to_bytes(4, "little"), stream]
        return b"".join(parts)

    def decode_rows(self, data: bytes, at: int, tokens: int, channels: int, layer: int, which: int) -> tuple[Rows, int]:
        n_anchors = -(-tokens // self.group)
        scale = np.frombuffer(data, "<f2", n_anchors, at).astype(np.float32)[:, None]
        at += 2 * n_anchors
        symbols = []
        for n, table in zip((n_anchors, tokens - n_anchors), self._tables[layer, which], strict=True):
            length = int.from_bytes(data[at : at + 4], "little")
            stream = data[at + 4 : at + 4 + length]
            found = arithmetic.decode(stream, _channel_models((n, channels)), table)
            symbols.append(found.reshape(n, channels).astype(np.float32) - self.limit)
            at += 4 + length
        anchors = symbols[0] * scale
        rows = np.repeat(anchors, self.group, axis=0)[:tokens]
        is_delta = np.arange(tokens) % self.group != 0
        rows[is_delta] += symbols[1] * np.float32(self._step(layer, which))
        return rows, at


def _chunks(rows: Rows, size: int) -> Iterator[Rows]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _channel_models(shape: tuple[int, int]) -> NDArray[np.int32]:
    return np.tile(np.arange(shape[1], dtype=np.int32), shape[0])


def peers(shape: KVShape, rope: RopeSpec, calibration: Sequence[KV], *, tokens: int) -> list[Peer]:
    """All peers for documents of ``tokens`` tokens."""
    found: list[Peer] = [Float16(shape, rope), Q8(shape, rope), Q4(shape, rope), Int8PerToken(shape, rope)]
    found += [LMCache(shape, rope, chunk) for chunk in sorted({min(256, tokens), tokens})]
    found += [CacheGen(shape, rope, scale).fit(calibration) for scale in (0.25, 0.5, 1.0, 1.5)]
    return found
