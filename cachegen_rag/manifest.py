"""The manifest: which chunks and levels of a document are stored, and under which names. SPEC.md is normative.

A manifest is stored under the document's content key and names every bitstream by the SHA-256 of its bytes. It holds
hashes, never URLs: where an object comes from is the reader's business, never the writer's.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import google_crc32c

from cachegen_rag.bitstream import (
    ALIGNMENT,
    MAX_BITSTREAM_BYTES,
    MAX_TOKENS,
    Buffer,
    check_header_crc,
    check_magic,
    check_zero,
    crc32c,
)
from cachegen_rag.errors import (
    CorruptBitstreamError,
    EncodeError,
    FingerprintMismatchError,
    TruncatedBitstreamError,
)

MAGIC = b"\x89CGM\r\n\x1a\n"
VERSION = 1

MAX_MANIFEST_BYTES = 1 << 22
MAX_DOCUMENT_TOKENS = 1 << 24
MAX_CHUNKS = 1 << 16
MAX_LEVELS = 256
MAX_SEGMENTS = 256

_FIXED = struct.Struct("<8sHHI32s32s32sIIII")
_CHUNK = struct.Struct("<IHH")
_LEVEL = struct.Struct("<BBHI")
_SEGMENT = struct.Struct("<32sII")
_CRC = struct.Struct("<I")
_F32 = struct.Struct("<f")
_KL_UNKNOWN = 0x7FC00000
"""The one NaN that stands for "not measured"."""


@dataclass(frozen=True)
class Segment:
    """One stored object: ``sha256`` (64 hex digits) names it, ``length`` is its bytes, ``crc32c`` a quick check."""

    sha256: str
    length: int
    crc32c: int

    @staticmethod
    def of(data: Buffer) -> Segment:
        """The segment that describes these bytes."""
        view = memoryview(data).cast("B")
        return Segment(hashlib.sha256(view).hexdigest(), len(view), crc32c(view))

    def verify(self, data: Buffer, *, sha256: bool = True) -> None:
        """Check that ``data`` is this object. ``sha256=False`` checks length and CRC32C only.

        Raises TruncatedBitstreamError if bytes are missing, CorruptBitstreamError if they differ.
        """
        view = memoryview(data).cast("B")
        if len(view) < self.length:
            raise TruncatedBitstreamError(f"{len(view)} bytes of object {self.sha256[:12]}, which has {self.length}")
        if len(view) > self.length:
            raise CorruptBitstreamError(f"{len(view)} bytes of object {self.sha256[:12]}, which has {self.length}")
        if crc32c(view) != self.crc32c or (sha256 and hashlib.sha256(view).hexdigest() != self.sha256):
            raise CorruptBitstreamError(f"the bytes of object {self.sha256[:12]} are not those that were stored")


@dataclass(frozen=True)
class Level:
    """One level of a chunk: its segments in decoding order. ``expected_kl`` in nats per token; None: not measured."""

    level: int
    expected_kl: float | None
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Bytes to fetch for this level."""
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True)
class Chunk:
    """Document positions ``start`` to ``stop``, encoded at one or more levels (strictly increasing)."""

    start: int
    stop: int
    levels: tuple[Level, ...]

    def level(self, level: int) -> Level:
        """The chunk's entry for ``level``. Raises KeyError if it is not stored."""
        for entry in self.levels:
            if entry.level == level:
                return entry
        raise KeyError(level)


