from __future__ import annotations

import gc
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conformance import StoreConformance, StoreMachine, name_of
from hypothesis import settings

from cachegen_rag.errors import (
    ConfigError,
    CorruptBitstreamError,
    StoreFormatError,
    StoreFullError,
    StoreUnavailableError,
)
from cachegen_rag.stores import open_store
from cachegen_rag.stores.disk import INLINE_BYTES, MARKER


def value_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("??/??/*.val"))


class TestDiskStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        store = open_store(tmp_path / "store")
        yield store
        store.close()


class DiskMachine(StoreMachine):
    def open(self):
        self.directory = tempfile.mkdtemp()
        return open_store(self.directory)

    def reopen(self):
        self.store.close()
        return open_store(f"file://{self.directory}")

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.directory)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)


def test_what_was_put_is_there_after_reopening(tmp_path):
    data = os.urandom(100_000)
    store = open_store(f"file://{tmp_path}/a%20store")
    store.put("cas", name_of(data), data)
    store.close()
    assert (tmp_path / "a store" / MARKER).exists()
    again = open_store(tmp_path / "a store")
    assert again.get("cas", name_of(data)) == data
    assert open_store(again.url).get("cas", name_of(data)) == data


def test_files_are_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        store = open_store(tmp_path / "store")
        store.put("ac", "a" * 64, bytes(100_000))
        store.put("ac", "b" * 64, b"small")
        for path in [store_dir := tmp_path / "store", *store_dir.rglob("*")]:
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(old)


def test_an_open_directory_is_made_private(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    open_store(tmp_path / "store").close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


class TestOpening:
    @pytest.mark.parametrize(
        "url",
        [None, 5, b"x", "", "file:relative", "memory://name", "memory:x", "/tmp/a\0b", "/tmp/\ud800", "file:///a%00b"],
    )
    def test_what_names_no_store(self, url):
        with pytest.raises(ConfigError, match="store"):
            open_store(url)

    def test_a_directory_with_other_things_is_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("precious")
        with pytest.raises(StoreUnavailableError, match=r"thesis\.tex"):
            open_store(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "store").write_text("x")
        with pytest.raises(StoreUnavailableError, match="store"):
            open_store(tmp_path / "store")

    def test_an_unwritable_directory(self, tmp_path, monkeypatch):
        target = tmp_path / "store"
        target.mkdir()
        if os.geteuid() == 0:  # root may write anywhere but where nobody can
            target = Path("/proc/store")
        else:
            target.chmod(0o500)
        with pytest.raises(StoreUnavailableError, match="store"):
            open_store(target)
        monkeypatch.setattr(os, "access", lambda *a, **k: False)
        with pytest.raises(StoreUnavailableError, match="not writable"):
            open_store(tmp_path / "other")

    def test_another_users_directory(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(StoreUnavailableError, match="another user"):
            open_store(tmp_path / "store")

    def test_a_newer_format(self, tmp_path):
        open_store(tmp_path / "store").close()
        (tmp_path / "store" / MARKER).write_text(json.dumps({"format": 2}))
        with pytest.raises(StoreFormatError, match="format 2"):
            open_store(tmp_path / "store")

    @pytest.mark.parametrize(
        "text", ["", "nonsense", "[]", '{"format": "1"}', '{"format": true}', '{"format": 0}', "1" * 9000, "[" * 4000]
    )
    def test_a_damaged_marker(self, tmp_path, text):
        open_store(tmp_path / "store").close()
        (tmp_path / "store" / MARKER).write_text(text)
        with pytest.raises(StoreFormatError, match="delete the directory"):
            open_store(tmp_path / "store")

    def test_a_damaged_index(self, tmp_path):
        store = open_store(tmp_path / "store")
        store.put("ac", "a" * 64, b"x")
        store.close()
        (tmp_path / "store" / "cache.db").write_bytes(os.urandom(10_000))
        with pytest.raises(StoreUnavailableError, match="delete the directory"):
            open_store(tmp_path / "store")

    def test_a_variable_in_the_path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ELSEWHERE", "elsewhere")
        with pytest.raises(ConfigError, match="variables"):
            open_store(tmp_path / "$ELSEWHERE")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["cache.db", MARKER, "store.lock", "ab"])
    def test_a_symbolic_link_inside(self, tmp_path, name):
        outside = tmp_path / "outside"
        outside.mkdir()
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / name).symlink_to(outside / "file")
        with pytest.raises(StoreUnavailableError, match="symbolic"):
            open_store(tmp_path / "store")
        assert not list(outside.iterdir())


