"""Profile: what was learned offline about one model's KV, and its own small file format.

A profile holds a transform (:mod:`cachegen_rag.codec.transform`), symbol models in classes
(:mod:`cachegen_rag.codec.entropy`), how values are rounded (:mod:`cachegen_rag.codec.quantize`) and the levels with
the quality that calibration expects of each. It is named by the SHA-256 of its bytes, and every bitstream names it.
Nothing is allocated from a number in the file before that number has been checked.
"""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ProfileError
from cachegen_rag.fingerprint import ModelFingerprint, canonical_bytes, content_hash
from cachegen_rag.kernels.reference import CONTEXTS, SLOTS
from cachegen_rag.kv import KVShape

MAGIC = b"\x89CGP\r\n\x1a\n"
VERSION = 1
MAX_PROFILE_BYTES = 64 << 20
MAX_BLOCKS = 4096
MAX_CELLS = 1024
MAX_CELL_CHANNELS = 4096
MAX_JOINT = 4096
MAX_LEVELS = 32
MAX_SINKS = 64
MAX_STEP = 400

CLASSES = 44
"""Symbol model classes. Class ``k`` is for components whose standard deviation is ``2 ** ((k - 12) / 4)`` steps."""
CLASS_OF_ONE_STEP = 12
MODELS = CLASSES * CONTEXTS

_HEAD = struct.Struct("<8sHBBHHHHI32s")  # magic, version, sinks, default level, shape, blocks, fingerprint
_LEVEL = struct.Struct("<hff")
_CELL = struct.Struct("<HBBHH")  # layer, is value, reserved, head, heads
_BLOCK = struct.Struct("<HH")  # cells, joint


@dataclass(frozen=True)
class Level:
    """One quantization level. Level 0 is exact (fp16); from 1 on the finest comes first.

    kl : expected KL divergence per token, in nats, of the model's predictions behind a coded document from those
        behind an exact one, as calibration measured it.
    bits : expected bits per element, everything included.
    step : quantization step, as ``4 * log2(step)``, rounded; the profile's units.
    """

    index: int
    kl: float
    bits: float
    step: int = 0

    @property
    def exact(self) -> bool:
        """Whether this is the fp16 level."""
        return self.index == 0


@dataclass(frozen=True, eq=False)
class Cell:
    """The channels of some heads of one layer, keys or values, and their own transform.

    A token's channels ``x`` are ``mean + y @ basis`` for components ``y``. basis : int8 ``[channels, channels]``,
    row ``i`` in units of ``unit[i]``.
    """

    layer: int
    is_value: bool
    head: int
    heads: int
    mean: NDArray[np.float32]
    unit: NDArray[np.float32]
    basis: NDArray[np.int8]

    @property
    def channels(self) -> int:
        """Channels, and components, of this cell."""
        return len(self.mean)

    @cached_property
    def matrix(self) -> NDArray[np.float32]:
        """The basis as float32 ``[components, channels]``."""
        matrix: NDArray[np.float32] = self.basis * self.unit[:, None]
        return matrix


@dataclass(frozen=True, eq=False)
class Block:
    """Cells that are coded together: their first ``joint`` components each are transformed once more, jointly.

    joint_basis : int8 ``[cells * joint, cells * joint]``: the cells' leading components, cell by cell, are
    ``z @ joint_basis`` for joint components ``z``; row ``i`` in units of ``joint_unit[i]``.
    scale : int16 ``[components]``, ``4 * log2`` of each component's standard deviation, rounded: first the joint
    components, then every cell's own (those behind its first ``joint``), non-increasing within each of these.
    """

    cells: tuple[Cell, ...]
    joint: int
    joint_unit: NDArray[np.float32]
    joint_basis: NDArray[np.int8]
    scale: NDArray[np.int16]

    @property
    def components(self) -> int:
        """Components, and channels, of the block."""
        return sum(cell.channels for cell in self.cells)

    @cached_property
    def joint_matrix(self) -> NDArray[np.float32]:
        """The joint basis as float32."""
        matrix: NDArray[np.float32] = self.joint_basis * self.joint_unit[:, None]
        return matrix


@dataclass(frozen=True, eq=False)
class Importance:
    """How tokens' gains are predicted (:mod:`cachegen_rag.codec.importance`). Used by the encoder only.

    channels : per block float32 ``[channels + 1]``, weights of its channels and a constant: the block's estimate.
    combine : float32 ``[blocks, blocks]``: ``estimates @ combine`` is the binary logarithm of each block's gain.
    """

    channels: tuple[NDArray[np.float32], ...]
    combine: NDArray[np.float32]

    @staticmethod
    def none(blocks: tuple[Block, ...]) -> Importance:
        """Every token matters alike."""
        n = len(blocks)
        return Importance(tuple(np.zeros(b.components + 1, np.float32) for b in blocks), np.zeros((n, n), np.float32))


