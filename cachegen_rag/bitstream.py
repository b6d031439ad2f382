"""The bitstream: one encoded chunk at one level, as bytes. SPEC.md is the normative text.

A bitstream carries who made it (fingerprint, profile), what it holds (shape, level, token ids, positions) and the
codec's output as opaque sections. This module knows bytes, not tensors, and opens neither files nor sockets: it can
be fuzzed with bytes alone. Nothing is allocated from a number in the input before that number has been checked
against a limit and against the bytes that are really there, and no section is handed out before its checksum held.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import (
    CorruptBitstreamError,
    EncodeError,
    FingerprintMismatchError,
    TruncatedBitstreamError,
    UnsupportedVersionError,
)
from cachegen_rag.kv import KVShape

Buffer = bytes | bytearray | memoryview

MAGIC = b"\x89CGB\r\n\x1a\n"
"""First eight bytes. Like PNG's: a transfer that alters text line ends or strips the high bit breaks it."""
VERSION = 1
ALIGNMENT = 8
"""Header and sections begin at multiples of this many bytes."""

MAX_BITSTREAM_BYTES = 1 << 30
MAX_HEADER_BYTES = 1 << 21
MAX_LAYERS = 1024
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_ELEMENTS_PER_TOKEN = 1 << 22
MAX_TOKENS = 1 << 16
MAX_ELEMENTS = 1 << 32
MAX_POSITION = (1 << 31) - 1
MAX_TOKEN_ID = (1 << 31) - 1
MAX_SECTIONS = 4096

_FIXED = struct.Struct("<8sHBBI32s32sHHHHIIHBB")
_SECTION = struct.Struct("<HHII")
_CRC = struct.Struct("<I")
_CRC_BLOCK = 1 << 20


@dataclass(frozen=True)
class Section:
    """One byte range of the codec's output. ``type`` and ``index`` (each 0..65535) name it, ``data`` is opaque."""

    type: int
    data: Buffer
    index: int = 0


