"""``file://``: a directory, shared by threads and processes. diskcache keeps the index, we keep it honest.

A directory holds ``cachegen-store.json`` (the format marker), ``cache.db`` (diskcache's SQLite index; objects under
32 KiB live in it), ``ab/cd/<28 hex>.val`` (one file an object), ``store.lock`` and ``writer-*.lock``.

An object is written to a fresh file, synced, and only then named by a committed row, so a reader or a crash sees all of
it or nothing. Writers hold ``store.lock`` shared; a sweep of leftover files holds it alone.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DEFAULT_SETTINGS, METADATA

from cachegen_rag.errors import (
    CacheGenError,
    ConfigError,
    CorruptBitstreamError,
    StoreFormatError,
    StoreFullError,
    StoreUnavailableError,
)
from cachegen_rag.stores.base import (
    DEFAULT_SIZE_LIMIT,
    MAX_OBJECT_BYTES,
    NAMESPACES,
    Namespace,
    check_deadline,
    check_key,
    check_name,
    check_object,
    check_size,
)
from cachegen_rag.stores.disk_files import RawDisk, WriterMark, locked

STORE_FORMAT = 1
MARKER = "cachegen-store.json"
MAX_MARKER_BYTES = 4096
INLINE_BYTES = 32 << 10
LOCK_SECONDS = 30.0
ACCESS_FLUSH_SECONDS = 300.0
"""Reads are noted in memory and reach the index this often, and before every write: a hit costs no transaction."""

_OURS = re.compile(r"(cache\.db.*|cachegen-store\.json.*|store\.lock|writer-[0-9a-f]+\.lock|[0-9a-f]{2})\Z")
_SETTINGS: dict[str, Any] = {
    **DEFAULT_SETTINGS,  # all of them, so that nothing planted in the database's own settings counts
    "eviction_policy": "none",  # ours is in _make_room: it evicts what is needed and no more
    "cull_limit": 0,
    "sqlite_synchronous": 2,
    "sqlite_mmap_size": 0,  # a mapped file that somebody truncates kills the process; a read one gives an error
    "disk_min_file_size": INLINE_BYTES,
}


class DiskStore:
    """Objects in a directory. Beyond ``size_limit`` bytes the ones read or written longest ago are evicted.

    Raises StoreUnavailableError if the directory cannot be made or written, holds other things, or its index is
    damaged; StoreFormatError if a newer version of this package wrote it.
    """

    remote = False

    def __init__(self, path: str | Path, *, size_limit: int = DEFAULT_SIZE_LIMIT) -> None:
        directory = os.path.abspath(os.path.expanduser(path))
        if os.path.expandvars(directory) != directory:  # diskcache would expand it
            raise ConfigError(f"a store's path holds no $variables, got {directory!r:.200}")
        self.directory = directory
        self.url = Path(directory).as_uri()
        self.size_limit = size_limit
        self._reads: set[str] = set()
        self._reads_flushed = time.monotonic()
        self._lock = threading.Lock()
        self._mark: WriterMark | None = None
        with self._errors("open the store"):
            _prepare(directory)
            with locked(self._path("store.lock"), exclusive=True) as alone:
                _check_marker(directory)
                self._cache: diskcache.Cache | None = _open_index(directory, size_limit)
                if alone:
                    self._sweep()

    def __repr__(self) -> str:
        return f"DiskStore({self.directory!r}, size_limit={self.size_limit})"

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        name = check_name(namespace, key)
        check_deadline(name, deadline)
        with self._errors(f"read {name}"):
            data = self._read(name, max_bytes)
        if data is not None:
            self._note_read(name)
        return data

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        name = check_object(namespace, key, data)
        check_deadline(name, deadline)
        if len(data) > self.size_limit:
            raise StoreFullError(f"{name} has {len(data):,} bytes; the store's size_limit is {self.size_limit:,}")
        with self._errors(f"write {name}"), locked(self._path("store.lock"), exclusive=False):
            self._mark_writer()
            if self._holds(name, data):
                self._note_read(name)
                return
            cache = self._open()
            self._make_room(len(data))
            try:
                cache.set(name, data)
            except BaseException:
                cache.disk.discard_written()
                raise

    def contains(self, namespace: Namespace, key: str) -> bool:
        name = check_name(namespace, key)
        with self._errors(f"look up {name}"):
            try:
                found = self._open().get(name, read=True)
            except CorruptBitstreamError:
                return False
            if hasattr(found, "close"):
                found.close()
            return found is not None

    def delete(self, namespace: Namespace, key: str) -> bool:
        name = check_name(namespace, key)
        with self._errors(f"delete {name}"):
            self._mark_writer()
            return bool(self._open().delete(name))

    def keys(self, namespace: Namespace) -> Iterator[str]:
        """All keys of a namespace, the longest unused first."""
        if namespace not in NAMESPACES:
            check_name(namespace, "")
        with self._errors("list keys"):
            self._flush_reads()
            statement = "SELECT key FROM Cache WHERE raw = 1 AND key >= ? AND key < ? ORDER BY access_time"
            rows = self._sql(statement, namespace + "/", namespace + "0")
        for (name,) in rows:
            with suppress(ConfigError):  # a planted name
                yield check_key(name[len(namespace) + 1 :])

    def size(self) -> int:
        with self._errors("measure the store"):
            return self._total()

    def close(self) -> None:
        if self._cache is None:
            return
        self._flush_reads()
        cache, self._cache = self._cache, None
        cache.close()
        if self._mark is not None:
            self._finalizer()

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _open(self) -> diskcache.Cache:
        if self._cache is None:
            raise StoreUnavailableError(f"the store at {self.directory} is closed")
        return self._cache

    def _sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        # diskcache has no public way to ask its index; this is its one query function, connected per thread.
        return list(self._open()._sql(statement, values))

    def _read(self, name: str, max_bytes: int) -> bytes | None:
        for _ in range(3):  # a row whose file is gone was replaced between the two looks: look again
            found = self._open().get(name, read=True)
            if isinstance(found, bytes):
                check_size(name, len(found), max_bytes)
                return found
            if found is not None:
                with found:
                    check_size(name, os.fstat(found.fileno()).st_size, max_bytes)
                    return bytes(found.read())
            if name not in self._open():
                return None
        return None

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self._read(name, len(data)) == data
        except CorruptBitstreamError:
            return False

    def _make_room(self, size: int) -> None:
        """Evict what was used longest ago until ``size`` bytes fit. Raises StoreFullError if that cannot be reached."""
        self._flush_reads()
        excess = self._total() + size - self.size_limit
        seen: list[tuple[Any, ...]] = []
        while excess > 0:
            oldest = self._sql("SELECT rowid, key, raw, size FROM Cache ORDER BY access_time LIMIT 16")
            if not oldest or oldest == seen:
                raise StoreFullError(
                    f"the index in {self.directory} counts {self._total():,} bytes and nothing is left to evict; "
                    "delete the directory to begin anew"
                )
            seen = oldest
            for row, name, raw, freed in oldest:
                if excess > 0:
                    if raw != 1 or type(name) is not str or not self._open().delete(name):
                        # a planted row: diskcache deletes none that has expired or whose key is of another kind
                        planted = "(raw IS NOT 1 OR typeof(key) <> 'text' OR expire_time IS NOT NULL)"
                        self._sql(f"DELETE FROM Cache WHERE rowid = ? AND {planted}", row)
                    excess -= max(0, freed) if type(freed) is int else 0
            if excess <= 0:  # what a row says that it frees is not believed
                excess = self._total() + size - self.size_limit

    def _total(self) -> int:
        """The bytes of all objects, as the index counts them."""
        try:
            total = self._open().reset("size")
        except ValueError:  # no such row, or no such number
            total = None
        if type(total) is not int or total < 0:
            raise StoreUnavailableError(
                f"the index in {self.directory} says {total!r:.40} where the size of the store belongs; "
                "delete the directory to begin anew"
            )
        return total

    def _note_read(self, name: str) -> None:
        with self._lock:
            self._reads.add(name)
        if time.monotonic() - self._reads_flushed > ACCESS_FLUSH_SECONDS:
            self._flush_reads()

    def _flush_reads(self) -> None:
        """Write the access times down. They only order evictions, so failing to is no failure."""
        with self._lock:
            names, self._reads = self._reads, set()
            self._reads_flushed = time.monotonic()
        if names:
            with suppress(sqlite3.Error, diskcache.Timeout), self._open().transact():
                now = time.time()
                for name in names:
                    self._sql("UPDATE Cache SET access_time = ? WHERE key = ? AND raw = 1", now, name)

    def _mark_writer(self) -> None:
        with self._lock:
            if self._mark is None:
                self._mark = WriterMark(self._path(f"writer-{secrets.token_hex(8)}.lock"))
                self._finalizer = weakref.finalize(self, self._mark.remove, os.getpid())

    def _sweep(self) -> None:
        """Delete what a killed process left behind. Called with ``store.lock`` held alone."""
        marks = [self._path(n) for n in os.listdir(self.directory) if n.startswith("writer-") and _OURS.match(n)]
        stale = WriterMark.take_stale(marks)
        if stale:
            known = {name for (name,) in self._sql("SELECT filename FROM Cache WHERE filename IS NOT NULL")}
            self._open().disk.sweep(known)
            for path in stale:
                os.unlink(path)

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        where = f"cannot {action} in {self.directory}"
        try:
            yield
        except CacheGenError:
            raise
        except diskcache.Timeout as error:
            raise StoreUnavailableError(f"{where}: its index is locked or cannot be written") from error
        except sqlite3.Error as error:
            self._reconnect()
            if "full" in str(error):
                raise StoreFullError(f"{where}: the disk is full") from error
            advice = "; delete the directory to begin anew" if type(error) is sqlite3.DatabaseError else ""
            raise StoreUnavailableError(f"{where}: its index failed ({error}){advice}") from error
        except OSError as error:
            if error.errno in (ENOSPC, EDQUOT):
                raise StoreFullError(f"{where}: the disk is full") from error
            raise StoreUnavailableError(f"{where}: {error.strerror or error}") from error

    def _reconnect(self) -> None:
        """Drop this thread's connection: a failed statement may have left a transaction open on it."""
        cache = getattr(self, "_cache", None)
        if cache is not None:
            with suppress(sqlite3.Error):
                cache.close()