class TestSizeLimit:
    def put(self, store, size):
        data = os.urandom(size)
        store.put("cas", name_of(data), data)
        return name_of(data)

    @pytest.mark.parametrize("size", [10_000, 100_000])
    def test_evicts_what_was_used_longest_ago_and_no_more(self, tmp_path, size):
        store = open_store(tmp_path / "store", size_limit=5 * size)
        keys = [self.put(store, size) for _ in range(5)]
        assert all(store.contains("cas", key) for key in keys)
        store.get("cas", keys[0])
        keys += [self.put(store, size) for _ in range(2)]
        assert sorted(store.keys("cas")) == sorted([keys[0], *keys[3:]])
        assert store.size() <= 5 * size
        assert len(value_files(tmp_path / "store")) in (0, 5)

    def test_reads_by_a_process_that_has_ended_count(self, tmp_path):
        store = open_store(tmp_path / "store", size_limit=200_000)
        first, second = self.put(store, 100_000), self.put(store, 100_000)
        reader = open_store(tmp_path / "store", size_limit=200_000)
        assert reader.get("cas", first)
        reader.close()
        self.put(store, 50_000)
        assert store.contains("cas", first) and not store.contains("cas", second)

    def test_an_object_beyond_the_limit_is_refused_and_evicts_nothing(self, tmp_path):
        store = open_store(tmp_path / "store", size_limit=100_000)
        key = self.put(store, 90_000)
        with pytest.raises(StoreFullError, match="100,000"):
            self.put(store, 100_001)
        assert store.contains("cas", key)


MAKE_ROOM = """
import hashlib, os, sqlite3, sys
from cachegen_rag.errors import StoreError
from cachegen_rag.stores import open_store
columns = {"raw": 1, "expire_time": None, "size": 100, **eval(sys.argv[2])}
store = open_store(sys.argv[1], size_limit=1 << 20)
def put():
    data = os.urandom(100_000)
    store.put("cas", hashlib.sha256(data).hexdigest(), data)
for _ in range(10):
    put()
blob = columns.pop("blob", False)
connection = sqlite3.connect(os.path.join(sys.argv[1], "cache.db"))
for i in range(40):
    key = f"cas/{i:064x}"
    connection.execute(
        "INSERT INTO Cache(key, raw, expire_time, access_time, size, mode, value) VALUES (?, ?, ?, 0, ?, 1, x'00')",
        (key.encode() if blob else key, *columns.values()),
    )
connection.commit()
connection.close()
try:
    put()
    print("stored")
except StoreError as error:
    print(type(error).__name__)
"""