@dataclass(frozen=True, eq=False)
class Bitstream:
    """One encoded chunk at one level.

    fingerprint : 32 bytes, ``ModelFingerprint.digest()`` of the model whose KV this is.
    profile : 64 lower-case hex digits, the SHA-256 that names the codec profile.
    level : 0..255, 0 is the finest.
    shape : of one token's KV.
    token_ids, positions : int32 ``[tokens]``; positions strictly increase and may have gaps (a pruned cache).
    sections : the codec's output, strictly increasing in ``(type, index)``.
    segment : 0 for a bitstream that decodes by itself, n for the n-th refinement of one.
    coding : 0..255, how the payload is coded; the codec's business (SPEC.md, 3).
    """

    fingerprint: bytes
    profile: str
    level: int
    shape: KVShape
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    sections: tuple[Section, ...]
    segment: int = 0
    coding: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def section(self, type: int, index: int = 0) -> memoryview:
        """The bytes of one section, without a copy. Raises CorruptBitstreamError if it is not there."""
        for section in self.sections:
            if section.type == type and section.index == index:
                return memoryview(section.data)
        raise CorruptBitstreamError(f"the bitstream has no section {type}/{index}; encode the document again")

    def expect(
        self,
        *,
        fingerprint: bytes | None = None,
        profile: str | None = None,
        shape: KVShape | None = None,
        token_ids: Any = None,
    ) -> Bitstream:
        """Return self if it was made for this model, profile, shape and text; raise FingerprintMismatchError if not."""
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise FingerprintMismatchError(
                f"the bitstream belongs to model {self.fingerprint.hex()[:12]}, not to {fingerprint.hex()[:12]}"
            )
        if profile is not None and profile != self.profile:
            raise FingerprintMismatchError(f"the bitstream needs profile {self.profile[:12]}, not {profile[:12]}")
        if shape is not None and shape != self.shape:
            raise FingerprintMismatchError(f"the bitstream has shape {self.shape}, the model {shape}")
        if token_ids is not None and not np.array_equal(self.token_ids, np.asarray(token_ids)):
            raise FingerprintMismatchError("the bitstream is of other token ids than those asked for")
        return self

    def to_bytes(self) -> bytes:
        """Serialize. Raises EncodeError if a field is outside the format's limits."""
        ids, positions = self._checked_arrays()
        runs = _runs(positions)
        id_width = max(1, (int(ids.max(initial=0)).bit_length() + 7) // 8)
        sections = [(s.type, s.index, bytes(s.data)) for s in self.sections]
        try:
            check_shape(self.shape, len(ids))
            if len(sections) > MAX_SECTIONS:
                raise CorruptBitstreamError(f"{len(sections)} sections, at most {MAX_SECTIONS}")
        except CorruptBitstreamError as error:
            raise EncodeError(f"the chunk does not fit the bitstream format: {error}") from None
        names = [(kind, index) for kind, index, _ in sections]
        if any(b <= a for a, b in pairwise(names)):
            raise EncodeError(f"sections must be strictly increasing in (type, index), got {names[:8]}")
        size = _FIXED.size + 8 * len(runs) + id_width * len(ids) + _SECTION.size * len(sections) + _CRC.size
        header_bytes = size + -size % ALIGNMENT
        total = header_bytes + sum(len(data) + -len(data) % ALIGNMENT for _, _, data in sections)
        if header_bytes > MAX_HEADER_BYTES or total > MAX_BITSTREAM_BYTES:
            raise EncodeError(
                f"{total} bytes with a header of {header_bytes} exceed the limits of the bitstream format"
            )
        try:
            head = _FIXED.pack(
                MAGIC, VERSION, self.level, self.segment, header_bytes, self.fingerprint, bytes.fromhex(self.profile),
                self.shape.layers, self.shape.kv_heads, self.shape.key_dim, self.shape.value_dim,
                len(ids), len(runs), len(sections), id_width, self.coding,
            )  # fmt: skip
            table = b"".join(
                _SECTION.pack(kind, index, len(data), google_crc32c.value(data)) for kind, index, data in sections
            )
        except (struct.error, ValueError, TypeError) as error:
            raise EncodeError(f"a field of the bitstream is out of range: {error}") from None
        if len(self.fingerprint) != 32 or len(self.profile) != 64:
            raise EncodeError("fingerprint must have 32 bytes and profile 64 hex digits")
        packed_ids = ids.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :id_width].tobytes()
        header = head + runs.astype("<u4").tobytes() + packed_ids + table
        header += bytes(header_bytes - _CRC.size - len(header))
        parts = [header, _CRC.pack(google_crc32c.value(header))]
        for _, _, data in sections:
            parts += [data, bytes(-len(data) % ALIGNMENT)]
        return b"".join(parts)

    def _checked_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, positions = np.asarray(self.token_ids, np.int64), np.asarray(self.positions, np.int64)
        if ids.ndim != 1 or ids.shape != positions.shape:
            raise EncodeError(f"token ids {ids.shape} and positions {positions.shape} must be of equal length")
        if np.any(ids < 0) or np.any(ids > MAX_TOKEN_ID):
            raise EncodeError("token ids must lie in 0 .. 2^31 - 1")
        if len(positions) and (positions[0] < 0 or positions[-1] > MAX_POSITION or np.any(np.diff(positions) <= 0)):
            raise EncodeError("positions must be non-negative, below 2^31 and strictly increasing")
        return ids, positions

    @staticmethod
    def from_bytes(data: Buffer) -> Bitstream:
        """Parse and verify everything: version, limits, header checksum, and the checksum of every section.

        Sections are views of ``data``, which must not change while they are used.

        Raises
        ------
        TruncatedBitstreamError, CorruptBitstreamError, UnsupportedVersionError
            Any single flipped bit and any cut is found here, before anything is decoded.
        """
        view = memoryview(data).cast("B")
        if len(view) > MAX_BITSTREAM_BYTES:
            raise CorruptBitstreamError(f"{len(view)} bytes, a bitstream has at most {MAX_BITSTREAM_BYTES}")
        check_magic(view, MAGIC, VERSION, "bitstream")
        _require(view, _FIXED.size, "fixed header")
        (_, _, level, segment, header_bytes, fingerprint, profile, layers, kv_heads, key_dim, value_dim,
         tokens, n_runs, n_sections, id_width, coding) = _FIXED.unpack_from(view)  # fmt: skip
        check_header_crc(view, header_bytes, MAX_HEADER_BYTES, _FIXED.size)
        # The checksum held, so what follows catches faulty or hostile writers rather than damage.
        shape = KVShape(layers, kv_heads, key_dim, value_dim)
        check_shape(shape, tokens)
        if not 1 <= id_width <= 4:
            raise CorruptBitstreamError(f"token ids of {id_width} bytes, must be 1 to 4")
        if n_runs > tokens:
            raise CorruptBitstreamError(f"{n_runs} runs of positions for {tokens} tokens")
        if n_sections > MAX_SECTIONS:
            raise CorruptBitstreamError(f"{n_sections} sections, at most {MAX_SECTIONS}")
        used = _FIXED.size + 8 * n_runs + id_width * tokens + _SECTION.size * n_sections + _CRC.size
        if header_bytes != used + -used % ALIGNMENT:
            raise CorruptBitstreamError(f"header of {header_bytes} bytes, its tables need {used}")
        at = _FIXED.size
        positions = _expand_runs(np.frombuffer(view, "<u4", 2 * n_runs, at).reshape(-1, 2).astype(np.int64), tokens)
        at += 8 * n_runs
        ids = _unpack_ids(np.frombuffer(view, np.uint8, id_width * tokens, at).reshape(tokens, id_width))
        at += id_width * tokens
        entries = [_SECTION.unpack_from(view, at + i * _SECTION.size) for i in range(n_sections)]
        at += n_sections * _SECTION.size
        check_zero(view[at : header_bytes - _CRC.size], "header padding")
        sections = _sections(view, header_bytes, entries)
        return Bitstream(fingerprint, profile.hex(), level, shape, ids, positions, sections, segment, coding)


