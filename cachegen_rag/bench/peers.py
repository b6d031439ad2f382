"""llama.cpp's own ways of keeping a prompt, timed like ours: its prompt caches, and raw state files.

All of them keep an exact prefix, in fp16 or larger. Each peer is ``prepare(token_ids, length)``, which computes and
keeps the first ``length`` tokens, then ``ttft(token_ids) -> seconds`` for any prompt that begins with them: restore,
decode the rest, choose the first token greedily. Each ``ttft`` starts with an empty context, as when another prompt
was answered in between; a peer whose restore did not happen raises instead of being timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachegen_rag.models.llama_native import MAIN, NativeContext, NativeModel, library


class PrefixPeer(ABC):
    """One way of keeping a prompt's leading tokens."""

    name: str

    @abstractmethod
    def prepare(self, token_ids: Sequence[int], length: int) -> None:
        """Compute the first ``length`` of ``token_ids`` and keep them."""

    @abstractmethod
    def ttft(self, token_ids: Sequence[int]) -> float:
        """Seconds from an empty context to the first token of the answer to ``token_ids``."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes kept."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine."""


class StateFile(PrefixPeer):
    """``llama_state_seq_save_file`` and ``llama_state_seq_load_file``: raw fp16 rows in a file."""

    name = "state_file"

    def __init__(self, path: Path, *, n_ctx: int, n_threads: int, folder: Path) -> None:
        self._model = NativeModel(path)
        self._context = NativeContext(self._model, cells=n_ctx, n_batch=512, n_threads=n_threads, kv_type="f16")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "state_file.bin"
        self._room = n_ctx

    def prepare(self, token_ids: Sequence[int], length: int) -> None:
        """Write the state of the first ``length`` tokens."""
        self._context.clear()
        self._decode(token_ids[:length], 0)
        ids = (ctypes.c_int32 * length)(*token_ids[:length])
        name = str(self._file).encode()
        if not library().llama_state_seq_save_file(self._context.pointer, name, MAIN, ids, length):
            raise RuntimeError("llama_state_seq_save_file wrote nothing")

    def ttft(self, token_ids: Sequence[int]) -> float:
        """Load the file, decode the rest."""
        self._context.remove(MAIN)
        start = time.perf_counter()
        ids, count = (ctypes.c_int32 * self._room)(), ctypes.c_size_t()
        name = str(self._file).encode()
        pointer = self._context.pointer
        if not library().llama_state_seq_load_file(pointer, name, MAIN, ids, self._room, ctypes.byref(count)):
            raise RuntimeError("llama_state_seq_load_file read nothing")
        if list(token_ids[: count.value]) != ids[: count.value]:
            raise RuntimeError("the prompt does not begin with the tokens that were kept")
        self._decode(token_ids[count.value :], count.value)
        int(self._context.last_logits().argmax())
        return time.perf_counter() - start

    def _decode(self, token_ids: Sequence[int], start: int) -> None:
        for at in range(0, len(token_ids), self._context.n_batch):
            self._context.decode(token_ids[at : at + self._context.n_batch], start + at, all_logits=False)

    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.stat().st_size

    def close(self) -> None:
        """Free context and model."""
        self._context.free()
        self._model.free()


class LibraryCache(PrefixPeer):
    """``llama_cpp.Llama`` with one of llama-cpp-python's own caches."""

    def __init__(self, name: str, cache: Any, path: Path, *, n_ctx: int, n_threads: int) -> None:
        from llama_cpp.llama import Llama

        library()
        self.name = name
        self._cache = cache
        self._llama: Any = Llama(
            str(path), n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False
        )
        self._llama.set_cache(cache)
        self._kept = 0

    def prepare(self, token_ids: Sequence[int], length: int) -> None:
        """Answer the first ``length`` tokens with one token: the library keeps the state afterwards."""
        with contextlib.redirect_stderr(io.StringIO()):  # LlamaDiskCache prints
            self._llama.reset()
            self._llama.create_completion(list(token_ids[:length]), max_tokens=1, temperature=0.0)
        self._kept = length
        if tuple(token_ids[:length]) not in self._cache:
            raise RuntimeError(f"{self.name} kept nothing")

    def ttft(self, token_ids: Sequence[int]) -> float:
        """Stream the answer's first token; then let the library put the state back (LlamaDiskCache removes a hit)."""
        restored = 0
        load = self._llama.load_state

        def counting_load(state: Any) -> None:
            nonlocal restored
            load(state)
            restored = state.n_tokens

        self._llama.reset()
        self._llama.load_state = counting_load
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                start = time.perf_counter()
                stream = self._llama.create_completion(list(token_ids), max_tokens=4, temperature=0.0, stream=True)
                next(stream)
                seconds = time.perf_counter() - start
                if self.name == "disk_cache":
                    for _ in stream:
                        pass
                else:
                    stream.close()
        finally:
            del self._llama.load_state
        if restored < self._kept:
            raise RuntimeError(f"{self.name} restored {restored} of {self._kept} tokens")
        return seconds

    def stored_bytes(self) -> int:
        """Bytes the library counts."""
        return int(self._cache.cache_size)

    def close(self) -> None:
        """Free context and model."""
        self._llama.close()


def peers(path: Path, *, n_ctx: int, n_threads: int, folder: Path) -> list[PrefixPeer]:
    """The peers, each with an engine of its own; what they keep on disk goes to ``folder``."""
    from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

    caches = {
        "ram_cache": LlamaRAMCache(capacity_bytes=4 << 30),
        "disk_cache": LlamaDiskCache(str(folder / "disk_cache"), capacity_bytes=16 << 30),
    }
    found: list[PrefixPeer] = [StateFile(path, n_ctx=n_ctx, n_threads=n_threads, folder=folder)]
    found += [LibraryCache(name, cache, path, n_ctx=n_ctx, n_threads=n_threads) for name, cache in caches.items()]
    return found