class TestPlantedRows:
    """The index is a file that somebody may have changed: nothing in it may lead outside or be executed."""

    @pytest.fixture
    def store(self, tmp_path):
        store = open_store(tmp_path / "store")
        self.data = os.urandom(100_000)
        store.put("cas", name_of(self.data), self.data)
        yield store
        store.close()

    def change(self, store, **columns):
        import sqlite3

        connection = sqlite3.connect(Path(store.directory) / "cache.db")
        for column, value in columns.items():
            connection.execute(f"UPDATE Cache SET {column} = ?", (value,))
        connection.commit()
        connection.close()

    @pytest.mark.parametrize(
        "kind", ["absolute", "dots", "inner dots", "other name", "database", "empty", "number", "nul"]
    )
    def test_a_file_outside_is_neither_read_nor_deleted(self, store, tmp_path, kind):
        victim = tmp_path / "secret"
        victim.write_bytes(b"secret")
        good = value_files(Path(store.directory))[0].relative_to(store.directory).as_posix()
        filename = {
            "absolute": str(victim),
            "dots": "../secret",
            "inner dots": good[:6] + "../../../secret",
            "other name": "ab/cd/secret",
            "database": "cache.db",
            "empty": "",
            "number": 7,
            "nul": good + "\0",
        }[kind]
        self.change(store, filename=filename)
        with pytest.raises(CorruptBitstreamError):
            store.get("cas", name_of(self.data))
        assert not store.contains("cas", name_of(self.data))
        store.put("cas", name_of(self.data), self.data)  # heals
        assert store.get("cas", name_of(self.data)) == self.data
        self.change(store, filename=filename)
        assert store.delete("cas", name_of(self.data))
        assert victim.read_bytes() == b"secret" and (Path(store.directory) / "cache.db").exists()

    @pytest.mark.parametrize("mode", [0, 1, 3, 4, None, "x"])
    def test_another_mode_is_refused(self, store, mode):
        self.change(store, mode=mode)
        with pytest.raises(CorruptBitstreamError, match="kind"):
            store.get("cas", name_of(self.data))

    def test_a_pickle_is_not_loaded(self, store, tmp_path):
        import pickle

        class Bomb:
            def __reduce__(self):
                return Path(tmp_path / "exploded").touch, ()

        self.change(store, mode=4, filename=None, value=pickle.dumps(Bomb()))
        with pytest.raises(CorruptBitstreamError):
            store.get("cas", name_of(self.data))
        self.change(store, raw=0, key=pickle.dumps(Bomb()))
        assert list(store.keys("cas")) == []
        assert store.get("cas", name_of(self.data)) is None
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize("kind", ["link", "linked shard", "fifo", "directory"])
    def test_what_is_not_a_file_is_not_followed(self, store, tmp_path, kind):
        path = value_files(Path(store.directory))[0]
        outside = tmp_path / "outside"
        shutil.move(path.parent, outside)
        if kind == "linked shard":
            path.parent.symlink_to(outside)
        else:
            path.parent.mkdir()
            {
                "link": lambda: path.symlink_to(outside / path.name),
                "fifo": lambda: os.mkfifo(path),
                "directory": path.mkdir,
            }[kind]()
        with pytest.raises(CorruptBitstreamError):
            store.get("cas", name_of(self.data))
        store.delete("cas", name_of(self.data))
        assert (outside / path.name).read_bytes() == self.data

    @pytest.mark.parametrize(
        "columns",
        [
            {"expire_time": 1.0, "size": 0},
            {"expire_time": 1.0, "size": 100_000},
            {"raw": 0},
            {"raw": None},
            {"blob": True},
            {"size": 0},
            {"size": "abc"},
            {"size": None},
            {"size": -1},
            {"size": -(10**12)},
            {"size": 10**12},
            {"size": 2**63 - 1},
            {"size": 0.5},
        ],
        ids=repr,
    )
    def test_making_room_ends_whatever_the_rows_say(self, tmp_path, columns):
        """In a process of its own: a loop without end would hold the index's lock against every time limit."""
        done = subprocess.run(
            [sys.executable, "-c", MAKE_ROOM, str(tmp_path / "full"), repr(columns)],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in ("stored", "StoreFullError", "StoreUnavailableError")
        if columns.get("expire_time") or "raw" in columns or columns == {"size": 0}:
            assert done.stdout.strip() == "stored"

    @pytest.mark.parametrize("value", ["abc", None, 1e300, float("inf"), 0.5, -1, b"", "missing row", "missing table"])
    def test_a_damaged_count_of_bytes_is_a_store_error(self, store, value):
        import sqlite3

        connection = sqlite3.connect(Path(store.directory) / "cache.db")
        if value == "missing table":
            connection.execute("DROP TABLE Settings")
        elif value == "missing row":
            connection.execute("DELETE FROM Settings")
        else:
            connection.execute("UPDATE Settings SET value = ? WHERE key = 'size'", (value,))
        connection.commit()
        connection.close()
        with pytest.raises(StoreUnavailableError, match=store.directory):
            store.size()
        with pytest.raises(StoreUnavailableError, match=store.directory):
            store.put("ac", "b" * 64, b"x")
        assert store.get("cas", name_of(self.data)) == self.data

    def test_planted_settings_are_refused(self, store):
        import sqlite3

        connection = sqlite3.connect(Path(store.directory) / "cache.db")
        connection.execute("INSERT INTO Settings VALUES ('sqlite_temp_store_directory', '''/tmp''')")
        connection.commit()
        connection.close()
        with pytest.raises(StoreUnavailableError, match="settings"):
            open_store(store.directory)


class TestDamage:
    @pytest.fixture
    def store(self, tmp_path):
        store = open_store(tmp_path / "store")
        yield store
        store.close()

    @pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete", "extend"])
    def test_putting_again_heals(self, store, damage):
        data = os.urandom(100_000)
        store.put("cas", name_of(data), data)
        path = value_files(Path(store.directory))[0]
        {
            "flip": lambda: path.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
            "truncate": lambda: os.truncate(path, 500),
            "empty": lambda: os.truncate(path, 0),
            "delete": path.unlink,
            "extend": lambda: path.write_bytes(data + b"x"),
        }[damage]()
        assert store.get("cas", name_of(data)) != data
        assert store.contains("cas", name_of(data)) == (damage != "delete")
        store.put("cas", name_of(data), data)
        assert store.get("cas", name_of(data)) == data
        assert len(value_files(Path(store.directory))) == 1

    @pytest.mark.parametrize("size", [0, 4096, 20_000])
    @pytest.mark.parametrize("name", ["cache.db", "cache.db-wal"])
    def test_an_index_cut_short_while_open_does_not_kill_the_process(self, tmp_path, name, size):
        code = """if True:
            import hashlib, os, sys
            from cachegen_rag.errors import CacheGenError
            from cachegen_rag.stores import open_store
            store = open_store(sys.argv[1])
            def put(n):
                data = bytes([n]) * 9000
                store.put("cas", hashlib.sha256(data).hexdigest(), data)
            for n in range(20):
                put(n)
            os.truncate(os.path.join(sys.argv[1], sys.argv[2]), int(sys.argv[3]))
            key = hashlib.sha256(bytes([3]) * 9000).hexdigest()
            for act in (lambda: store.get("cas", key), lambda: put(200), lambda: list(store.keys("cas")), store.close):
                try:
                    act()
                except CacheGenError as error:
                    print(error)
        """
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s"), name, str(size)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (done.returncode, done.stderr)

    @pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EDQUOT", "EMFILE", "EROFS"])
    @pytest.mark.parametrize("call", ["open", "fsync", "mkdir"])
    @pytest.mark.parametrize("size", [1000, 100_000])
    def test_a_failing_write_keeps_what_was_there(self, store, monkeypatch, call, code, size):
        import errno

        before = os.urandom(size)
        store.put("ac", "a" * 64, before)
        number = getattr(errno, code)
        real = getattr(os, call)
        reached = []

        def fail(path, *args, **kwargs):
            if call != "open" or (str(path).endswith(".val") and args[0] & os.O_CREAT):
                reached.append(path)
                raise OSError(number, os.strerror(number))
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                store.put("ac", "a" * 64, os.urandom(size))
                error = None
            except (StoreFullError, StoreUnavailableError) as raised:
                error = raised
        assert (error is not None) == bool(reached)
        if error is not None:
            assert isinstance(error, StoreFullError) == (code in ("ENOSPC", "EDQUOT"))
            assert store.get("ac", "a" * 64) == before
        files = value_files(Path(store.directory))
        assert len(files) == (size >= INLINE_BYTES)
        after = os.urandom(size)
        store.put("ac", "a" * 64, after)
        assert store.get("ac", "a" * 64) == after

    def test_an_unreadable_file_says_why(self, store, monkeypatch):
        data = os.urandom(100_000)
        store.put("cas", name_of(data), data)
        real = os.open

        def fail(path, *args, **kwargs):
            if str(path).endswith(".val"):
                raise OSError(5, "Input/output error")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(StoreUnavailableError, match="Input/output"):
            store.get("cas", name_of(data))

    @pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small tmpfs wants root")
    @pytest.mark.parametrize("size", [20_000, 300_000])
    def test_a_full_disk(self, tmp_path, size):
        mount = tmp_path / "small"
        mount.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True).returncode:
            pytest.skip("tmpfs cannot be mounted here")
        try:
            store = open_store(mount / "store")
            kept = []
            for _ in range(200):
                data = os.urandom(size)
                try:
                    store.put("cas", name_of(data), data)
                except StoreFullError:
                    break
                kept.append(data)
            assert 0 < len(kept) < 200
            assert [store.get("cas", name_of(data)) == data for data in kept] == [True] * len(kept)
            if size > INLINE_BYTES:  # a row that holds its object needs room in SQLite's log to go
                assert all(store.delete("cas", name_of(data)) for data in kept[:2])
                store.put("cas", name_of(kept[0]), kept[0])
            assert store.get("cas", name_of(kept[0])) == kept[0]
            store.close()
        finally:
            subprocess.run(["umount", "-l", mount], check=True)