def check_shape(shape: KVShape, tokens: int) -> None:
    """Raise CorruptBitstreamError unless shape and tokens lie within the format's limits."""
    for name, value, limit in (
        ("layers", shape.layers, MAX_LAYERS),
        ("kv_heads", shape.kv_heads, MAX_KV_HEADS),
        ("key_dim", shape.key_dim, MAX_HEAD_DIM),
        ("value_dim", shape.value_dim, MAX_HEAD_DIM),
        ("elements per token", shape.elements_per_token, MAX_ELEMENTS_PER_TOKEN),
        ("tokens", tokens, MAX_TOKENS),
        ("elements", tokens * shape.elements_per_token, MAX_ELEMENTS),
    ):
        if not 1 <= value <= limit:
            raise CorruptBitstreamError(f"{name} = {value}, must be 1 to {limit}")


def check_magic(view: memoryview, magic: bytes, version: int, what: str) -> None:
    """Check magic and version, the first ten bytes of every object of this format."""
    _require(view, len(magic) + 2, "magic and version")
    if view[: len(magic)] != magic:
        raise CorruptBitstreamError(f"not a {what}: it begins with {bytes(view[: len(magic)])!r}")
    found = int.from_bytes(view[len(magic) : len(magic) + 2], "little")
    if found == 0:
        raise CorruptBitstreamError("format version 0 does not exist")
    if found != version:
        raise UnsupportedVersionError(
            f"{what} of format version {found}; this package reads version {version}: upgrade it or encode again"
        )


