"""What a changed KV does to a model: KL, perplexity and top-1 agreement on the text that follows, with intervals.

How codecs and splices are judged: the model reads a prefix and a document exactly, then continues a given text
("teacher forcing"); it does so again with the document's KV replaced; the two distributions are compared token by
token. KL is KL(exact || changed) in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVModel, KVTarget

RESAMPLES = 2000
_ROWS = 32  # rows of logits that are converted to float64 at a time


@dataclass(frozen=True, eq=False)
class Exact:
    """The exact run of one document: its KV, and logits float32 ``[tokens, vocabulary]`` of the continuation."""

    kv: KV
    logits: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Difference:
    """One document's continuation, token by token; every array is float64 ``[tokens]``.

    kl : nats. exact_nll, changed_nll : negative log likelihood of the token that follows, nats (one fewer).
    agree : 1.0 where the most likely token is the same.
    """

    kl: NDArray[np.float64]
    exact_nll: NDArray[np.float64]
    changed_nll: NDArray[np.float64]
    agree: NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval over documents."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Quality:
    """``kl`` in nats per token, ``dppl`` the relative change of perplexity, ``top1`` the share of agreeing tokens."""

    kl: Interval
    dppl: Interval
    top1: Interval
    documents: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Flat and JSON-ready: ``kl``, ``kl_low``, ``kl_high`` and so on."""
        flat: dict[str, Any] = {"documents": self.documents, "tokens": self.tokens}
        for name in ("kl", "dppl", "top1"):
            interval = asdict(getattr(self, name))
            flat |= {name: interval["value"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
        return flat


def exact_run(
    model: KVModel, document: NDArray[np.int32], continuation: NDArray[np.int32], *, prefix: Sequence[int] = ()
) -> Exact:
    """Compute prefix, document and continuation exactly."""
    with model.session() as session:
        if len(prefix):
            session.decode(list(prefix))
        start = session.length
        session.decode(document.tolist())
        kv = session.export(start, session.length)
        logits = session.decode(continuation.tolist(), logits=True)
    assert logits is not None
    return Exact(kv, logits)


def changed_run(
    model: KVModel,
    document: NDArray[np.int32],
    continuation: NDArray[np.int32],
    fill: Callable[[KVTarget], None],
    *,
    prefix: Sequence[int] = (),
) -> NDArray[np.float32]:
    """Logits of the continuation when ``fill`` writes the document's KV instead of the model."""
    with model.session() as session:
        if len(prefix):
            session.decode(list(prefix))
        start, stop = session.length, session.length + len(document)
        target = session.stage(np.arange(start, stop, dtype=np.int32))
        fill(target)
        session.commit(target, document.tolist())
        session.take(start, stop, document.tolist())
        logits = session.decode(continuation.tolist(), logits=True)
    assert logits is not None
    return logits


def difference(exact: NDArray[np.float32], changed: NDArray[np.float32], continuation: NDArray[np.int32]) -> Difference:
    """Compare logits ``[tokens, vocabulary]`` of two runs over the same continuation ``[tokens]``."""
    tokens = len(continuation)
    kl, exact_nll, changed_nll = (np.zeros(tokens) for _ in range(3))
    for rows in (slice(i, i + _ROWS) for i in range(0, tokens, _ROWS)):
        p, q = _log_softmax(exact[rows]), _log_softmax(changed[rows])
        kl[rows] = np.sum(np.exp(p) * (p - q), axis=1)
        follows = np.append(continuation, 0)[1:][rows]
        here = np.arange(len(p))
        exact_nll[rows], changed_nll[rows] = -p[here, follows], -q[here, follows]
    agree = (exact.argmax(1) == changed.argmax(1)).astype(np.float64)
    return Difference(kl, exact_nll[:-1], changed_nll[:-1], agree)


def summarize(differences: Sequence[Difference], *, seed: int = 0) -> Quality:
    """Pool the documents; intervals by resampling whole documents (tokens of one document are not independent)."""
    rows = np.array(
        [
            (d.kl.sum(), len(d.kl), (d.changed_nll - d.exact_nll).sum(), len(d.exact_nll), d.agree.sum())
            for d in differences
        ]
    )
    draws = np.random.default_rng(seed).integers(len(rows), size=(RESAMPLES, len(rows)))
    samples = rows[draws].sum(axis=1)

    def interval(of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Interval:
        low, high = np.percentile(of(samples), [2.5, 97.5])
        return Interval(float(of(rows.sum(axis=0)[None])[0]), float(low), float(high))

    return Quality(
        kl=interval(lambda s: s[:, 0] / s[:, 1]),
        dppl=interval(lambda s: np.expm1(s[:, 2] / s[:, 3])),
        top1=interval(lambda s: s[:, 4] / s[:, 1]),
        documents=len(rows),
        tokens=int(rows[:, 1].sum()),
    )


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
