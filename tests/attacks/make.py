"""Write the golden objects and the malformed ones. Run it from anywhere: ``python tests/attacks/make.py``.

It follows SPEC.md with a packer of its own, so that writer and reader of the package are checked against a second
reading of the text. Every field can be overridden; checksums are computed last, over whatever was put in, so a
malformed file is wrong in the one thing it is named for.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "format"
FINGERPRINT = hashlib.sha256(b"fingerprint").digest()
PROFILE = hashlib.sha256(b"profile").digest()
KEY = hashlib.sha256(b"key").digest()


def pad(size: int) -> bytes:
    return bytes(-size % 8)


def finish(head: bytes, *, crc: int | None = None, padding: bytes | None = None) -> bytes:
    """Pad to a multiple of 8 less 4 and append the checksum."""
    head += pad(len(head) + 4) if padding is None else padding
    return head + struct.pack("<I", google_crc32c.value(head) if crc is None else crc)


def chunk(
    *,
    magic: bytes = b"\x89CGB\r\n\x1a\n",
    version: int = 1,
    level: int = 2,
    segment: int = 0,
    header_bytes: int | None = None,
    shape: tuple[int, int, int, int] = (3, 2, 4, 6),
    tokens: int | None = None,
    runs: tuple[tuple[int, int], ...] = ((0, 3),),
    n_runs: int | None = None,
    ids: tuple[int, ...] = (7, 300, 49151),
    id_width: int = 2,
    coding: int = 1,
    sections: tuple[tuple[int, int, bytes], ...] = ((1, 0, b"thirteen byte"), (2, 0, b""), (2, 1, b"\xff" * 8)),
    n_sections: int | None = None,
    table: Callable[[int, int, bytes], tuple[int, int, int, int]] | None = None,
    header_crc: int | None = None,
    header_padding: bytes | None = None,
    section_padding: bytes | None = None,
    tail: bytes = b"",
) -> bytes:
    def entry(kind: int, index: int, data: bytes) -> tuple[int, int, int, int]:
        return kind, index, len(data), google_crc32c.value(data)

    body = b"".join(struct.pack("<II", *run) for run in runs)
    body += b"".join(i.to_bytes(4, "little")[:id_width] for i in ids)
    body += b"".join(struct.pack("<HHII", *(table or entry)(*section)) for section in sections)
    size = 100 + len(body) + 4
    size += -size % 8 if header_padding is None else len(header_padding)
    fixed = struct.pack(
        "<8sHBBI32s32sHHHHIIHBB",
        magic, version, level, segment, size if header_bytes is None else header_bytes, FINGERPRINT, PROFILE, *shape,
        len(ids) if tokens is None else tokens, len(runs) if n_runs is None else n_runs,
        len(sections) if n_sections is None else n_sections, id_width, coding,
    )  # fmt: skip
    data = finish(fixed + body, crc=header_crc, padding=header_padding)
    for _, _, content in sections:
        data += content + (pad(len(content)) if section_padding is None else section_padding[: -len(content) % 8])
    return data + tail


SEGMENT = (hashlib.sha256(b"object").digest(), 6, google_crc32c.value(b"object"))


def manifest(
    *,
    magic: bytes = b"\x89CGM\r\n\x1a\n",
    version: int = 1,
    reserved: int = 0,
    total: int | None = None,
    tokens: int | None = None,
    chunks: tuple[tuple[int, int, int], ...] = ((200, 2, 0), (100, 1, 0)),
    levels: tuple[tuple[int, int, int, bytes], ...] = (
        (0, 0, 1, struct.pack("<f", 0.0078125)),
        (3, 0, 2, struct.pack("<I", 0x7FC00000)),
        (1, 0, 1, struct.pack("<f", 0.0)),
    ),
    segments: tuple[tuple[bytes, int, int], ...] = (SEGMENT,) * 4,
    counts: tuple[int, int, int] | None = None,
    crc: int | None = None,
    padding: bytes | None = None,
    tail: bytes = b"",
) -> bytes:
    body = b"".join(struct.pack("<IHH", *c) for c in chunks)
    body += b"".join(struct.pack("<BBH4s", *v) for v in levels)
    body += b"".join(struct.pack("<32sII", *s) for s in segments)
    size = 128 + len(body) + 4
    size += -size % 8 if padding is None else len(padding)
    fixed = struct.pack(
        "<8sHHI32s32s32sIIII",
        magic, version, reserved, size if total is None else total, KEY, FINGERPRINT, PROFILE,
        sum(c[0] for c in chunks) if tokens is None else tokens,
        *(counts or (len(chunks), len(levels), len(segments))),
    )  # fmt: skip
    return finish(fixed + body, crc=crc, padding=padding) + tail


def golden() -> Iterator[tuple[str, bytes]]:
    """Sound objects; the values they decode to are in tests/test_bitstream.py and tests/test_manifest.py."""
    yield "chunk.cgb", chunk()
    yield "pruned.cgb", chunk(runs=((0, 1), (2, 1), (1000, 2)), ids=(0, 1, 2, 0), id_width=1, sections=())
    yield "wide.cgb", chunk(runs=((2**31 - 1, 1),), ids=(2**31 - 1,), id_width=4, level=255, segment=1, coding=255)
    yield "document.cgm", manifest()


def flip(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def attacks() -> Iterator[tuple[str, bytes, str, str]]:
    """(name, bytes, error, words of its message)."""
    cut, bad, new = "TruncatedBitstreamError", "CorruptBitstreamError", "UnsupportedVersionError"
    whole, nan = chunk(), struct.pack("<f", float("nan"))
    header = struct.unpack_from("<I", whole, 12)[0]
    # Bitstreams.
    yield "empty.cgb", b"", cut, "magic"
    yield "magic-only.cgb", whole[:8], cut, "magic"
    yield "text-mode-transfer.cgb", whole.replace(b"\r\n", b"\n"), bad, "not a bitstream"
    yield "manifest-as-bitstream.cgb", manifest(), bad, "not a bitstream"
    yield "pickle.cgb", b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", bad, "not a bitstream"
    yield "version-0.cgb", chunk(version=0), bad, "version 0"
    yield "version-2.cgb", chunk(version=2), new, "version 2"
    yield "version-65535.cgb", chunk(version=65535), new, "version 65535"
    yield "fixed-header-cut.cgb", whole[:99], cut, "fixed header"
    yield "header-cut.cgb", whole[: header - 1], cut, "header"
    yield "header-bytes-0.cgb", chunk(header_bytes=0), bad, "header of 0 bytes"
    yield "header-bytes-unaligned.cgb", chunk(header_bytes=header + 1), bad, "multiple of 8"
    yield "header-bytes-4-gib.cgb", chunk(header_bytes=2**32 - 8), bad, "header of 4294967288 bytes"
    yield "header-bytes-over-limit.cgb", chunk(header_bytes=2**21 + 8), bad, "header of 2097160 bytes"
    yield "header-bytes-too-many.cgb", chunk(header_padding=bytes(14)), bad, "its tables need"
    yield "header-crc-zero.cgb", chunk(header_crc=0), bad, "header's checksum"
    yield "header-crc-of-crc32.cgb", chunk(header_crc=0xCBF43926), bad, "header's checksum"
    yield "fingerprint-flipped.cgb", flip(whole, 20), bad, "header's checksum"
    yield "header-padding-not-zero.cgb", chunk(header_padding=bytes(5) + b"\x01"), bad, "header padding"
    yield "layers-0.cgb", chunk(shape=(0, 2, 4, 6)), bad, "layers = 0"
    yield "layers-bomb.cgb", chunk(shape=(65535, 2, 4, 6)), bad, "layers = 65535"
    yield "heads-0.cgb", chunk(shape=(3, 0, 4, 6)), bad, "kv_heads = 0"
    yield "heads-bomb.cgb", chunk(shape=(3, 65535, 4, 6)), bad, "kv_heads = 65535"
    yield "key-dim-0.cgb", chunk(shape=(3, 2, 0, 6)), bad, "key_dim = 0"
    yield "key-dim-bomb.cgb", chunk(shape=(3, 2, 65535, 6)), bad, "key_dim = 65535"
    yield "value-dim-0.cgb", chunk(shape=(3, 2, 4, 0)), bad, "value_dim = 0"
    yield "value-dim-bomb.cgb", chunk(shape=(3, 2, 4, 65535)), bad, "value_dim = 65535"
    yield "elements-per-token-bomb.cgb", chunk(shape=(1024, 1024, 4096, 4096)), bad, "elements per token"
    yield "tokens-0.cgb", chunk(ids=(), runs=(), id_width=1), bad, "tokens = 0"
    yield "tokens-bomb.cgb", chunk(tokens=2**32 - 1), bad, "tokens = 4294967295"
    yield "elements-bomb.cgb", chunk(shape=(1024, 8, 256, 256), tokens=65536), bad, "elements = 274877906944"
    yield "tokens-more-than-ids.cgb", chunk(tokens=7, runs=((0, 7),)), bad, "its tables need"
    yield "tokens-many-more-than-ids.cgb", chunk(tokens=65536, runs=((0, 65536),)), bad, "its tables need"
    yield "tokens-fewer-than-ids.cgb", chunk(tokens=1, runs=((0, 1),)), bad, "its tables need"
    yield "id-width-0.cgb", chunk(id_width=0), bad, "token ids of 0 bytes"
    yield "id-width-5.cgb", chunk(id_width=5), bad, "token ids of 5 bytes"
    yield "id-width-not-least.cgb", chunk(ids=(1, 2, 3)), bad, "fit in fewer"
    yield "id-negative.cgb", chunk(ids=(2**32 - 1, 0, 0), id_width=4), bad, "a token id exceeds"
    yield "runs-0.cgb", chunk(runs=()), bad, "runs of positions cover 0"
    yield "runs-more-than-tokens.cgb", chunk(n_runs=4), bad, "4 runs"
    yield "runs-bomb.cgb", chunk(n_runs=2**32 - 1), bad, "4294967295 runs"
    yield "run-of-0.cgb", chunk(runs=((0, 3), (9, 0))), bad, "runs of positions cover"
    yield "runs-too-short.cgb", chunk(runs=((0, 2),)), bad, "cover 2 tokens"
    yield "runs-too-long.cgb", chunk(runs=((0, 2**32 - 1),)), bad, "cover 4294967295 tokens"
    yield "runs-overlap.cgb", chunk(runs=((0, 2), (1, 1))), bad, "not maximal and increasing"
    yield "runs-decrease.cgb", chunk(runs=((5, 2), (0, 1))), bad, "not maximal and increasing"
    yield "runs-not-maximal.cgb", chunk(runs=((0, 2), (2, 1))), bad, "not maximal and increasing"
    yield "position-beyond-int32.cgb", chunk(runs=((2**31 - 2, 3),)), bad, "a position exceeds"
    yield "position-wraps.cgb", chunk(runs=((2**32 - 1, 3),)), bad, "a position exceeds"
    yield "sections-bomb.cgb", chunk(n_sections=65535), bad, "65535 sections"
    yield "sections-one-more.cgb", chunk(n_sections=4), bad, "its tables need"
    yield "sections-one-fewer.cgb", chunk(n_sections=2), bad, "its tables need"
    yield "sections-duplicate.cgb", chunk(sections=((1, 0, b"a"), (1, 0, b"b"))), bad, "strictly increasing"
    yield "sections-decrease.cgb", chunk(sections=((2, 0, b"a"), (1, 9, b"b"))), bad, "strictly increasing"
    yield "section-cut.cgb", whole[:-1], cut, "sections"
    yield "sections-missing.cgb", whole[:header], cut, "sections"
    yield "section-length-4-gib.cgb", chunk(table=lambda k, i, d: (k, i, 2**32 - 1, 0)), cut, "sections"
    yield "section-crc.cgb", chunk(table=lambda k, i, d: (k, i, len(d), 1)), bad, "checksum of section 1/0"
    yield "section-flipped.cgb", flip(whole, len(whole) - 1, 7), bad, "checksum of section 2/1"
    yield (
        "section-empty-crc.cgb",
        chunk(sections=((1, 0, b""),), table=lambda k, i, d: (k, i, 0, 1)),
        bad,
        "section 1/0",
    )
    yield (
        "section-padding-not-zero.cgb",
        chunk(section_padding=b"\x80\x00\x00\x00\x00\x00\x00"),
        bad,
        "padding of section",
    )
    yield "tail.cgb", chunk(tail=b"\x00"), bad, "1 bytes follow"
    yield "twice.cgb", whole + whole, bad, "follow the last section"
    # Manifests.
    good = manifest()
    yield "empty.cgm", b"", cut, "magic"
    yield "bitstream-as-manifest.cgm", whole, bad, "not a manifest"
    yield "json.cgm", b'{"chunks": [{"url": "http://169.254.169.254/"}]}', bad, "not a manifest"
    yield "version-0.cgm", manifest(version=0), bad, "version 0"
    yield "version-2.cgm", manifest(version=2), new, "version 2"
    yield "fixed-header-cut.cgm", good[:127], cut, "fixed header"
    yield "cut.cgm", good[:-1], cut, "header"
    yield "tail.cgm", manifest(tail=b"\n"), bad, "1 bytes follow"
    yield "reserved.cgm", manifest(reserved=1), bad, "reserved"
    yield "total-0.cgm", manifest(total=0), bad, "header of 0 bytes"
    yield "total-bomb.cgm", manifest(total=2**32 - 8), bad, "header of 4294967288 bytes"
    yield "total-too-many.cgm", manifest(padding=bytes(12)), bad, "its tables need"
    yield "crc.cgm", manifest(crc=0), bad, "checksum"
    yield "key-flipped.cgm", flip(good, 16), bad, "checksum"
    yield "padding-not-zero.cgm", manifest(padding=b"\x00\x00\x00\x01"), bad, "manifest padding"
    yield "tokens-0.cgm", manifest(tokens=0), bad, "tokens = 0"
    yield "tokens-bomb.cgm", manifest(tokens=2**32 - 1), bad, "tokens = 4294967295"
    yield "tokens-hole.cgm", manifest(tokens=301), bad, "cover 300 tokens"
    yield "no-chunks.cgm", manifest(chunks=(), levels=(), segments=(), tokens=5), bad, "chunks = 0"
    yield "chunks-bomb.cgm", manifest(counts=(2**32 - 1, 3, 4)), bad, "its tables need"
    yield "levels-bomb.cgm", manifest(counts=(2, 2**32 - 1, 4)), bad, "its tables need"
    yield "segments-bomb.cgm", manifest(counts=(2, 3, 2**32 - 1)), bad, "its tables need"
    yield "chunk-of-0.cgm", manifest(chunks=((0, 2, 0), (100, 1, 0))), bad, "tokens of a chunk = 0"
    yield "chunk-bomb.cgm", manifest(chunks=((65537, 2, 0), (100, 1, 0))), bad, "tokens of a chunk = 65537"
    yield "chunk-reserved.cgm", manifest(chunks=((200, 2, 1), (100, 1, 0))), bad, "reserved"
    yield "chunk-without-levels.cgm", manifest(chunks=((200, 3, 0), (100, 0, 0))), bad, "levels"
    yield "levels-do-not-add-up.cgm", manifest(chunks=((200, 2, 0), (100, 2, 0))), bad, "do not add up"
    zero = struct.pack("<f", 0)
    yield "level-twice.cgm", manifest(levels=((1, 0, 1, zero), (1, 0, 2, zero), (1, 0, 1, zero))), bad, "increasing"
    yield "level-reserved.cgm", manifest(levels=((0, 1, 1, zero), (3, 0, 2, zero), (1, 0, 1, zero))), bad, "reserved"
    yield "level-empty.cgm", manifest(levels=((0, 0, 0, zero), (3, 0, 3, zero), (1, 0, 1, zero))), bad, "segments of a"
    yield "segments-257.cgm", manifest(
        chunks=((200, 1, 0),), levels=((0, 0, 257, zero),), segments=(SEGMENT,) * 257
    ), bad, "segments of a level = 257"  # fmt: skip
    yield "segments-do-not-add-up.cgm", manifest(segments=(SEGMENT,) * 5), bad, "do not add up"
    for name, kl in (
        ("negative", struct.pack("<f", -0.5)), ("minus-zero", struct.pack("<f", -0.0)),
        ("infinite", struct.pack("<f", float("inf"))), ("other-nan", struct.pack("<I", 0xFFC00001)),
    ):  # fmt: skip
        yield f"kl-{name}.cgm", manifest(levels=((0, 0, 1, kl), (3, 0, 2, nan), (1, 0, 1, zero))), bad, "expected KL"
    yield "segment-of-0.cgm", manifest(segments=((SEGMENT[0], 0, 0),) * 4), bad, "bytes of a segment = 0"
    yield "segment-bomb.cgm", manifest(segments=((SEGMENT[0], 2**30 + 1, 0),) * 4), bad, "bytes of a segment"


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, data in golden():
        (GOLDEN / name).write_bytes(data)
    for old in (*HERE.glob("*.cgb"), *HERE.glob("*.cgm")):
        old.unlink()
    expected: dict[str, Any] = {}
    for number, (name, data, error, words) in enumerate(attacks(), 1):
        file = f"{number:03d}-{name}"
        (HERE / file).write_bytes(data)
        expected[file] = [error, words]
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{len(expected)} attacks")


if __name__ == "__main__":
    main()