WRITER = """
import hashlib, os, sys
from cachegen_rag.stores import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
n = 0
while n < int(sys.argv[2]):
    data = os.urandom(64) * (1 + (n * 7919) % 2000)
    key = hashlib.sha256(data).hexdigest()
    store.put("cas", key, data)
    store.put("ac", "5" * 64, data)
    print(key, flush=True)
    n += 1
store.close()
"""


def start_writer(directory, count=10**9):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(count)], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_kill_9_loses_nothing_that_was_committed(tmp_path):
    """Killed at any moment: what ``put`` returned for is there, nothing is torn, leftovers go away."""
    directory = tmp_path / "store"
    committed = []
    for cycle in range(12):
        writer = start_writer(directory)
        for _ in range(1 + cycle % 4):
            line = writer.stdout.readline().strip()
            if line != "open":
                committed.append(line)
        writer.kill()
        committed += [line for line in writer.stdout.read().split() if line != "open"]
        writer.wait()
    store = open_store(directory)
    assert len(committed) >= 10
    for key in committed:
        assert name_of(store.get("cas", key)) == key
    shared = store.get("ac", "5" * 64)
    assert shared is not None and len({shared[i : i + 64] for i in range(0, len(shared), 64)}) == 1
    rows = store._sql("SELECT filename FROM Cache WHERE filename IS NOT NULL")
    assert {p.relative_to(directory).as_posix() for p in value_files(directory)} == {name for (name,) in rows}
    store.close()
    assert not list(directory.glob("writer-*.lock"))


