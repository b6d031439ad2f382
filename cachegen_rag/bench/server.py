"""A small HTTP object server with a shaped link and faults on demand, for the benchmarks and the tests.

It speaks the paths of ``stores/http.py`` over HTTP/1.1, keeps objects in memory, shapes all connections together
through one token bucket (so that they share a link), and can misbehave at any point of a transfer. Faults are described
by :class:`Fault`; ``FAULTS`` lists the kinds. Not a server for anything else.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PIECE = 8 << 10
BURST = 0.005
"""Seconds of a shaped link's rate that may be made up for: a timer that wakes up late must not slow the link down."""
FAULTS = (
    "silent", "stall", "drip", "reset", "reset before head", "truncate", "short length", "shorter body", "long length",
    "no length", "chunked cut", "flip", "garbage", "another object", "huge length", "endless", "encoded", "not http",
    "range unasked", "redirect", "401", "404", "408", "429", "500", "503", "507",
)  # fmt: skip
"""What can go wrong with an answer. Those in PLACED happen after the share ``Fault.at`` of the body."""

PLACED = frozenset(FAULTS[FAULTS.index("stall") : FAULTS.index("drip") + 2]) | frozenset(
    ("truncate", "short length", "shorter body", "no length", "chunked cut", "flip", "garbage")
)
"""Kinds that happen at a place of the body."""

ALWAYS_MISS = frozenset(FAULTS) - {"drip"}
"""Kinds after which, if every attempt meets them, no client can have the object."""


@dataclass(frozen=True)
class Fault:
    """One way to misbehave, after the share ``at`` of the body has been sent."""

    kind: str
    at: float = 0.5


@dataclass
class Link:
    """A shaped link: ``rate`` in bytes per second (a number or a function of seconds since ``start``), None unshaped.

    ``delay`` is the round-trip time in seconds, added before every answer.
    """

    rate: float | Callable[[float], float] | None = None
    delay: float = 0.0
    start: float = field(default_factory=time.monotonic)
    _free_at: float = 0.0

    async def send(self, size: int) -> None:
        """Wait until ``size`` bytes may pass. Waiters share the link in turns."""
        if self.rate is None:
            return
        now = time.monotonic()
        begin = max(now - BURST, self._free_at)
        self._free_at = begin + self.duration(max(begin - self.start, 0.0), size)
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    def duration(self, at: float, size: float) -> float:
        """Seconds that ``size`` bytes take when they begin ``at`` seconds after the start."""
        if not callable(self.rate):
            return size / self.rate if self.rate else 0.0
        spent, step = 0.0, 0.01
        while size > 0:
            passed = max(self.rate(at + spent), 1.0) * step
            if passed >= size:
                return spent + step * size / passed
            size -= passed
            spent += step
        return spent


