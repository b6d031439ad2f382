"""The KV of one prompt on the model's own device: a prebuilt cache that rows are scattered into, and the library.

Both are two tensors ``[layers, kv_heads, n_ctx, dim]``, keys and values. In the cache, *cells* are packed: present
rows without holes, in the order of their positions. In the library, row ``p`` is prompt position ``p``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from cachegen_rag.kv import KVShape


class ScatterLayer(DynamicLayer):
    """A cache layer that writes new rows into chosen cells of prebuilt memory and returns all cells in use."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rounding: torch.dtype | None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.device, self.is_initialized = keys.device, True
        self.rounding = rounding
        self.cells: slice | torch.Tensor = slice(0, 0)
        self.used = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter rows ``[1, kv_heads, n, dim]`` to ``cells``; return all ``used`` cells, new ones included."""
        if self.rounding is not None:
            key_states, value_states = key_states.to(self.rounding), value_states.to(self.rounding)
        assert self.keys is not None and self.values is not None
        for memory, rows in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(self.cells, slice):
                memory[:, :, self.cells] = rows
            else:
                memory.index_copy_(2, self.cells, rows.to(memory.dtype))
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self) -> int:
        """Cells in use."""
        return self.used


class PromptCache(Cache):
    """The cache of one prompt, in the form that a transformers model takes.

    rounding : dtype that new rows pass through on their way in, so that a float32 cache holds what an fp16 cache
        would; None keeps them as computed.
    """

    def __init__(
        self, shape: KVShape, n_ctx: int, dtype: torch.dtype, device: torch.device, rounding: torch.dtype | None
    ) -> None:
        self.keys, self.values = allocate(shape, n_ctx, dtype, device)
        super().__init__(
            layers=[ScatterLayer(self.keys[i, None], self.values[i, None], rounding) for i in range(shape.layers)]
        )

    def point(self, cells: Sequence[int], used: int) -> None:
        """Send the rows of the next forward pass to ``cells``; ``used`` cells are in use after it."""
        contiguous = list(cells) == list(range(cells[0], cells[0] + len(cells)))
        where = slice(cells[0], cells[0] + len(cells)) if contiguous else torch.tensor(cells, device=self.keys.device)
        for layer in self.layers:
            assert isinstance(layer, ScatterLayer)
            layer.cells, layer.used = where, used


class Library:
    """Rows staged for a prompt, by position. Memory is taken on first use and kept from prompt to prompt."""

    def __init__(self, shape: KVShape, n_ctx: int, dtype: torch.dtype, device: torch.device) -> None:
        self._make = (shape, n_ctx, dtype, device)
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self.present = torch.zeros(n_ctx, dtype=torch.bool)

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self.present.zero_()

    @property
    def keys(self) -> torch.Tensor:
        """``[layers, kv_heads, n_ctx, key_dim]``."""
        return self._tensors()[0]

    @property
    def values(self) -> torch.Tensor:
        """``[layers, kv_heads, n_ctx, value_dim]``."""
        return self._tensors()[1]

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._memory is None:
            self._memory = allocate(*self._make)
        return self._memory

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The positions within ``start`` to ``stop`` that are present, int64 on the host."""
        return torch.nonzero(self.present[start:stop])[:, 0] + start


class KeptRuns:
    """Leading runs of earlier prompts, cloned; the least recently used goes first.

    room : tokens that all of them may have together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._runs: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []  # least recently used first

    def save(self, ids: list[int], cache: PromptCache) -> bool:
        """Keep the first ``len(ids)`` rows of ``cache``; False if there are none or too many."""
        n = len(ids)
        if not 0 < n <= self.room:
            return False
        for run in self._runs:
            if run[0][:n] == ids:
                self._use(run)
                return True
        self._runs = [run for run in self._runs if ids[: len(run[0])] != run[0]]  # those that the new one contains
        while self._runs and n + sum(len(run[0]) for run in self._runs) > self.room:
            del self._runs[0]
        self._runs.append((ids, cache.keys[:, :, :n].clone(), cache.values[:, :, :n].clone()))
        return True

    def restore(self, ids: Sequence[int], cache: PromptCache) -> int:
        """Put the longest kept run that ``ids`` begins with at the start of ``cache``; its length."""
        best, length = None, 0
        for run in self._runs:
            ends = min(len(run[0]), len(ids))
            common = next((i for i in range(ends) if run[0][i] != ids[i]), ends)
            if common > length:
                best, length = run, common
        if best is not None:
            self._use(best)
            cache.keys[:, :, :length] = best[1][:, :, :length]
            cache.values[:, :, :length] = best[2][:, :, :length]
        return length

    def _use(self, run: tuple[list[int], torch.Tensor, torch.Tensor]) -> None:
        self._runs = [other for other in self._runs if other is not run] + [run]


class RecordingCache(Cache):
    """Keeps what every layer puts in and gives it back as it is: for one pass over tokens that stand alone."""

    class Layer(DynamicLayer):
        """One layer's record."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Record and return the new rows."""
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
            return key_states, value_states

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[RecordingCache.Layer() for _ in range(layers)])

    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer that put some in."""
        return [(layer.keys, layer.values) for layer in self.layers if layer.keys is not None]  # type: ignore


def allocate(shape: KVShape, n_ctx: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized keys and values for ``n_ctx`` rows."""
    size = (shape.layers, shape.kv_heads, n_ctx)
    return (
        torch.empty(*size, shape.key_dim, dtype=dtype, device=device),
        torch.empty(*size, shape.value_dim, dtype=dtype, device=device),
    )
