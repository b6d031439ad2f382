"""Identity: which model made a KV, and which tokens it is of. SHA-256 over a canonical encoding.

The encoding is ours (tag, length, bytes), never ``repr`` or ``hash()``: it is the same in every process and on
every machine. A change of any field is a different identity, so a KV of another model is never spliced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachegen_rag.kv import KVShape
from cachegen_rag.rope import RopeSpec


def canonical_bytes(value: object) -> bytes:
    """Encode None, bool, int, float, str, bytes, sequences and dataclasses of these, without ambiguity."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        raw = str(value).encode()
        return b"i" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        raw = value.encode()
        return b"s" + struct.pack("<Q", len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + struct.pack("<Q", len(value)) + value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return b"D" + canonical_bytes([part for pair in fields for part in pair])
    if isinstance(value, (list, tuple)):
        return b"l" + struct.pack("<Q", len(value)) + b"".join(canonical_bytes(item) for item in value)
    raise TypeError(f"no canonical encoding for {type(value).__name__}")


@dataclass(frozen=True)
class ModelFingerprint:
    """Everything that decides what a model's KV means. Two engines with equal fingerprints share stored KV.

    ``context`` is the SHA-256 of the token ids that documents are computed behind (see ``cachegen_rag.warm``).
    ``runtime`` is left out on purpose where two engines are to share documents; ``kv_dtype`` is that of the
    engine's own cache. ``rope`` is given with ``layout="interleaved"`` by every engine: the stored KV is canonical.
    """

    weights: str
    tokenizer: str
    shape: KVShape
    rope: RopeSpec
    kv_dtype: str = "f16"
    adapters: tuple[str, ...] = ()
    context: str = ""
    runtime: str = ""

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the canonical encoding."""
        identity = dataclasses.replace(self, rope=self.rope.identity())
        return hashlib.sha256(b"cachegen-rag fingerprint 2" + canonical_bytes(identity)).digest()


def document_key(
    fingerprint: bytes, token_ids: Sequence[int] | np.ndarray, *, profile: str = "", salt: str = ""
) -> str:
    """The content key (64 hex digits) of a document: what its manifest is stored under.

    ``salt`` keeps tenants of one store apart. The document's ids or metadata play no part.
    """
    ids = np.asarray(token_ids, dtype="<i4").tobytes()
    return hashlib.sha256(b"cachegen-rag key 1" + canonical_bytes([fingerprint, profile, salt, ids])).hexdigest()


def content_hash(data: bytes | memoryview) -> str:
    """SHA-256 (64 hex digits) of stored bytes: the name of an immutable object."""
    return hashlib.sha256(data).hexdigest()
