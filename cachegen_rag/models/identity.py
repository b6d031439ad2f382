"""The identity of a model file, the same for every engine that loads it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from cachegen_rag.errors import ModelLoadError
from cachegen_rag.fingerprint import canonical_bytes

_BLOCK = 1 << 22


def file_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 (64 hex digits) of the whole file.

    A file is read once per process as long as its path, size and modification time stay the same.

    Raises
    ------
    ModelLoadError
        The file cannot be read.
    """
    try:
        resolved = Path(path).resolve(strict=True)
        status = resolved.stat()
        return _hash(str(resolved), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ModelLoadError(f"cannot read the model file {os.fspath(path)}: {error.strerror or error}") from error


@lru_cache(maxsize=64)
def _hash(path: str, size: int, modified: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def tokenizer_hash(tokens: Iterable[bytes]) -> str:
    """SHA-256 (64 hex digits) of a vocabulary: the tokens' own bytes in the order of their ids."""
    return hashlib.sha256(canonical_bytes(list(tokens))).hexdigest()
