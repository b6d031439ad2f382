"""Which document ids refer to which text: a small SQLite table with reference counts by content, never by id."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

from cachegen_rag.errors import StoreUnavailableError


def text_key(text: str) -> str:
    """The identity of a text (SHA-256): metadata and id play no part."""
    return hashlib.sha256(text.encode()).hexdigest()


class References:
    """Document ids and the texts they refer to. Thread-safe; in memory, or in a file that outlives the process.

    Raises StoreUnavailableError if the file cannot be opened or is no such table.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                str(path) if path is not None else ":memory:", check_same_thread=False, timeout=30
            )
            with self._db:
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS refs (id TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID"
                )
                self._db.execute("CREATE INDEX IF NOT EXISTS refs_text ON refs (text)")
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"cannot open the table of references {path}: {error}") from error

    def assign(self, entries: Iterable[tuple[str, str]]) -> set[str]:
        """Let each id refer to its text key. Returns the keys that nothing refers to any more."""
        with self._lock, self._db:
            entries = list(entries)
            old = self._keys([id for id, _ in entries])
            self._db.executemany("INSERT OR REPLACE INTO refs VALUES (?, ?)", entries)
            return self._unused(old)

    def drop(self, ids: Iterable[str]) -> set[str]:
        """Forget these ids. Returns the keys that nothing refers to any more."""
        with self._lock, self._db:
            ids = list(ids)
            old = self._keys(ids)
            self._db.executemany("DELETE FROM refs WHERE id = ?", [(id,) for id in ids])
            return self._unused(old)

    def ids(self) -> list[str]:
        """All ids."""
        with self._lock:
            return [id for (id,) in self._db.execute("SELECT id FROM refs")]

    def count(self, key: str) -> int:
        """How many ids refer to this text."""
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM refs WHERE text = ?", (key,)).fetchone()[0])

    def close(self) -> None:
        """Close the table. Idempotent."""
        with self._lock:
            self._db.close()

    def _keys(self, ids: list[str]) -> set[str]:
        found = (self._db.execute("SELECT text FROM refs WHERE id = ?", (id,)).fetchone() for id in ids)
        return {row[0] for row in found if row is not None}

    def _unused(self, keys: set[str]) -> set[str]:
        return {
            k for k in keys if self._db.execute("SELECT 1 FROM refs WHERE text = ? LIMIT 1", (k,)).fetchone() is None
        }
