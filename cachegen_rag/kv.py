"""KV: keys and values of a run of tokens, the one large object of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import EncodeError


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's KV: the same for every layer of a model.

    ``value_dim`` may differ from ``key_dim``; ``kv_heads`` is the number of key/value heads (GQA, MQA).
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_channels(self) -> int:
        """Key channels of a layer: ``kv_heads * key_dim``."""
        return self.kv_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Value channels of a layer: ``kv_heads * value_dim``."""
        return self.kv_heads * self.value_dim

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return self.layers * (self.key_channels + self.value_channels)

    @property
    def fp16_bytes_per_token(self) -> int:
        """Bytes one token takes in an fp16 cache."""
        return 2 * self.elements_per_token


@dataclass(frozen=True, eq=False)
class KV:
    """Keys and values of a run of tokens, with rotary position removed from the keys.

    keys : floating array ``[layers, tokens, kv_heads, key_dim]``, rotary position removed, rotary pairs in
        canonical order: channels ``2i`` and ``2i + 1`` of the first ``rotary_dim`` form a pair.
    values : floating array ``[layers, tokens, kv_heads, value_dim]``.
    token_ids : int32 ``[tokens]``.
    positions : int32 ``[tokens]``, strictly increasing, counted from the start of the document. They may
        have gaps (a pruned cache).

    Raises
    ------
    EncodeError
        The arrays do not fit together.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.values.ndim != 4:
            raise EncodeError(
                f"keys and values must be [layers, tokens, kv_heads, dim]; got {self.keys.shape}, {self.values.shape}"
            )
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise EncodeError(
                f"keys {self.keys.shape} and values {self.values.shape} disagree on layers, tokens or heads"
            )
        tokens = self.keys.shape[1]
        if self.token_ids.shape != (tokens,) or self.positions.shape != (tokens,):
            raise EncodeError(
                f"{tokens} tokens of KV need {tokens} token ids and positions; "
                f"got {self.token_ids.shape} and {self.positions.shape}"
            )
        if tokens and (self.positions[0] < 0 or np.any(np.diff(self.positions) <= 0)):
            raise EncodeError("positions must be non-negative and strictly increasing")

    @property
    def shape(self) -> KVShape:
        """The shape of one token's KV."""
        layers, _, heads, key_dim = self.keys.shape
        return KVShape(layers, heads, key_dim, self.values.shape[3])

    def __len__(self) -> int:
        return int(self.keys.shape[1])

    def __getitem__(self, rows: slice) -> KV:
        """The KV of a slice of the tokens (a view)."""
        return KV(self.keys[:, rows], self.values[:, rows], self.token_ids[rows], self.positions[rows])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return int(self.keys.nbytes + self.values.nbytes)


def as_numpy(array: Any) -> NDArray[Any]:
    """A numpy array as it is; a tensor, on whatever device, as a numpy array on the host (float32 for bfloat16)."""
    if isinstance(array, np.ndarray):
        return array
    tensor = array.detach()
    on_host: NDArray[Any] = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).cpu().numpy()
    return on_host


def concatenate(parts: list[KV]) -> KV:
    """Join KVs of consecutive chunks of one document along the token axis.

    Raises
    ------
    EncodeError
        ``parts`` is empty, or positions do not increase from part to part.
    """
    if not parts:
        raise EncodeError("concatenate needs at least one KV")
    return KV(
        np.concatenate([as_numpy(p.keys) for p in parts], axis=1),
        np.concatenate([as_numpy(p.values) for p in parts], axis=1),
        np.concatenate([p.token_ids for p in parts]),
        np.concatenate([p.positions for p in parts]),
    )
