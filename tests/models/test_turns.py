"""The lock that serves in the order of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cachegen_rag.errors import ModelError
from cachegen_rag.models.turns import Turns


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


def test_first_come_first_served() -> None:
    turns, order = Turns(), []

    def work(number: int) -> None:
        turns.acquire()
        order.append(number)
        turns.release()

    turns.acquire()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(lambda n=number: len(turns._waiting) == n + 1)
    turns.release()
    for thread in threads:
        thread.join(10)
    assert order == list(range(20))
    turns.acquire()
    turns.release()


def test_only_one_at_a_time() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(200):
            turns.acquire()
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            turns.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] and not any(thread.is_alive() for thread in threads)


def test_a_busy_thread_does_not_overtake() -> None:
    turns, got = Turns(), []

    def wait() -> None:
        turns.acquire()
        got.append("waiting")
        turns.release()

    turns.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(turns._waiting) == 1)
    turns.release()
    turns.acquire()  # at once: the waiting thread comes first all the same
    got.append("busy")
    turns.release()
    thread.join(10)
    assert got == ["waiting", "busy"]


def test_twice_in_one_thread_is_an_error_not_a_deadlock() -> None:
    turns = Turns()
    turns.acquire()
    with pytest.raises(ModelError, match="already has a session"):
        turns.acquire()
    releasing = threading.Thread(target=turns.release)  # another thread may pass the turn on
    releasing.start()
    releasing.join(10)
    turns.acquire()
    turns.release()


def test_a_turn_that_goes_on_in_another_thread_is_waited_for() -> None:
    """A stream that a pool's threads read by turns: the one that began it may get another request meanwhile."""
    turns, stop = Turns(), threading.Event()
    turns.acquire()

    def read_on() -> None:
        while not stop.wait(0.01):
            turns.here()
        turns.release()

    reading = threading.Thread(target=read_on)
    reading.start()
    threading.Timer(0.3, stop.set).start()
    assert turns.acquire(patience=0.1)
    reading.join(10)
    with pytest.raises(ModelError, match="already has a session"):  # and it is this thread's now
        turns.acquire(patience=0.01)
    assert not turns._waiting
    turns.release()


def test_a_turn_that_nobody_has_cannot_be_gone_on_with() -> None:
    turns = Turns()
    turns.acquire()
    turns.release()
    turns.here()  # a stream that is read after its session was closed
    assert turns.acquire(0.01)
    turns.release()


@pytest.mark.parametrize("at", ["Event", "append"])
def test_a_session_that_is_collected_while_another_is_asked_for(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end a forgotten stream at any allocation: its turn is passed on, nobody hangs."""
    turns, came = Turns(), []
    holding = threading.Thread(target=turns.acquire)
    holding.start()
    holding.join(10)

    def collected() -> None:
        monkeypatch.undo()
        turns.release()

    def ask() -> None:
        came.append(turns.acquire(10))

    thread = threading.Thread(target=ask, daemon=True)
    if at == "Event":
        make = threading.Event

        class Collecting(make):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                collected()

        monkeypatch.setattr("cachegen_rag.models.turns.threading.Event", Collecting)
    else:

        class Queue(type(turns._waiting)):  # type: ignore[misc]
            def append(self, turn: threading.Event) -> None:
                super().append(turn)
                if turns._owner:
                    collected()

        turns._waiting = Queue()
    thread.start()
    thread.join(5)
    assert came == [True]
    turns.release()


@pytest.mark.parametrize("granted", [False, True])
def test_interrupted_while_waiting(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while waiting, before or just after the turn came: nobody is left waiting for a turn that never ends."""
    turns = Turns()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if granted:
                super().wait(10)
            raise KeyboardInterrupt

    caught: list[type] = []

    def wait() -> None:
        try:
            turns.acquire()
        except KeyboardInterrupt:
            caught.append(KeyboardInterrupt)

    turns.acquire()
    thread = threading.Thread(target=wait)  # makes an event of its own, so before the patch
    with monkeypatch.context() as patch:
        patch.setattr("cachegen_rag.models.turns.threading.Event", Interrupted)
        thread.start()
        if granted:
            wait_until(lambda: len(turns._waiting) == 1)
            turns.release()
        thread.join(10)
    if not granted:
        turns.release()
    assert caught == [KeyboardInterrupt]
    turns.acquire()
    turns.release()


def test_waiting_ends_after_the_timeout() -> None:
    turns, came = Turns(), []
    turns.acquire()
    thread = threading.Thread(target=lambda: came.append(turns.acquire(0.05)))
    thread.start()
    thread.join(10)
    assert came == [False] and not turns._waiting
    turns.release()
    assert turns.acquire(0.05)