@dataclass(frozen=True, eq=False)
class Profile:
    """Everything the codec knows about a model.

    fingerprint : 32 bytes, the :func:`family` of the model it was calibrated on.
    sinks : leading tokens of a sequence that are stored exactly.
    levels : the lossy levels, finest first; their ``index`` counts from 1.
    frequency : uint16 ``[3 * classes, 256]``, see :class:`cachegen_rag.kernels.reference.SymbolModels`.
    context : uint8 ``[classes, 2]``, thresholds of the context.
    shrink : float32 ``[classes, 2]``, where inside its interval a magnitude of 1, and of more, is reconstructed.
    threshold : float32 ``[classes, 2]``, from which size on a value becomes 1, and how the rest is rounded up. Used
        by the encoder only.
    """

    shape: KVShape
    fingerprint: bytes
    sinks: int
    default_level: int
    levels: tuple[Level, ...]
    frequency: NDArray[np.uint16]
    context: NDArray[np.uint8]
    shrink: NDArray[np.float32]
    threshold: NDArray[np.float32]
    blocks: tuple[Block, ...]
    importance: Importance
    _bytes: bytes | None = field(default=None, repr=False)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) of the profile's bytes."""
        return content_hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Serialize; the same profile always gives the same bytes."""
        if self._bytes is not None:
            return self._bytes
        s = self.shape
        out = io.BytesIO()
        out.write(
            _HEAD.pack(
                MAGIC, VERSION, self.sinks, self.default_level, s.layers, s.kv_heads, s.key_dim, s.value_dim,
                len(self.blocks), self.fingerprint,
            )
        )  # fmt: skip
        out.write(bytes([len(self.levels)]))
        for level in self.levels:
            out.write(_LEVEL.pack(level.step, level.kl, level.bits))
        for array, dtype in ((self.context, "u1"), (self.shrink, "<f4"), (self.threshold, "<f4")):
            out.write(np.asarray(array).astype(dtype).tobytes())
        for row in self.frequency:
            signed = np.flatnonzero(np.roll(row, 128)) - 128
            first, last = int(signed[0]), int(signed[-1])
            out.write(struct.pack("<bb", first, last))
            out.write(np.roll(row, 128)[first + 128 : last + 129].astype("<u2").tobytes())
        for block in self.blocks:
            out.write(_BLOCK.pack(len(block.cells), block.joint))
            for cell in block.cells:
                out.write(_CELL.pack(cell.layer, cell.is_value, 0, cell.head, cell.heads))
                out.write(cell.mean.astype("<f4").tobytes() + cell.unit.astype("<f4").tobytes())
                out.write(cell.basis.tobytes())
            out.write(block.joint_unit.astype("<f4").tobytes() + block.joint_basis.tobytes())
            out.write(block.scale.astype("<i2").tobytes())
        for weights in (*self.importance.channels, self.importance.combine):
            out.write(weights.astype("<f4").tobytes())
        body = out.getvalue()
        return body + struct.pack("<I", google_crc32c.value(body))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Profile:
        """Parse and check everything. Raises ProfileError, with what is wrong, for anything that is no profile."""
        data = bytes(data) if len(data) <= MAX_PROFILE_BYTES else b""
        if len(data) < _HEAD.size + 5 or data[:8] != MAGIC:
            raise ProfileError(f"not a codec profile (it must begin with {MAGIC!r} and have at most 64 MiB)")
        version = int.from_bytes(data[8:10], "little")
        if version != VERSION:
            raise ProfileError(f"profile of format version {version}; this package reads version {VERSION}")
        if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise ProfileError(
                "the profile's checksum does not hold: it is damaged or cut; fetch or calibrate it again"
            )
        try:
            return _parse(_Reader(data[:-4]), data)
        except (ValueError, struct.error, OverflowError) as error:
            raise ProfileError(f"malformed profile: {error}") from None


class _Reader:
    """Reads arrays from bytes, checking that they are there before anything is allocated."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def array(self, dtype: str, *shape: int) -> NDArray[Any]:
        count = int(np.prod(shape, dtype=np.int64))
        if count * np.dtype(dtype).itemsize > len(self._data) - self._at:
            raise ValueError(f"an array of {count} x {dtype} does not fit the {len(self._data)} bytes")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += array.nbytes
        return array.astype(np.dtype(dtype).newbyteorder("=")).reshape(shape)

    def finite(self, *shape: int) -> NDArray[np.float32]:
        array = self.array("<f4", *shape)
        if not np.isfinite(array).all():
            raise ValueError("a number is not finite")
        return array

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def _within(what: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"{what} = {value}, must be {low} to {high}")
    return value


