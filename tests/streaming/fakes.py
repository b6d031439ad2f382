"""A codec, an engine and documents made of bytes and sleeps: what the pipeline sees, without a model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from cachegen_rag.errors import CorruptBitstreamError
from cachegen_rag.manifest import Chunk, Level, Segment
from cachegen_rag.models.base import KVTarget
from cachegen_rag.rope import RopeSpec
from cachegen_rag.streaming.parts import Part, Ready
from cachegen_rag.streaming.pipeline import Loader
from cachegen_rag.streaming.transfer import Transfer

TOKENS = 256


class FakeCodec:
    """Decodes a chunk by filling its target with the bytes' sum, in ``seconds``; ``spans`` is when it did."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.spans: list[tuple[float, float]] = []
        self.profile = SimpleNamespace(hash="f" * 64)
        self.running = 0

    def decode_into(self, data, target, *, token_ids):
        if data[:4] == b"bad!":
            raise CorruptBitstreamError("not a bitstream")
        self.running += 1
        began = time.monotonic()
        time.sleep(self.seconds)
        target.keys[0][:] = fingerprint(data)
        self.spans.append((began, time.monotonic()))
        self.running -= 1


def fingerprint(data: bytes) -> float:
    return float(np.frombuffer(data[:64], np.uint8).sum() + len(data) % 1000)


@dataclass
class Library:
    """Chunks of ``sizes`` bytes at levels 1, 2, ... (finest first), stored in ``store``."""

    store: object
    codec: FakeCodec
    sizes: tuple[int, ...] = (60_000,)
    count: int = 6

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.count)
        self.data = {}
        self.chunks = []
        for i in range(self.count):
            levels = []
            for level, size in enumerate(self.sizes, 1):
                data = rng.bytes(size)
                segment = Segment.of(data)
                self.put(segment, data)
                self.data[i, level] = data
                levels.append(Level(level, 0.001 * 4.0**level, (segment,)))
            self.chunks.append(Chunk(i * TOKENS, (i + 1) * TOKENS, tuple(levels)))

    def put(self, segment, data):
        if hasattr(self.store, "objects"):
            self.store.objects[f"/cas/{segment.sha256}"] = data
        else:
            self.store.put("cas", segment.sha256, data)

    def parts(self, level: int = 1) -> list[Part]:
        return [Part(c, [0] * TOKENS, self.codec, level, c.start) for c in self.chunks]


def target() -> KVTarget:
    rope = RopeSpec.plain(4, 1e4)
    return KVTarget([np.zeros((TOKENS, 1, 4))], [np.zeros((TOKENS, 1, 4))], np.arange(TOKENS, dtype=np.int32), rope)


@dataclass
class Run:
    """What became of a request: seconds, per part the tokens taken from the store, the transfer, when it computed."""

    seconds: float
    taken: list[int]
    transfer: Transfer
    computing: list[tuple[float, float]]

    @property
    def reasons(self) -> list[str | None]:
        return [outcome.reason for outcome in self.transfer.outcomes]


def drive(loader: Loader, library: Library, *, speed: float = 2560.0, due: float | None = None, level: int = 1) -> Run:
    """Build a prompt of the library's chunks, computing ``speed`` tokens a second by sleeping; check what is taken."""
    began = time.monotonic()
    transfer = loader.open(library.parts(level), due=None if due is None else began + due)
    targets = [target() for _ in transfer.parts]
    taken, computing = [], []
    try:
        for i, one in enumerate(targets):
            transfer.attach(i, one)
        for i in range(len(targets)):
            done = 0
            taken.append(0)
            while done < TOKENS:
                advice = transfer.next(i, done)
                if isinstance(advice, Ready):
                    read = transfer.outcomes[i].level
                    assert (targets[i].keys[0] == fingerprint(library.data[i, read])).all()
                    taken[-1], done = TOKENS - done, TOKENS
                    continue
                assert 0 < advice.tokens <= TOKENS - done
                start = time.monotonic()
                time.sleep(advice.tokens / speed)
                computing.append((start, time.monotonic()))
                loader.text.record(advice.tokens, i * TOKENS + done, time.monotonic() - start)
                done += advice.tokens
        seconds = time.monotonic() - began
    finally:
        transfer.close()
    assert library.codec.running == 0
    return Run(seconds, taken, transfer, computing)
