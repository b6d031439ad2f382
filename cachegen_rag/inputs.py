"""What applications hand in as documents and messages, as ours."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from cachegen_rag.errors import ConfigError
from cachegen_rag.prompt import Document, Message


def as_document(item: Any) -> Document:
    """A text, a Document, or anything with ``page_content`` (and ``id``) as a Document."""
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    text = getattr(item, "page_content", None)
    if not isinstance(text, str):
        raise ConfigError(f"a document is a text or has page_content, got {type(item).__name__}")
    identity = getattr(item, "id", None)
    return Document(text, None if identity is None else str(identity))


def listed(documents: Any) -> list[Any]:
    """Documents as a list. Raises ConfigError for a single one: a text is no list of texts."""
    single = isinstance(documents, (str, bytes, Mapping, Document)) or hasattr(documents, "page_content")
    if single or not isinstance(documents, Iterable):
        raise ConfigError(f"documents must be a list of texts or documents, got {type(documents).__name__}")
    return list(documents)


def as_message(item: Any) -> Message:
    """A Message, or a mapping of ``role`` and ``content`` (a text, or None for none) as a Message."""
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        raise ConfigError(f"a message is a Message or a mapping with role and content, got {type(item).__name__}")
    return Message.of(item["role"], "" if item["content"] is None else item["content"])


def as_token_ids(name: str, ids: Any) -> list[int]:
    """A sequence of whole numbers, not empty, as a list of int."""
    try:
        items = list(ids)
        if isinstance(ids, (str, bytes)) or any(isinstance(i, bool) for i in items):
            raise TypeError
        out = [operator.index(i) for i in items]
    except TypeError:
        raise ConfigError(f"{name} must be a list of token ids, got {ids!r:.80}") from None
    if not out:
        raise ConfigError(f"{name} is empty: it needs at least one token id")
    return out
