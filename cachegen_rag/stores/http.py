"""``https://``: a remote store that speaks Bazel's HTTP cache protocol. The only importer of httpx.

``PUT/GET/HEAD/DELETE {base}/cas/<sha256>`` for bitstreams and ``{base}/ac/<key>`` for manifests: nginx with WebDAV,
bazel-remote, Apache and S3-compatible servers answer it. All requests run on one event loop in a thread of the store;
``get`` and ``put`` wait for it, ``fetch`` does not.

What a server says is not trusted: no redirect is followed, no body is decompressed or read beyond the bytes asked for,
no proxy or credential is taken from the environment, and plain ``http`` is for loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx
import stamina
from pydantic import SecretStr

from cachegen_rag.errors import (
    ConfigError,
    DeadlineExceededError,
    MissingDependencyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from cachegen_rag.stores.base import (
    MAX_OBJECT_BYTES,
    Namespace,
    check_deadline,
    check_name,
    check_object,
    check_size,
)
from cachegen_rag.stores.http_address import bearer, check_url, secret
from cachegen_rag.stores.http_limits import Health, Slots

T = TypeVar("T")

REQUEST_SECONDS = 300.0
"""Longest a request without a deadline may take, retries included."""
MAX_RETRY_AFTER = 60.0
SILENT_SECONDS = 1.0
"""A server from which nothing came for so long when a deadline passed has failed; otherwise it was just slow."""
_CLOSED = "this HTTP store is closed"


class _Transient(StoreUnavailableError):
    """An attempt failed in a way that another may not. ``after``: seconds that the server asked to wait."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class HTTPStore:
    """Objects on an HTTP server.

    Parameters
    ----------
    url : ``https://host[:port]/base``; ``http://`` on loopback only. Without credentials, query or fragment.
    token : sent as ``Authorization: Bearer``. auth : ``(user, password)`` for basic authentication instead.
    timeout : seconds that the server may stay silent, connecting or between two pieces of a body.
    attempts : tries of one request, the first included. connections : requests under way at once.
    http2 : True, False, or None for "on https where the ``http2`` extra is installed".
    ca_file : certificates to trust instead of the public ones.

    Raises ConfigError; MissingDependencyError if ``http2=True`` without the extra.
    """

    remote = True

    def __init__(
        self,
        url: str,
        *,
        token: str | SecretStr | None = None,
        auth: tuple[str, str | SecretStr] | None = None,
        timeout: float = 10.0,
        attempts: int = 4,
        connections: int = 6,
        http2: bool | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        self.url = check_url(url)
        if token is not None and auth is not None:
            raise ConfigError("token and auth exclude each other")
        if auth is not None and not (isinstance(auth, (tuple, list)) and len(auth) == 2 and isinstance(auth[0], str)):
            raise ConfigError("auth is a pair of user and password")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ConfigError(f"timeout is a number of seconds above 0, got {timeout!r:.80}")
        for name, number in (("attempts", attempts), ("connections", connections)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name} is a whole number above 0, got {number!r:.80}")
        if not (http2 is None or isinstance(http2, bool)):
            raise ConfigError(f"http2 is True, False or None, got {http2!r:.80}")
        if not (ca_file is None or isinstance(ca_file, (str, Path))):
            raise ConfigError(f"ca_file is the path of a file, got {ca_file!r:.80}")
        if http2 and find_spec("h2") is None:
            raise MissingDependencyError("HTTP/2 needs the http2 extra: pip install 'cachegen-rag[http2]'")
        secure = self.url.startswith("https:")
        self._options: dict[str, Any] = {
            "headers": {"User-Agent": "cachegen-rag", "Accept-Encoding": "identity", **bearer(token)},
            "auth": None if auth is None else httpx.BasicAuth(auth[0], secret(auth[1])),
            "timeout": httpx.Timeout(timeout, pool=None),
            "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            "http2": find_spec("h2") is not None and secure if http2 is None else http2,
            "verify": _certificates(ca_file) if secure else False,
            "trust_env": False,
            "follow_redirects": False,
        }
        self._connections, self._attempts, self._timeout = connections, attempts, timeout
        self._health = Health()
        self._loop: _Loop | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"HTTPStore({self.url!r})"

    def get(
        self, namespace: Namespace, key: str, *, max_bytes: int = MAX_OBJECT_BYTES, deadline: float | None = None
    ) -> bytes | None:
        return _wait(self.fetch(namespace, key, max_bytes=max_bytes, deadline=deadline))

    def fetch(
        self,
        namespace: Namespace,
        key: str,
        *,
        max_bytes: int = MAX_OBJECT_BYTES,
        deadline: float | None = None,
        priority: float = math.inf,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Future[bytes | None]:
        """Start reading an object; see :class:`~cachegen_rag.stores.base.FetchStore`."""
        name = check_name(namespace, key)
        check_deadline(name, deadline)
        read = _Read(self, name, max_bytes, on_bytes or (lambda n: None))
        return self._submit(self._retrying(name, read.attempt, deadline, priority, read.heard))

    def put(self, namespace: Namespace, key: str, data: bytes, *, deadline: float | None = None) -> None:
        name = check_object(namespace, key, data)
        check_deadline(name, deadline)

        async def attempt() -> None:
            response = await self._client.put(f"{self.url}/{name}", content=data)
            if response.status_code not in (200, 201, 204):
                raise self._refused(response, name)

        _wait(self._submit(self._retrying(name, attempt, deadline)))

    def contains(self, namespace: Namespace, key: str) -> bool:
        return self._ask("HEAD", check_name(namespace, key), (200, 204))

    def delete(self, namespace: Namespace, key: str) -> bool:
        return self._ask("DELETE", check_name(namespace, key), (200, 202, 204))

    def keys(self, namespace: Namespace) -> Iterator[str]:
        raise StoreError(f"{self.url}: an HTTP store cannot list its keys")

    def size(self) -> int:
        raise StoreError(f"{self.url}: an HTTP store cannot tell its size")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    def _ask(self, method: str, name: str, yes: tuple[int, ...]) -> bool:
        async def attempt() -> bool:
            response = await self._client.request(method, f"{self.url}/{name}")
            if response.status_code in yes or response.status_code in (404, 410):
                return response.status_code in yes
            raise self._refused(response, name)

        return _wait(self._submit(self._retrying(name, attempt)))

    async def _retrying(
        self,
        name: str,
        attempt: Callable[[], Awaitable[T]],
        deadline: float | None = None,
        priority: float = math.inf,
        heard: Callable[[], float] = lambda: -math.inf,
    ) -> T:
        """The result of ``attempt``, tried again where that may help, within the deadline.

        ``heard`` tells when the server last sent something: one that is merely slow is not held to be ill.
        """
        end = min(math.inf if deadline is None else deadline, time.monotonic() + REQUEST_SECONDS)
        last: _Transient | None = None

        def again(error: Exception) -> bool | float:
            nonlocal last
            if not isinstance(error, _Transient):
                return False
            last = error
            if error.after is not None and time.monotonic() + error.after >= end:
                return False
            if not self._health.may_retry():
                return False
            return True if error.after is None else error.after

        async def tries() -> T:
            retries = stamina.retry_context(
                on=again, attempts=self._attempts, timeout=None, wait_initial=0.05, wait_max=2.0, wait_jitter=0.1
            )
            async for trial in retries:
                with trial:
                    async with self._slots.hold(priority):
                        with _transport_errors(f"{self.url}/{name}"):
                            return await attempt()
            raise AssertionError("stamina ends with a result or an exception")

        self._health.admit(self.url)
        try:
            result = await asyncio.wait_for(tries(), end - time.monotonic())
        except (asyncio.TimeoutError, TimeoutError) as error:
            reason = f"last: {last}" if last else "no answer"
            if time.monotonic() - heard() > SILENT_SECONDS:
                self._health.failed(reason)
            raise DeadlineExceededError(f"the deadline passed before {self.url}/{name} was done ({reason})") from error
        except _Transient as error:
            self._health.failed(str(error))
            raise StoreUnavailableError(str(error)) from error.__cause__
        except StoreError:
            self._health.succeeded()  # it said no, and so it is there
            raise
        self._health.succeeded()
        return result

    def _refused(self, response: httpx.Response, name: str) -> StoreError:
        """The error for an answer that is not the one hoped for."""
        status, where = response.status_code, f"{self.url}/{name}"
        if status in (413, 507):
            return StoreFullError(f"{where}: the server has no room (HTTP {status})")
        if status in (408, 429) or status >= 500:
            return _Transient(f"{where}: HTTP {status}", _retry_after(response.headers.get("Retry-After")))
        if 300 <= status < 400:
            return StoreUnavailableError(f"{where}: HTTP {status}: redirects are not followed")
        if status in (401, 403):
            return StoreUnavailableError(f"{where}: HTTP {status}: the server wants other credentials (token=, auth=)")
        return StoreUnavailableError(f"{where}: HTTP {status} was not expected")

    @property
    def _client(self) -> httpx.AsyncClient:
        return self._running().client

    @property
    def _slots(self) -> Slots:
        return self._running().slots

    def _running(self) -> _Loop:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError(_CLOSED)
            if self._loop is None or self._loop.pid != os.getpid():  # a forked child has no loop thread
                self._loop = _Loop(self._options, self._connections)
                weakref.finalize(self, self._loop.stop)
            return self._loop

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return self._running().submit(coroutine)
        except StoreUnavailableError:
            coroutine.close()
            raise


class _Read:
    """One object being read. What an attempt read before it broke off is kept, and the next one asks for the rest."""

    def __init__(self, store: HTTPStore, name: str, max_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self.store, self.name, self.max_bytes, self.on_bytes = store, name, max_bytes, on_bytes
        self.body = bytearray()
        self._last = -math.inf

    def heard(self) -> float:
        """When something of the object last arrived, ``time.monotonic()``."""
        return self._last

    def _arrived(self, size: int) -> None:
        self._last = time.monotonic()
        self.on_bytes(size)

    async def attempt(self) -> bytes | None:
        # A manifest may be replaced between two attempts, so only what is named by its hash is taken up again.
        start = len(self.body) if self.name.startswith("cas/") else 0
        headers = {"Range": f"bytes={start}-"} if start else {}
        where = f"{self.store.url}/{self.name}"
        async with self.store._client.stream("GET", f"{self.store.url}/{self.name}", headers=headers) as response:
            self._arrived(0)
            if response.status_code in (404, 410):
                return None
            if start and response.status_code in (206, 416):
                if response.status_code == 416 or not _continues(response.headers.get("Content-Range", ""), start):
                    self.body.clear()
                    raise _Transient(f"{where}: the server sent another range than the one asked for")
            elif response.status_code == 200:
                self.body.clear()
            else:
                raise self.store._refused(response, self.name)
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise StoreUnavailableError(f"{where}: the server encoded the body although it was asked not to")
            declared = response.headers.get("Content-Length", "0")
            check_size(where, len(self.body) + (int(declared) if declared.isdecimal() else 0), self.max_bytes)
            async for piece in response.aiter_raw():
                check_size(where, len(self.body) + len(piece), self.max_bytes)
                self.body += piece
                self._arrived(len(piece))
        return bytes(self.body)


class _Loop:
    """An event loop in a thread of its own, with the client that lives on it. Knows nothing of the store."""

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        self.pid = os.getpid()
        self.client = httpx.AsyncClient(**options)
        self.slots = Slots(slots)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cachegen-http", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """End every request, close the connections, end the thread. Idempotent."""
        if self.pid != os.getpid() or self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._wind_up())
        finally:
            self._loop.close()

    async def _wind_up(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self.client.aclose()


def _wait(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError as error:
        raise StoreUnavailableError(_CLOSED) from error
    except BaseException:
        future.cancel()
        raise


@contextlib.contextmanager
def _transport_errors(where: str) -> Iterator[None]:
    """Turn what httpx raises into ours. Its messages hold no header, so no credential either."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise _Transient(f"{where}: the server fell silent ({type(error).__name__})") from error
    except httpx.HTTPError as error:
        message = f"{where}: {error or type(error).__name__}"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise StoreUnavailableError(f"{message}; pass ca_file= for a private authority") from error
        raise _Transient(message) from error
    except httpx.StreamError as error:
        raise _Transient(f"{where}: {error}") from error
    except ValueError as error:  # a header that httpx cannot make sense of
        raise _Transient(f"{where}: the answer makes no sense ({type(error).__name__})") from error


def _continues(content_range: str, start: int) -> bool:
    return content_range.replace(" ", "").lower().startswith(f"bytes{start}-")


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, at most MAX_RETRY_AFTER; None if it is absent or makes no sense."""
    if value is None:
        return None
    try:
        if value.isdecimal():
            seconds = float(value)
        else:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)


def _certificates(ca_file: str | Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file = {str(ca_file)!r}: not readable as certificates ({error})") from error