def _parse(reader: _Reader, data: bytes) -> Profile:
    _, _, sinks, default, layers, kv_heads, key_dim, value_dim, n_blocks, fingerprint = reader.unpack(_HEAD)
    shape = KVShape(layers, kv_heads, key_dim, value_dim)
    for name in ("layers", "kv_heads", "key_dim", "value_dim"):
        _within(name, getattr(shape, name), 1, 4096)
    _within("sinks", sinks, 0, MAX_SINKS)
    _within("blocks", n_blocks, 1, MAX_BLOCKS)
    n_levels = _within("levels", int(reader.array("u1", 1)[0]), 1, MAX_LEVELS)
    _within("default level", default, 1, n_levels)
    levels = []
    for index in range(1, n_levels + 1):
        step, kl, bits = reader.unpack(_LEVEL)
        _within("step", step, -MAX_STEP, MAX_STEP)
        if not (0 <= kl < 1e6 and 0 <= bits < 1e3):
            raise ValueError(f"level {index} expects KL {kl} and {bits} bits")
        levels.append(Level(index, kl, bits, step))
    context = reader.array("u1", CLASSES, 2)
    shrink, threshold = reader.finite(CLASSES, 2), reader.finite(CLASSES, 2)
    frequency = np.zeros((MODELS, 256), np.uint16)
    for row in frequency:
        first, last = (int(v) for v in reader.array("i1", 2))
        _within("last symbol", last, first, 127)
        row[np.arange(first, last + 1) & 0xFF] = reader.array("<u2", last - first + 1)
    if (
        np.any(frequency.sum(1, dtype=np.int64) != SLOTS)
        or np.any(frequency >= SLOTS)
        or np.any(frequency[:, 128] == 0)
    ):
        raise ValueError("frequencies of a symbol model do not sum to 4096, or it lacks the escape")
    blocks = tuple(_parse_block(reader, shape) for _ in range(n_blocks))
    channels = tuple(reader.finite(b.components + 1) for b in blocks)
    importance = Importance(channels, reader.finite(n_blocks, n_blocks))
    reader.end()
    _check_cover(blocks, shape)
    return Profile(
        shape,
        fingerprint,
        sinks,
        default,
        tuple(levels),
        frequency,
        context,
        shrink,
        threshold,
        blocks,
        importance,
        data,
    )


def _parse_block(reader: _Reader, shape: KVShape) -> Block:
    n_cells, joint = reader.unpack(_BLOCK)
    _within("cells of a block", n_cells, 1, MAX_CELLS)
    _within("joint components", n_cells * joint, 0, MAX_JOINT)
    cells = []
    for _ in range(n_cells):
        layer, is_value, reserved, head, heads = reader.unpack(_CELL)
        _within("layer", layer, 0, shape.layers - 1)
        _within("kind", is_value, 0, 1)
        _within("reserved byte", reserved, 0, 0)
        _within("heads of a cell", heads, 1, shape.kv_heads - head)
        channels = _within("channels", heads * (shape.value_dim if is_value else shape.key_dim), 1, MAX_CELL_CHANNELS)
        _within("joint components", joint, 0, channels)
        mean, unit = reader.finite(channels), reader.finite(channels)
        cells.append(Cell(layer, bool(is_value), head, heads, mean, unit, reader.array("i1", channels, channels)))
    width = n_cells * joint
    joint_unit, joint_basis = reader.finite(width), reader.array("i1", width, width)
    block = Block(tuple(cells), joint, joint_unit, joint_basis, reader.array("<i2", sum(c.channels for c in cells)))
    ends = np.cumsum([width, *(c.channels - joint for c in cells)])
    for part in np.split(block.scale.astype(np.int64), ends[:-1]):
        if np.any(np.diff(part) > 0):
            raise ValueError("scales of a block are not in order")
    return block


def _check_cover(blocks: tuple[Block, ...], shape: KVShape) -> None:
    """Every head of every layer, keys and values, in exactly one cell."""
    seen = np.zeros((shape.layers, 2, shape.kv_heads), np.int64)
    for block in blocks:
        for cell in block.cells:
            seen[cell.layer, int(cell.is_value), cell.head : cell.head + cell.heads] += 1
    if np.any(seen != 1):
        raise ValueError("the cells do not cover every head of every layer exactly once")


def family(fingerprint: ModelFingerprint) -> bytes:
    """What a profile belongs to, as 32 bytes: tokenizer, shape and rotation.

    Not the weights: a profile fits every quantization of a model, and a wrong one costs bits, never correctness.
    """
    identity = [fingerprint.tokenizer, fingerprint.shape, list(fingerprint.rope.identity().inv_freq)]
    return hashlib.sha256(b"cachegen-rag family 2" + canonical_bytes(identity)).digest()


def shipped_profile(fingerprint: ModelFingerprint) -> Profile | None:
    """The profile that ships with this package for a model, or None."""
    path = files("cachegen_rag") / "data" / "profiles" / f"{family(fingerprint).hex()[:16]}.cgp"
    return Profile.from_bytes(path.read_bytes()) if path.is_file() else None
