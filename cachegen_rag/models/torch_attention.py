"""Attention over a spliced cache, as an attention function that transformers itself looks up by name.

A model whose ``attn_implementation`` is :data:`NAME` calls :func:`attend` in every layer. During a :class:`Step` it
masks by the positions of queries and cached rows, so rows may lie anywhere in the prompt; outside one it is SDPA.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "cachegen_rag"


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


@contextmanager
def running(step: Step | None) -> Iterator[None]:
    """Make ``step`` the one that :func:`attend` follows in this thread."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


class Step:
    """One forward pass: which positions are computed, and which the cache holds once they are in it.

    positions : of the tokens that are computed, increasing.
    rows : positions of all rows that the cache holds once they are in it, increasing.
    keep_queries : collect every layer's queries, each ``[heads, n, key_dim]``, in ``collected``.
    """

    def __init__(
        self, positions: Sequence[int], rows: Sequence[int], device: torch.device, *, keep_queries: bool = False
    ) -> None:
        self.positions = torch.tensor(positions, device=device)
        self.collected: list[torch.Tensor] | None = [] if keep_queries else None
        self._rows, self._masks = rows, dict[int | None, torch.Tensor | None]()
        n = len(positions)
        # All rows are computed in this pass, or the one query comes last: the kernel's own causal mask is right.
        self._causal = n == len(rows) or (n == 1 and positions[0] == rows[-1])
        self._span = rows[-1] - rows[0] + 1 if rows else 0

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Boolean ``[1, 1, n, cells]``, true where a query sees a row; None where plain causal attention does."""
        if window is not None and window >= self._span:
            window = None
        if window not in self._masks:
            self._masks[window] = None if self._causal and window is None else self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> torch.Tensor:
        rows = torch.tensor(self._rows, device=self.positions.device)
        distance = self.positions[:, None] - rows[None, :]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return seen[None, None]


def forward(model: Any, ids: torch.Tensor, cache: Any, keep: int, step: Step | None = None) -> torch.Tensor:
    """One pass over ``ids [1, n]``; logits ``[keep, vocabulary]`` of the last ``keep`` tokens.

    With a ``step`` the tokens have its positions and see its rows; without, they follow what ``cache`` holds.
    """
    kind: Any = type(model)
    parameters = _parameters(kind)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    # Renamed during transformers 5.
    arguments["cache" if "cache" in parameters else "past_key_values"] = cache
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = keep
    if step is not None:
        # The mask only keeps transformers from making its own: `attend` takes the step's.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        arguments |= {"position_ids": step.positions[None], "attention_mask": mask}
    with running(step):
        logits: torch.Tensor = model(**arguments).logits
    return logits[0, -keep:]


@lru_cache
def _parameters(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: query ``[1, heads, n, dim]``, key and value ``[1, kv_heads, cells, dim]``."""
    step = _current.step
    if step is not None:
        if step.collected is not None:
            step.collected.append(query[0])
        attention_mask = step.mask(kwargs.get("sliding_window"))
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # Soft-capped logits and attention sinks: only the model's own eager function knows them; its mask is added.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    n, cells = query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(n, cells, dtype=torch.bool, device=query.device).tril(cells - n)[None, None]
    if attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    result: tuple[torch.Tensor, torch.Tensor | None] = eager(module, query, key, value, attention_mask, **kwargs)
    return result


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
