"""The loader: what the transfers of all requests on one store share. Threads, the link's meter, the measured costs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from cachegen_rag.config import user_cache
from cachegen_rag.errors import DeadlineExceededError, StoreError
from cachegen_rag.manifest import MAX_MANIFEST_BYTES, Segment
from cachegen_rag.stores.base import FetchStore, Store
from cachegen_rag.streaming.bandwidth import Experts, Meter
from cachegen_rag.streaming.costs import Costs
from cachegen_rag.streaming.parts import Part
from cachegen_rag.streaming.policy import Planner, Policy
from cachegen_rag.streaming.transfer import Transfer

SAVE_SECONDS = 60.0
LOOK_UP_SECONDS = (0.5, 2.0)
"""Shortest and longest time that looking documents up at a remote store may take."""
LOOK_UP_SHARE = 0.1
"""Of the time that computing the prompt takes: what a look-up may cost before the text is computed instead."""


class Loader:
    """Loads chunks for requests of one model from one store.

    model : tells the costs of this engine from others' (name, file, threads).
    costs : measured costs; by default those kept in this user's cache directory.
    threads : that verify and decode; decoding releases the GIL, so it runs beside the model's own work.
    planner : decides what is fetched from a remote store. fill : whether the model computes while it would wait.
    """

    def __init__(
        self,
        store: Store,
        model: str = "",
        *,
        costs: Costs | None = None,
        threads: int = 2,
        planner: Policy | None = None,
        fill: bool = True,
    ) -> None:
        self.store, self.model, self.threads = store, model, threads
        self.costs = costs if costs is not None else Costs(user_cache() / "costs.json")
        self.text = self.costs.text(model)
        self.planner: Policy = planner or Planner()
        self.remote = store.remote and isinstance(store, FetchStore)
        self.fill = fill and self.remote
        self.lock = threading.RLock()
        self.shared_cores = True  # decoding and the engine use the same; known when the first target is attached
        self.stopped = False  # no decode is begun any more
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="cachegen-load")
        rate, round_trip = self.costs.link(store.url)
        self.meter = Meter(Experts(rate))
        if store.remote and rate:
            self.meter.round_trip.observe(round_trip)
        self.flying: dict[tuple[int, int], Transfer] = {}
        self.last: Transfer | None = None  # the one that ended last, for timelines
        self._saved = time.monotonic()
        self._local: Callable[[Any, str], bool] | None = getattr(store, "has_local", None)

    def open(self, parts: Sequence[Part], *, due: float | None = None, prefix: int = 0, tail: int = 0) -> Transfer:
        """Begin to load ``parts``; see :class:`Transfer`."""
        transfer = Transfer(self, parts, due=due, prefix=prefix, tail=tail)
        transfer.begin()
        return transfer

    def look_up(self, keys: Sequence[str], *, tokens: int = 0, due: float | None = None) -> list[bytes | Exception]:
        """The stored manifests' bytes, all asked for at once; for each key a StoreError or LookupError instead.

        A remote store gets a share of the time that computing the prompt (of ``tokens``) would take: a network that
        does not answer must not cost more than that.
        """
        if not self.remote:
            return [self._one(key) for key in keys]
        shortest, longest = LOOK_UP_SECONDS
        patience = min(max(shortest, LOOK_UP_SHARE * self.text.seconds(tokens, 0)), longest)
        patience = max(patience, 8 * self.meter.round_trip.seconds())
        deadline = time.monotonic() + patience
        if due is not None:
            deadline = min(deadline, max(due, time.monotonic() + shortest))
        futures: list[Future[bytes | None] | StoreError] = []
        for key in keys:
            try:
                futures.append(
                    self.store.fetch("ac", key, max_bytes=MAX_MANIFEST_BYTES, deadline=deadline, priority=0.0)  # type: ignore[attr-defined]
                )
            except StoreError as error:
                futures.append(error)
        return [future if isinstance(future, StoreError) else _result(future, deadline) for future in futures]

    def fetch(self, segment: Segment, priority: float, arrived: Callable[[int], None]) -> Future[bytes | None]:
        """Start reading a bitstream from a remote store. Raises StoreError."""
        future: Future[bytes | None] = self.store.fetch(  # type: ignore[attr-defined]
            "cas", segment.sha256, max_bytes=segment.length, priority=priority, on_bytes=arrived
        )
        return future

    def has_local(self, segment: Segment | None) -> bool:
        """Whether a tier on this machine has the object."""
        return self._local is not None and segment is not None and self._local("cas", segment.sha256)

    def rate(self, now: float) -> float:
        """Bytes per second expected of the link."""
        return max(self.meter.rate(now), 1.0)

    def busy(self) -> bool:
        """Whether anything is being fetched. The lock is held."""
        return bool(self.flying)

    def bytes_in_flight(self, priority: float = math.inf) -> int:
        """Bytes that have not arrived, of what requests up to ``priority`` have asked for. The lock is held."""
        return sum(t.bytes_left(i) for (_, i), t in self.flying.items() if t.priority <= priority)

    def closed(self, transfer: Transfer) -> None:
        """A transfer has ended: remember what was measured."""
        self.last = transfer
        if self.remote and self.meter.estimator.count:
            self.costs.record_link(self.store.url, self.meter.estimator.rate(), self.meter.round_trip.seconds())
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._saved = time.monotonic()
            self.costs.save()

    def close(self) -> None:
        """Stop the threads and write the costs down. What requests have not decoded yet, they compute."""
        with self.lock:  # nobody who holds it asks the pool for anything from here on, so the pool may call us back
            self.stopped = True
        self.pool.shutdown(cancel_futures=True)
        self.costs.save()

    def _one(self, key: str) -> bytes | Exception:
        try:
            data = self.store.get("ac", key, max_bytes=MAX_MANIFEST_BYTES)
        except Exception as error:
            return error
        return data if data is not None else LookupError("not in the store")


def _result(future: Future[bytes | None], deadline: float) -> bytes | Exception:
    try:
        data = future.result(timeout=max(deadline - time.monotonic(), 0.0) + 0.5)
    except (FutureTimeoutError, TimeoutError) as error:
        future.cancel()
        return error if isinstance(error, StoreError) else DeadlineExceededError("the look-up took too long")
    except Exception as error:
        return error
    return data if data is not None else LookupError("not in the store")