@dataclass(frozen=True)
class Manifest:
    """What is stored of a document.

    key : 64 hex digits, the content key it is stored under (see :func:`cachegen_rag.fingerprint.document_key`).
    fingerprint : 32 bytes, the model's. profile : 64 hex digits, the codec profile's.
    tokens : of the whole document. chunks : cover positions 0 to ``tokens`` in order, without holes.
    """

    key: str
    fingerprint: bytes
    profile: str
    tokens: int
    chunks: tuple[Chunk, ...]

    def segments(self) -> Iterator[Segment]:
        """Every stored object of the document."""
        for chunk in self.chunks:
            for level in chunk.levels:
                yield from level.segments

    def expect(
        self, *, key: str | None = None, fingerprint: bytes | None = None, profile: str | None = None
    ) -> Manifest:
        """Return self if it describes this key, model and profile; raise FingerprintMismatchError if not."""
        if key is not None and key != self.key:
            raise FingerprintMismatchError(f"the manifest is of document {self.key[:12]}, not of {key[:12]}")
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise FingerprintMismatchError("the manifest belongs to another model")
        if profile is not None and profile != self.profile:
            raise FingerprintMismatchError(f"the manifest needs profile {self.profile[:12]}, not {profile[:12]}")
        return self

    def to_bytes(self) -> bytes:
        """Serialize. Raises EncodeError if a field is outside the format's limits."""
        try:
            check_chunks(self.tokens, self.chunks)
            return self._pack()
        except (CorruptBitstreamError, struct.error, ValueError, TypeError, OverflowError) as error:
            raise EncodeError(f"the document does not fit the manifest format: {error}") from None

    def _pack(self) -> bytes:
        digests = [bytes.fromhex(self.key), self.fingerprint, bytes.fromhex(self.profile)]
        if any(len(digest) != 32 for digest in digests):
            raise ValueError("key, fingerprint and profile must have 32 bytes each")
        levels = [level for chunk in self.chunks for level in chunk.levels]
        segments = [segment for level in levels for segment in level.segments]
        body = b"".join(
            [_CHUNK.pack(chunk.stop - chunk.start, len(chunk.levels), 0) for chunk in self.chunks]
            + [_LEVEL.pack(level.level, 0, len(level.segments), _kl_bits(level.expected_kl)) for level in levels]
            + [_SEGMENT.pack(bytes.fromhex(s.sha256), s.length, s.crc32c) for s in segments]
        )
        total = _FIXED.size + len(body) + _CRC.size
        total += -total % ALIGNMENT
        if total > MAX_MANIFEST_BYTES:
            raise ValueError(f"{total} bytes, at most {MAX_MANIFEST_BYTES}")
        data = _FIXED.pack(
            MAGIC, VERSION, 0, total, *digests, self.tokens, len(self.chunks), len(levels), len(segments)
        )  # fmt: skip
        data += body
        data += bytes(total - _CRC.size - len(data))
        return data + _CRC.pack(google_crc32c.value(data))

    @staticmethod
    def from_bytes(data: Buffer) -> Manifest:
        """Parse and verify a manifest.

        Raises TruncatedBitstreamError, CorruptBitstreamError or UnsupportedVersionError.
        """
        view = memoryview(data).cast("B")
        check_magic(view, MAGIC, VERSION, "manifest")
        if len(view) < _FIXED.size:
            raise TruncatedBitstreamError(f"{len(view)} bytes, the fixed header needs {_FIXED.size}")
        (_, _, reserved, total, key, fingerprint, profile, tokens, n_chunks, n_levels, n_segments) = (
            _FIXED.unpack_from(view)
        )  # fmt: skip
        check_header_crc(view, total, MAX_MANIFEST_BYTES, _FIXED.size)
        if len(view) != total:
            raise CorruptBitstreamError(f"{len(view) - total} bytes follow the manifest")
        if reserved:
            raise CorruptBitstreamError(f"reserved field is {reserved}, must be 0")
        used = _FIXED.size + _CHUNK.size * n_chunks + _LEVEL.size * n_levels + _SEGMENT.size * n_segments + _CRC.size
        if total != used + -used % ALIGNMENT:
            raise CorruptBitstreamError(f"manifest of {total} bytes, its tables need {used}")
        at = _FIXED.size
        chunk_rows = list(_CHUNK.iter_unpack(view[at : (at := at + _CHUNK.size * n_chunks)]))
        level_rows = list(_LEVEL.iter_unpack(view[at : (at := at + _LEVEL.size * n_levels)]))
        segment_rows = list(_SEGMENT.iter_unpack(view[at : (at := at + _SEGMENT.size * n_segments)]))
        check_zero(view[at : total - _CRC.size], "manifest padding")
        if sum(row[1] for row in chunk_rows) != n_levels or sum(row[2] for row in level_rows) != n_segments:
            raise CorruptBitstreamError("the counts of levels and segments do not add up")
        if any(row[2] for row in chunk_rows) or any(row[1] for row in level_rows):
            raise CorruptBitstreamError("a reserved field is not 0")
        segments = iter([Segment(sha.hex(), length, crc) for sha, length, crc in segment_rows])
        levels = iter(
            [Level(level, _kl(bits), tuple(next(segments) for _ in range(n))) for level, _, n, bits in level_rows]
        )
        stops = accumulate(row[0] for row in chunk_rows)
        chunks = tuple(
            Chunk(stop - length, stop, tuple(next(levels) for _ in range(n)))
            for stop, (length, n, _) in zip(stops, chunk_rows, strict=True)
        )
        check_chunks(tokens, chunks)
        return Manifest(key.hex(), fingerprint, profile.hex(), tokens, chunks)


def check_chunks(tokens: int, chunks: tuple[Chunk, ...]) -> None:
    """Raise CorruptBitstreamError unless the chunks cover the document and lie within the format's limits."""
    _within("tokens", tokens, MAX_DOCUMENT_TOKENS)
    _within("chunks", len(chunks), MAX_CHUNKS)
    at = 0
    for chunk in chunks:
        if chunk.start != at:
            raise CorruptBitstreamError(f"a chunk begins at {chunk.start}, the one before ends at {at}")
        _within("tokens of a chunk", chunk.stop - chunk.start, MAX_TOKENS)
        _within("levels of a chunk", len(chunk.levels), MAX_LEVELS)
        if any(b.level <= a.level for a, b in pairwise(chunk.levels)):
            raise CorruptBitstreamError("the levels of a chunk are not strictly increasing")
        for level in chunk.levels:
            _within("segments of a level", len(level.segments), MAX_SEGMENTS)
            for segment in level.segments:
                _within("bytes of a segment", segment.length, MAX_BITSTREAM_BYTES)
                if len(segment.sha256) != 64:
                    raise CorruptBitstreamError(f"{segment.sha256!r:.80} is not a SHA-256")
        at = chunk.stop
    if at != tokens:
        raise CorruptBitstreamError(f"the chunks cover {at} tokens, the document has {tokens}")


def _within(what: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise CorruptBitstreamError(f"{what} = {value}, must be 1 to {limit}")


def _kl_bits(value: float | None) -> int:
    if value is None:
        return _KL_UNKNOWN
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"expected KL {value} is not a finite number from 0")
    return int.from_bytes(_F32.pack(value), "little")


def _kl(bits: int) -> float | None:
    if bits == _KL_UNKNOWN:
        return None
    value: float = _F32.unpack(bits.to_bytes(4, "little"))[0]
    if not (math.isfinite(value) and bits < 0x80000000):
        raise CorruptBitstreamError(f"expected KL {value} is not a finite number from 0")
    return value
