"""How ``disk.py`` lets diskcache touch the file system: raw bytes, in files that diskcache named, inside the directory.

diskcache trusts its database: it unpickles what a row says is pickled (CVE-2025-69872) and opens and deletes whatever
path a row names. A row can be planted, so everything it says is checked here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW

from cachegen_rag.errors import CorruptBitstreamError, StoreUnavailableError

_VALUE_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val\Z")
_SHARD = re.compile(r"[0-9a-f]{2}\Z")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RawDisk(diskcache.Disk):
    """str keys, bytes values, private files; every other kind of row is refused."""

    def __init__(self, directory: str, min_file_size: int = 0, pickle_protocol: int = 0) -> None:
        super().__init__(directory, min_file_size, pickle_protocol)
        self._local = threading.local()

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"keys are str, got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if raw != 1 or type(key) is not str:
            raise CorruptBitstreamError(f"the store at {self._directory} holds a key that this package does not write")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, str | None, bytes | None]:
        if type(value) is not bytes or read:
            raise TypeError(f"values are bytes, got {type(value).__name__}")
        self._local.written = None
        if len(value) < self.min_file_size:
            return len(value), MODE_RAW, None, value
        filename, _ = self.filename()
        self._local.written = filename
        self._write_file(filename, value)
        return len(value), MODE_BINARY, filename, None

    def discard_written(self) -> None:
        """Remove the file this thread wrote last: the row that should name it was not committed."""
        filename, self._local.written = getattr(self._local, "written", None), None
        if filename is not None:
            self.remove(filename)

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Any:
        """The value, or for a file with ``read`` an open binary file. FileNotFoundError means deleted meanwhile."""
        if mode == MODE_RAW and type(value) is bytes and filename is None:
            return value
        if mode != MODE_BINARY or value is not None:
            raise CorruptBitstreamError(
                f"the store at {self._directory} holds a row of a kind this package does not write"
            )
        file = self._open(filename)
        if read:
            return file
        with file:
            return file.read()

    def remove(self, file_path: Any) -> None:
        """Delete a value file. A path that diskcache did not make is left alone; a file already gone is fine."""
        with suppress(OSError, CorruptBitstreamError), self._shard(file_path) as (shard, name):
            os.unlink(name, dir_fd=shard)

    def sweep(self, known: Collection[str]) -> int:
        """Delete value files that no row names and empty directories; the number of files deleted.

        The caller makes sure that nobody is writing.
        """
        removed = 0
        for outer in self._scan(self._directory):
            for inner in self._scan(outer.path):
                for entry in os.scandir(inner.path):
                    path = f"{outer.name}/{inner.name}/{entry.name}"
                    if _VALUE_FILE.match(path) and path not in known and entry.is_file(follow_symlinks=False):
                        self.remove(path)
                        removed += 1
                with suppress(OSError):
                    os.rmdir(inner.path)
            with suppress(OSError):
                os.rmdir(outer.path)
        return removed

    @staticmethod
    def _scan(path: str) -> list[os.DirEntry[str]]:
        return [e for e in os.scandir(path) if _SHARD.match(e.name) and e.is_dir(follow_symlinks=False)]

    def _open(self, filename: Any) -> FileIO:
        try:
            with self._shard(filename) as (shard, name):
                # Not blocking: a FIFO under this name must not hang the reader.
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=shard)
        except FileNotFoundError:
            raise
        except OSError as error:  # not left to diskcache, which would call it a miss without a reason
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise CorruptBitstreamError(f"{self._directory}/{filename} lies behind a symbolic link") from error
            raise StoreUnavailableError(f"cannot read {self._directory}/{filename}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptBitstreamError(f"{self._directory}/{filename} is not a regular file")
        return FileIO(fd, "rb")

    def _write_file(self, filename: str, data: bytes) -> None:
        with self._shard(filename, create=True) as (shard, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=shard), "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.fsync(shard)

    @contextmanager
    def _shard(self, filename: Any, create: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory of a value file and the file's name there, reached without following any link."""
        if not isinstance(filename, str) or not _VALUE_FILE.match(filename):
            raise CorruptBitstreamError(
                f"the store at {self._directory} names a value file {filename!r:.80} that diskcache does not write"
            )
        *shards, name = filename.split("/")
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for shard in shards:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(shard, 0o700, dir_fd=fd)
                        os.fsync(fd)
                inner = os.open(shard, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd, name
        finally:
            os.close(fd)


@contextmanager
def locked(path: str, *, exclusive: bool, timeout: float = 10.0) -> Iterator[bool]:
    """Hold an advisory lock on the file ``path`` (made if missing); yields False if it was not to be had in time.

    A file system without locks yields False at once.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield _lock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, timeout)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR) or time.monotonic() >= end:
                return False
        time.sleep(0.005)


class WriterMark:
    """A file that exists while its maker may be writing, locked for as long as its process lives.

    A mark that nobody locks was left by a process that was killed: files without rows may lie about.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _lock(self.fd, fcntl.LOCK_EX, 0)

    def remove(self, pid: int) -> None:
        """Remove the mark, in the process that made it."""
        if pid == os.getpid():
            with suppress(OSError):
                os.unlink(self.path)
        with suppress(OSError):
            os.close(self.fd)

    @staticmethod
    def take_stale(paths: Collection[str]) -> list[str]:
        """Those of ``paths`` that belong to no living process."""
        stale = []
        for path in paths:
            with suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _lock(fd, fcntl.LOCK_EX, 0):
                        stale.append(path)
                finally:
                    os.close(fd)
        return stale
