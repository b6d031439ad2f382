"""What tests of the engines share: fill a target from an exported KV, and answer with and without it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVTarget, Sampling
from cachegen_rag.rope import from_interleaved, rotate

TEXT = "the king of the river city and the stone name in a question first answer "


def fill(target: KVTarget, kv: KV) -> None:
    """Write ``kv`` to the rows of ``target``, rotated to its positions."""
    keys = from_interleaved(rotate(kv.keys, target.positions, target.rope), target.rope)
    for layer in range(kv.shape.layers):
        target.keys[layer][...] = keys[layer]
        target.values[layer][...] = kv.values[layer]


def export(model: Any, prefix: list[int], document: list[int]) -> KV:
    """The KV of ``document`` computed behind ``prefix``."""
    with model.session() as session:
        session.decode(prefix)
        session.decode(document)
        return session.export(len(prefix), len(prefix) + len(document))


def splice(session: Any, kv: KV, start: int) -> None:
    """Stage, commit and take ``kv`` at position ``start``."""
    target = session.stage(kv.positions + np.int32(start))
    fill(target, kv)
    session.commit(target)
    stop = start + int(kv.positions[-1]) + 1
    ids = np.zeros(stop - start, np.int32)
    ids[kv.positions] = kv.token_ids
    session.take(start, stop, ids.tolist())


def text_logits(model: Any, *segments: list[int]) -> np.ndarray:
    """Logits of the last segment of a prompt computed in full, segment by segment (the batches decide the rounding)."""
    with model.session() as session:
        for segment in segments[:-1]:
            session.decode(segment)
        return session.decode(segments[-1], logits=True)


def answer(session: Any, **sampling: Any) -> str:
    """The generated text."""
    return "".join(token.text for token in session.generate(Sampling(**{"max_tokens": 16, **sampling})))
