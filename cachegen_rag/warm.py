"""The warm context: what documents are computed behind, so that their KV fits prompts that nobody has seen yet.

KV computed for a document alone carries a false attention sink and the features of a text's beginning; in a prompt
the document stands among others. So each document is computed behind generic passages in the model's own chat
template, whose rows are dropped, and the result is averaged over several such contexts (keys before rotary): an
estimate of the KV expected over contexts. It costs index time only. The contexts are ours, never the application's
system prompt: another system prompt still hits. Their token ids are part of the fingerprint.

Sources: fixed prefixes whose rows are dropped are from APE (Yang et al., 2025) and CacheClip (2025); passages as the
prefix and the average over contexts are ours, measured by ``cachegen-rag bench splice``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from cachegen_rag.correction import Correction, shipped_correction
from cachegen_rag.errors import ConfigError, ContextOverflowError
from cachegen_rag.fingerprint import canonical_bytes
from cachegen_rag.kv import KV
from cachegen_rag.models.base import KVModel, Session
from cachegen_rag.prompt import (
    DEFAULT_SEPARATOR,
    Document,
    Message,
    Tokenizer,
    build_prompt,
    plain_prompt,
    with_documents,
)

CONTEXTS = 3
"""How many contexts a document's KV is averaged over."""

PASSAGES = 2
"""Passages in each context."""

_INSTRUCTION = "Read the documents and answer the question from them."


def passages() -> list[str]:
    """The generic passages shipped with the package, about 200 tokens each."""
    text = files("cachegen_rag").joinpath("data/warm_passages.txt").read_text(encoding="utf-8")
    return [p.strip() for p in text.split("\n\n") if p.strip()]


@dataclass(frozen=True)
class WarmContext:
    """The contexts of one model, as token ids, each beginning as the model's prompts do.

    correction : applied to every document that is computed (see ``cachegen_rag.correction``), or None.
    ``digest`` (64 hex digits) identifies contexts and correction. The engine keeps each context's KV
    (``Session.keep``), so that further documents cost no more than their own tokens.
    """

    contexts: tuple[tuple[int, ...], ...]
    n_ctx: int
    correction: Correction | None = None

    @staticmethod
    def for_model(
        model: KVModel,
        *,
        contexts: int = CONTEXTS,
        passages_each: int = PASSAGES,
        separator: str = DEFAULT_SEPARATOR,
        correction: Correction | Literal["shipped"] | None = "shipped",
    ) -> WarmContext:
        """The canonical contexts of ``model``. ``contexts=0``: documents are computed behind a BOS alone.

        separator : what stands before each passage, and before the document that is computed.
        correction : by default the one that ships for models of this family, if any does.

        Raises
        ------
        ConfigError
            More passages are asked for than the package ships.
        """
        texts = passages()
        if contexts * passages_each > len(texts):
            raise ConfigError(
                f"{contexts} warm contexts of {passages_each} passages need {contexts * passages_each} passages; "
                f"{len(texts)} are shipped"
            )
        groups = [texts[n * passages_each : (n + 1) * passages_each] for n in range(contexts)]
        ids = tuple(context_ids(model, group, separator) for group in groups) or (
            () if model.bos_id is None else (model.bos_id,),
        )
        if correction == "shipped":
            correction = shipped_correction(model.fingerprint)
        return WarmContext(ids, model.n_ctx, correction)

    @property
    def digest(self) -> str:
        """SHA-256 of the contexts' token ids and the correction: goes into ``ModelFingerprint.context``."""
        made_of = [list(self.contexts), None if self.correction is None else self.correction.hash]
        return hashlib.sha256(b"cachegen-rag warm 1" + canonical_bytes(made_of)).hexdigest()

    @property
    def tokens(self) -> int:
        """Tokens of the longest context."""
        return max(len(ids) for ids in self.contexts)

    def compute(self, session: Session, token_ids: Sequence[int]) -> KV:
        """The KV of one document; see :meth:`compute_many`."""
        return next(self.compute_many(session, [token_ids]))

    def compute_many(self, session: Session, documents: Sequence[Sequence[int]]) -> Iterator[KV]:
        """The KV of each document behind the contexts, in order: float32, rotation removed, positions from 0.

        The session's prompt is replaced. All documents are held in memory at once: pass batches.
        A document too long to stand behind a whole context is computed behind the context's beginning.

        Raises
        ------
        ContextOverflowError
            A document alone is longer than the model's context.
        """
        for document in documents:
            if len(document) > self.n_ctx:
                raise ContextOverflowError(
                    f"a document of {len(document)} tokens is longer than the context of {self.n_ctx} tokens: "
                    f"split it, or load the model with a larger n_ctx"
                )
        sums: list[KV | None] = [None] * len(documents)
        for context in self.contexts:
            start = 0
            session.truncate(0)
            for index, document in enumerate(documents):
                room = min(len(context), self.n_ctx - len(document))
                if start > room:
                    session.truncate(room)
                elif start < room:
                    session.truncate(0)
                    self._begin(session, context[:room])
                start = room
                session.decode(document)
                kv = session.export(start, start + len(document))
                session.truncate(start)
                sums[index] = _add(sums[index], kv)
        for index, total in enumerate(sums):
            sums[index] = None
            assert total is not None
            mean = _scaled(total, 1.0 / len(self.contexts))
            yield mean if self.correction is None else self.correction.apply(mean)

    def _begin(self, session: Session, context: Sequence[int]) -> None:
        """Put ``context`` on an empty session: what an earlier session kept of it, and the rest computed."""
        at = session.reuse(context) if context else 0
        if at < len(context):
            session.decode(context[at:])
            session.keep()


def context_ids(model: Tokenizer, texts: Sequence[str], separator: str = DEFAULT_SEPARATOR) -> tuple[int, ...]:
    """A prompt of these documents in the model's chat template, up to where one more document would begin."""
    documents = [Document(text) for text in [*texts, "next"]]
    try:
        prompt = build_prompt(model, with_documents([Message.of("user", _INSTRUCTION)], documents, separator))
    except ConfigError:  # the template refuses so plain a chat: what matters is the text
        prompt = plain_prompt(model, [part for d in documents for part in (separator, d)])
    return tuple(prompt.token_ids[: prompt.offsets[prompt.documents[-1]]])


def _float32(array: Any) -> Any:
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float()


def _add(total: KV | None, kv: KV) -> KV:
    keys, values = _float32(kv.keys), _float32(kv.values)
    if total is not None:
        keys, values = total.keys + keys, total.values + values
    return KV(keys, values, kv.token_ids, kv.positions)


def _scaled(kv: KV, factor: float) -> KV:
    return KV(kv.keys * factor, kv.values * factor, kv.token_ids, kv.positions)