def check_header_crc(view: memoryview, header_bytes: int, limit: int, least: int) -> None:
    """Check the length of a header that ends with its own CRC32C, then that checksum."""
    if header_bytes > limit or header_bytes < least + _CRC.size or header_bytes % ALIGNMENT:
        raise CorruptBitstreamError(f"header of {header_bytes} bytes; must be a multiple of {ALIGNMENT} up to {limit}")
    _require(view, header_bytes, "header")
    if crc32c(view[: header_bytes - _CRC.size]) != _CRC.unpack_from(view, header_bytes - _CRC.size)[0]:
        raise CorruptBitstreamError("the header's checksum does not hold")


def check_zero(view: memoryview, what: str) -> None:
    """Raise CorruptBitstreamError unless every byte is zero."""
    if any(view):
        raise CorruptBitstreamError(f"{what} is not zero")


def crc32c(view: memoryview) -> int:
    """CRC32C (Castagnoli) of the bytes. Block by block: the library takes ``bytes`` only, and copying is memory."""
    crc = 0
    for start in range(0, len(view), _CRC_BLOCK):
        crc = google_crc32c.extend(crc, bytes(view[start : start + _CRC_BLOCK]))
    return crc


def _require(view: memoryview, size: int, what: str) -> None:
    if len(view) < size:
        raise TruncatedBitstreamError(f"{len(view)} bytes, the {what} needs {size}")


def _sections(view: memoryview, at: int, entries: list[tuple[int, int, int, int]]) -> tuple[Section, ...]:
    """Check the section table against the bytes that are there, then every checksum."""
    if any(b[:2] <= a[:2] for a, b in pairwise(entries)):
        raise CorruptBitstreamError("the section table is not strictly increasing in (type, index)")
    end = at + sum(length + -length % ALIGNMENT for _, _, length, _ in entries)
    _require(view, end, "sections")
    if len(view) != end:
        raise CorruptBitstreamError(f"{len(view) - end} bytes follow the last section")
    sections = []
    for kind, index, length, crc in entries:
        data = view[at : at + length]
        if crc32c(data) != crc:
            raise CorruptBitstreamError(f"the checksum of section {kind}/{index} does not hold")
        at += length
        check_zero(view[at : at + -length % ALIGNMENT], f"padding of section {kind}/{index}")
        at += -length % ALIGNMENT
        sections.append(Section(kind, data, index))
    return tuple(sections)


def _runs(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Maximal runs ``[runs, 2]`` of consecutive positions: (first, length)."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return np.stack([positions[starts], np.diff(starts, append=len(positions))], axis=1)


def _expand_runs(runs: NDArray[np.int64], tokens: int) -> NDArray[np.int32]:
    first, length = runs[:, 0], runs[:, 1]
    if np.any(length == 0) or int(length.sum()) != tokens:
        raise CorruptBitstreamError(f"runs of positions cover {int(length.sum())} tokens, the chunk has {tokens}")
    if np.any(first[1:] <= (first + length)[:-1]):
        raise CorruptBitstreamError("runs of positions are not maximal and increasing")
    if int((first + length).max()) - 1 > MAX_POSITION:
        raise CorruptBitstreamError(f"a position exceeds {MAX_POSITION}")
    offsets = np.cumsum(length) - length
    positions: NDArray[np.int32] = (np.arange(tokens) + np.repeat(first - offsets, length)).astype(np.int32)
    return positions


def _unpack_ids(packed: NDArray[np.uint8]) -> NDArray[np.int32]:
    tokens, width = packed.shape
    if width > 1 and not packed[:, -1].any():
        raise CorruptBitstreamError(f"token ids stored in {width} bytes fit in fewer")
    wide = np.zeros((tokens, 4), np.uint8)
    wide[:, :width] = packed
    ids: NDArray[np.int32] = wide.view("<i4")[:, 0].astype(np.int32)
    if int(ids.min()) < 0:
        raise CorruptBitstreamError(f"a token id exceeds {MAX_TOKEN_ID}")
    return ids
