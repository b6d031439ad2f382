"""Work for idle time: when it begins, what interrupts it, and that nothing waits for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from cachegen_rag.errors import RequestCancelledError, StoreFullError
from cachegen_rag.idle import MAX_WAITING, IdleWork, Interrupted


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_work_is_done_and_the_thread_ends() -> None:
    idle, done = IdleWork(0), list[str]()
    for name in "abc":
        assert idle.add(name, lambda interrupted, name=name: done.append(name))  # type: ignore[misc]
    assert idle.flush(10) and sorted(done) == ["a", "b", "c"] and not len(idle)
    assert not any(t.name == "cachegen-idle" for t in threading.enumerate())
    assert idle.add("d", lambda interrupted: done.append("d")) and idle.flush(10) and done[-1] == "d"


def test_no_work_begins_while_a_request_runs_nor_right_after_it() -> None:
    idle, began = IdleWork(0.2), list[float]()
    with idle.request(), idle.request():
        idle.add("a", lambda interrupted: began.append(time.monotonic()))
        assert not idle.flush(0.5) and not began
    ended = time.monotonic()
    assert idle.flush(10) and began[0] - ended >= 0.19


def test_a_request_interrupts_work_which_is_done_again() -> None:
    idle, seen, started = IdleWork(0), list[str](), threading.Event()

    def work(interrupted: Interrupted) -> None:
        started.set()
        if not seen:
            until(interrupted)
            seen.append("interrupted")
            raise RequestCancelledError("a request came")
        seen.append("done")

    idle.add("a", work)
    assert started.wait(10)
    with idle.request():
        until(lambda: bool(seen))
        assert not idle.flush(0.05)
    assert idle.flush(10) and seen == ["interrupted", "done"]


def test_the_same_work_is_asked_for_once_and_the_oldest_is_forgotten() -> None:
    idle, done = IdleWork(0), list[int]()
    with idle.request():
        for n in range(MAX_WAITING + 3):
            assert idle.add(str(n), lambda interrupted, n=n: done.append(n))  # type: ignore[misc]
        assert not idle.add("9", lambda interrupted: done.append(9))
    assert idle.flush(10) and sorted(done) == list(range(3, MAX_WAITING + 3)) and done[0] == 9, "newest first"


def test_work_that_fails_does_not_end_the_rest() -> None:
    idle, done = IdleWork(0), list[int]()

    def fail(error: Exception) -> Callable[[Interrupted], None]:
        def work(interrupted: Interrupted) -> None:
            raise error

        return work

    with idle.request():
        idle.add("last", lambda interrupted: done.append(1))
        idle.add("ours", fail(StoreFullError("no room")))
        idle.add("any", fail(ZeroDivisionError()))
    assert idle.flush(10) and done == [1]


def test_closing_interrupts_and_forgets() -> None:
    idle, started, seen = IdleWork(0), threading.Event(), list[str]()

    def work(interrupted: Interrupted) -> None:
        started.set()
        until(interrupted)
        seen.append("interrupted")
        raise RequestCancelledError("closed")

    idle.add("a", work)
    assert started.wait(10)
    idle.add("b", lambda interrupted: seen.append("b"))
    idle.close()
    idle.close()
    assert seen == ["interrupted"] and not idle.add("c", work) and idle.flush(0)


def test_a_request_that_is_collected_while_the_lock_is_held_ends_it() -> None:
    """The garbage collector may end a forgotten stream at any allocation."""
    idle = IdleWork(0)
    forgotten = [idle.during(iter([1, 2]))]
    next(forgotten[0])
    with idle._changed:
        forgotten.clear()
        gc.collect()
    done: list[int] = []
    idle.add("a", lambda interrupted: done.append(1))
    assert idle.flush(10) and done == [1]


def test_a_process_ends_while_work_waits_or_runs() -> None:
    code = (
        "import time; from cachegen_rag.idle import IdleWork\n"
        "from cachegen_rag.errors import RequestCancelledError\n"
        "def work(interrupted):\n"
        "    while not interrupted(): time.sleep(0.001)\n"
        "    print('interrupted', flush=True); raise RequestCancelledError()\n"
        "running, waiting = IdleWork(0), IdleWork(60)\n"
        "running.add('a', work); waiting.add('b', work); time.sleep(0.2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