class ObjectServer:
    """The server, on a thread of its own. ``with ObjectServer() as server: open_store(server.url)``.

    ``fault(method, path, number)`` returns a Fault or None for each request; ``number`` counts requests from 0.
    ``log`` holds ``(time.monotonic(), method, path)`` of every request.
    """

    def __init__(self, link: Link | None = None, fault: Callable[[str, str, int], Fault | None] | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.link = link or Link()
        self.fault = fault
        self.log: list[tuple[float, str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._random = random.Random(0)
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._main()), daemon=True)

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link_socket = writer.get_extra_info("socket")
        link_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.link.rate is not None:  # what lies in buffers has passed the bucket already, so let little lie there
            link_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            writer.transport.set_write_buffer_limits(high=PIECE)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        number = len(self.log)
        self.log.append((time.monotonic(), method, path))
        self.headers.append(headers)
        fault = self.fault(method, path, number) if self.fault else None
        if self.link.delay:
            await asyncio.sleep(self.link.delay)
        if fault is not None:
            return await self._misbehave(reader, writer, method, path, headers, body, fault)
        status, data, more = self._handle(method, path, headers, body)
        await self._head(writer, status, len(data), more)
        if method != "HEAD":
            await self._body(writer, data)
        return True

    def _handle(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[str, bytes, str]:
        if method == "PUT":
            status = "204 No Content" if path in self.objects else "201 Created"
            self.objects[path] = body
            return status, b"", ""
        if path not in self.objects:
            return "404 Not Found", b"", ""
        if method == "DELETE":
            del self.objects[path]
            return "204 No Content", b"", ""
        data = self.objects[path]
        start = headers.get("range", "").removeprefix("bytes=").removesuffix("-")
        if method == "GET" and start.isdecimal() and int(start) < len(data):
            content_range = f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}\r\n"
            return "206 Partial Content", data[int(start) :], content_range
        return "200 OK", data, ""

    async def _head(self, writer: asyncio.StreamWriter, status: str, length: int | None, more: str = "") -> None:
        size = "" if length is None else f"Content-Length: {length}\r\n"
        writer.write(f"HTTP/1.1 {status}\r\n{size}{more}\r\n".encode())
        await writer.drain()

    async def _body(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.link.rate is None:
            writer.write(data)
            await writer.drain()
            return
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            await self.link.send(len(piece))
            writer.write(piece)
            await writer.drain()

    async def _misbehave(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        fault: Fault,
    ) -> bool:
        """Do ``fault`` to this answer; whether the connection lives on."""
        kind = fault.kind
        if kind.isdecimal():
            more = "Retry-After: 1\r\n" if kind in ("429", "503") else ""
            await self._head(writer, f"{kind} Sorry", 5 if method != "HEAD" else 0, more)
            writer.write(b"sorry" if method != "HEAD" else b"")
            await writer.drain()
            return True
        if kind == "redirect":
            await self._head(writer, "302 Found", 0, "Location: http://169.254.169.254/latest/meta-data\r\n")
            return True
        if kind == "silent":
            await _until_gone(reader)
        if kind == "reset before head":
            return _reset(writer)
        if kind == "not http":
            writer.write(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n" + os.urandom(200))
            await writer.drain()
            return False
        status, data, more = self._handle(method, path, headers, body)
        cut = int(len(data) * fault.at)
        if kind in ("flip", "garbage", "another object"):
            if kind == "flip" and data:
                at = min(cut, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ (1 << self._random.randrange(8))]) + data[at + 1 :]
            elif kind == "garbage":
                data = data[:cut] + os.urandom(len(data) - cut)
            elif kind == "another object":
                data = next((d for p, d in self.objects.items() if d != data), b"?")
                status, more = "200 OK", ""
            await self._head(writer, status, len(data), more)
            await self._body(writer, data)
            return True
        if kind == "shorter body":
            await self._head(writer, status, cut, more)
            await self._body(writer, data[:cut])
            return True
        if kind == "short length":
            await self._head(writer, status, cut, more)
            await self._body(writer, data)
            return True
        if kind == "range unasked":
            await self._head(
                writer, "206 Partial Content", len(data) - cut, f"Content-Range: bytes {cut}-{len(data)}/*\r\n"
            )
            await self._body(writer, data[cut:])
            return True
        if kind == "encoded":
            bomb = gzip.compress(bytes(1 << 20))
            await self._head(writer, "200 OK", len(bomb), "Content-Encoding: gzip\r\n")
            await self._body(writer, bomb)
            return True
        if kind == "endless":
            await self._head(writer, "200 OK", None, "Connection: close\r\n")
            while True:
                await self._body(writer, bytes(PIECE))
        if kind == "huge length":
            await self._head(writer, "200 OK", 1 << 40)
            await self._body(writer, data)
            await _until_gone(reader)
        if kind == "chunked cut":
            await self._head(writer, "200 OK", None, "Transfer-Encoding: chunked\r\n")
            writer.write(f"{len(data):x}\r\n".encode() + data[:cut])
            await writer.drain()
            return False
        await self._head(writer, status, {"no length": None, "long length": len(data) + 100}.get(kind, len(data)), more)
        await self._body(writer, data if kind == "long length" else data[:cut])
        if kind == "reset":
            return _reset(writer)
        if kind == "stall":
            await _until_gone(reader)
        if kind == "drip":
            for at in range(cut, len(data)):
                writer.write(data[at : at + 1])
                await writer.drain()
                await asyncio.sleep(0.2)
            return True
        return False  # truncate, no length, long length: the connection just ends


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Say nothing more until the client gives up."""
    while await reader.read(1 << 16):
        pass
    raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> bool:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
