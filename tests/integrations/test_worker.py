"""The worker: order, cancellation, deadlines, and readers that are slow or gone."""

import asyncio
import gc
import threading
import time

import pytest

from cachegen_rag.integrations.langchain.worker import Worker, worker_of


def counting(n, started=None, gate=None, seen=None):
    def make(cancelled):
        if started is not None:
            started.set()
        for i in range(n):
            if gate is not None:
                gate.wait(5)
            if seen is not None:
                seen.append(i)
            yield i

    return make


async def collect(stream):
    return [item async for item in stream]


def test_items_and_errors_reach_the_reader():
    def fails(cancelled):
        yield 1
        raise KeyError("gone")

    worker = Worker()
    assert list(worker.stream(counting(5))) == [0, 1, 2, 3, 4]
    stream = worker.stream(fails)
    assert next(stream) == 1
    with pytest.raises(KeyError, match="gone"):
        next(stream)
    assert list(worker.stream(counting(2))) == [0, 1], "an error does not end the worker"


async def test_tasks_get_items_and_errors():
    def fails(cancelled):
        raise KeyError("gone")
        yield

    worker = Worker()
    assert await collect(worker.astream(counting(5))) == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="gone"):
        await collect(worker.astream(fails))


async def test_none_is_not_delivered():
    def make(cancelled):
        yield from (None, 1, None, 2)

    assert list(Worker().stream(make)) == [1, 2]
    assert await collect(Worker().astream(make)) == [1, 2]


async def test_requests_run_in_the_order_they_came():
    worker, order, gate = Worker(), [], threading.Event()

    def make(n):
        def run(cancelled):
            gate.wait(5)
            order.append(n)
            yield n

        return run

    async def request(n):
        return await collect(worker.astream(make(n)))

    tasks = []
    for n in range(32):
        tasks.append(asyncio.create_task(request(n)))
        await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks) == [[n] for n in range(32)]
    assert order == list(range(32))


async def test_a_cancelled_task_stops_the_work_and_frees_the_worker():
    worker, seen, gate, started = Worker(), [], threading.Event(), threading.Event()
    task = asyncio.create_task(collect(worker.astream(counting(1000, started, gate, seen))))
    while not started.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await collect(worker.astream(counting(1))) == [0]
    assert len(seen) <= 1


async def test_a_request_cancelled_in_the_queue_never_starts():
    worker, gate, started, other = Worker(), threading.Event(), threading.Event(), threading.Event()
    first = asyncio.create_task(collect(worker.astream(counting(1, started, gate))))
    while not started.is_set():
        await asyncio.sleep(0.001)
    second = asyncio.create_task(collect(worker.astream(counting(1, other))))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    assert await first == [0]
    assert await collect(worker.astream(counting(1))) == [0]
    assert not other.is_set()


def test_a_reader_that_goes_away_stops_the_work():
    worker, seen = Worker(), []

    def make(cancelled):
        for i in range(100_000):
            seen.append(i)
            time.sleep(0.001)
            yield i

    stream = worker.stream(make)
    assert next(stream) == 0
    del stream
    gc.collect()
    assert list(worker.stream(counting(1))) == [0]
    assert len(seen) < 1000


def test_a_slow_reader_does_not_hold_the_worker():
    worker = Worker()
    slow = worker.stream(counting(100))
    assert next(slow) == 0
    assert list(worker.stream(counting(3))) == [0, 1, 2]
    assert list(slow) == list(range(1, 100))


async def test_deadlines():
    worker, gate = Worker(), threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        list(worker.stream(counting(1, gate=gate), timeout=0.05))
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        await collect(worker.astream(counting(1, gate=gate), timeout=0.05))
    gate.set()
    assert list(worker.stream(counting(2), timeout=5)) == [0, 1]


async def test_the_generator_is_closed_on_the_worker():
    where = []

    def make(cancelled):
        try:
            yield 1
            yield 2
        finally:
            where.append(threading.current_thread().name)

    worker = Worker()
    stream = worker.astream(make)
    assert await anext(stream) == 1
    await stream.aclose()
    assert list(worker.stream(counting(1))) == [0]
    assert len(where) == 1 and where[0].startswith("cachegen")


def test_a_loop_that_is_gone_cancels():
    worker, seen = Worker(), []

    def make(cancelled):
        for i in range(100_000):
            seen.append(i)
            time.sleep(0.001)
            yield i

    async def main():
        stream = worker.astream(make)
        await anext(stream)
        main.stream = stream  # never closed

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert list(worker.stream(counting(1))) == [0]
    assert len(seen) < 1000


async def test_the_iterator_can_ask_whether_it_is_cancelled():
    worker, asked = Worker(), []

    def make(cancelled):
        yield 1
        while not cancelled():
            time.sleep(0.001)
        asked.append(True)
        raise RuntimeError("nobody reads this")

    task = asyncio.create_task(collect(worker.astream(make)))
    await asyncio.sleep(0.01)
    task.cancel()
    assert await collect(worker.astream(counting(1))) == [0]
    assert asked == [True]


def test_one_worker_a_model():
    class Model:
        pass

    a, b = Model(), Model()
    assert worker_of(a) is worker_of(a)
    assert worker_of(a) is not worker_of(b)