def _prepare(directory: str) -> None:
    """Make the directory private, or refuse one that is not ours to use."""
    os.makedirs(directory, 0o700, exist_ok=True)
    owner = os.stat(directory).st_uid
    if owner != os.geteuid() and os.geteuid() != 0:
        raise StoreUnavailableError(f"{directory} belongs to another user (uid {owner}); choose another directory")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise StoreUnavailableError(f"{directory} is not writable; choose another directory or change its permissions")
    entries = list(os.scandir(directory))
    strange = [entry.name for entry in entries if not _OURS.match(entry.name)]
    if strange and not os.path.lexists(os.path.join(directory, MARKER)):
        raise StoreUnavailableError(
            f"{directory} holds other things ({strange[0]!r:.60}) and no {MARKER}; a store wants a directory of its own"
        )
    for entry in entries:
        if entry.is_symlink():
            raise StoreUnavailableError(f"{entry.path} is a symbolic link; a store follows none")
    os.chmod(directory, 0o700)
    # SQLite gives its files the database's mode, and would make the database itself readable for everyone.
    os.close(os.open(os.path.join(directory, "cache.db"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _check_marker(directory: str) -> None:
    path = os.path.join(directory, MARKER)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(MAX_MARKER_BYTES)
    except FileNotFoundError:
        _write_marker(path)
        return
    try:
        version = json.loads(text)["format"]
        if type(version) is not int or version < 1:
            raise ValueError(version)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreFormatError(
            f"{path} does not say which format the store has; delete the directory to begin anew"
        ) from error
    if version > STORE_FORMAT:
        raise StoreFormatError(
            f"the store at {directory} has format {version}; this version reads up to {STORE_FORMAT}: "
            "update cachegen-rag or choose another directory"
        )


def _write_marker(path: str) -> None:
    draft = f"{path}.{secrets.token_hex(8)}"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump({"format": STORE_FORMAT, "made_by": "cachegen_rag"}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _open_index(directory: str, size_limit: int) -> diskcache.Cache:
    # A setting unknown to diskcache would reach RawDisk's constructor or a PRAGMA: it was planted.
    with suppress(sqlite3.OperationalError):  # a fresh database has no such table
        connection = sqlite3.connect(os.path.join(directory, "cache.db"), timeout=LOCK_SECONDS)
        try:
            names = {name for (name,) in connection.execute("SELECT key FROM Settings")}
        finally:
            connection.close()
        if not names <= {*DEFAULT_SETTINGS, *METADATA}:
            raise StoreUnavailableError(f"the index in {directory} holds settings that this package does not write")
    cache = diskcache.Cache(directory, timeout=LOCK_SECONDS, disk=RawDisk, **{**_SETTINGS, "size_limit": size_limit})
    cache._sql_retry("CREATE INDEX IF NOT EXISTS Cache_access_time ON Cache (access_time)")
    return cache