def test_leftovers_are_swept_and_foreign_files_are_not(tmp_path):
    store = open_store(tmp_path / "store")
    data = os.urandom(100_000)
    store.put("cas", name_of(data), data)
    store.close()
    orphan = tmp_path / "store" / "ab" / "cd" / ("0" * 28 + ".val")
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"left by a killed writer")
    foreign = tmp_path / "store" / "ab" / "notes.txt"
    foreign.write_text("not ours")
    open_store(tmp_path / "store").close()
    assert orphan.exists()  # nobody was killed: no reason to look
    (tmp_path / "store" / "writer-00.lock").touch()
    store = open_store(tmp_path / "store")
    assert not orphan.exists() and not orphan.parent.exists() and foreign.exists()
    assert store.get("cas", name_of(data)) == data


def test_a_living_writer_is_not_swept(tmp_path):
    first = open_store(tmp_path / "store")
    first.put("ac", "a" * 64, b"x")
    open_store(tmp_path / "store").close()
    assert len(list((tmp_path / "store").glob("writer-*.lock"))) == 1
    first.close()
    assert not list((tmp_path / "store").glob("writer-*.lock"))


def test_processes_fill_one_directory_and_a_reader_sees_whole_objects(tmp_path):
    directory = tmp_path / "store"
    writers = [start_writer(directory, 15) for _ in range(3)]
    store = open_store(directory)
    reads = 0
    while any(w.poll() is None for w in writers):
        shared = store.get("ac", "5" * 64)
        if shared is not None:
            assert len({shared[i : i + 64] for i in range(0, len(shared), 64)}) == 1
            reads += 1
        elif reads:
            pytest.fail("an object that was there is gone while it is replaced")
    keys = [line for w in writers for line in w.stdout.read().split() if line != "open"]
    assert [w.returncode for w in writers] == [0, 0, 0]
    assert len(keys) == 45 and reads
    for key in keys:
        assert name_of(store.get("cas", key)) == key


def test_file_descriptors_do_not_grow(tmp_path):
    store = open_store(tmp_path / "store")
    data = os.urandom(100_000)
    store.put("cas", name_of(data), data)
    gc.collect()  # connections of threads that ended
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(200):
        store.get("cas", name_of(data))
        store.contains("cas", name_of(data))
        store.put("cas", name_of(data), data)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
