"""Prompts as segments: token ids split around the documents, the same in the spliced and in the text path.

Only the model's template pieces are tokenized with control tokens. What the application or a document says is data:
it never passes through the template engine, and it is tokenized piece by piece with ``special=False``. So a prompt's
ids are the concatenation of its pieces' ids whether a document is taken from the store or computed, and ids, never
text, are spliced.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cachegen_rag.chat_template import PLACEHOLDER, placeholder, render, render_plain
from cachegen_rag.errors import ConfigError, ContextOverflowError

DEFAULT_SEPARATOR = "\n\nPassage:\n\n"
"""What :func:`with_documents` puts before each document. ``{number}`` in it counts from 1, but a separator that is the
same everywhere, in the warm context too, is one the model has seen before and splices better behind."""

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Tokenizer(Protocol):
    """The part of a KVModel that building a prompt needs."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def chat_template(self) -> str | None: ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...


@dataclass(frozen=True)
class Document:
    """A document inside a message. ``doc_id`` is the application's own name for it and plays no part in its key.

    Raises ConfigError if ``text`` is no string, or ``doc_id`` neither a string nor None.
    """

    text: str
    doc_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ConfigError(f"a document's text must be a string, got {type(self.text).__name__}")
        if self.doc_id is not None and not isinstance(self.doc_id, str):  # it goes into records, which are JSON
            raise ConfigError(f"a document's id must be a string or None, got {type(self.doc_id).__name__}")


@dataclass(frozen=True)
class Message:
    """One chat message: a role and its content, texts and documents in order.

    The role is the one thing of a message that passes through the chat template and is tokenized with control tokens.
    So it is a plain word.

    Raises ConfigError if the role is none, or a part is neither text nor document.
    """

    role: str
    parts: tuple[str | Document, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise ConfigError(f"a message's role must be 1 to 64 letters, digits, - or _, got {self.role!r:.100}")
        for part in self.parts:
            if not isinstance(part, (str, Document)):
                raise ConfigError(f"a message's content must be texts and documents, got {type(part).__name__}")

    @staticmethod
    def of(role: str, *parts: str | Document) -> Message:
        """A message of these parts."""
        return Message(role, parts)


@dataclass(frozen=True)
class Segment:
    """A run of the prompt that is decoded or spliced as one. ``cut`` counts document tokens left out for length."""

    kind: Literal["text", "document"]
    token_ids: tuple[int, ...]
    text: str = field(default="", repr=False)
    doc_id: str | None = None
    cut: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Prompt:
    """Segments in order. Text segments are never adjacent; documents may be, and may be empty."""

    segments: tuple[Segment, ...]

    @functools.cached_property
    def token_ids(self) -> list[int]:
        """All ids, in order."""
        return [i for s in self.segments for i in s.token_ids]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment starts, and the prompt's length: one number more than there are segments."""
        return tuple(itertools.accumulate((len(s) for s in self.segments), initial=0))

    @property
    def documents(self) -> list[int]:
        """Indices of the document segments."""
        return [i for i, s in enumerate(self.segments) if s.kind == "document"]

    def __len__(self) -> int:
        return self.offsets[-1]

    def require_fits(self, n_ctx: int, answer: int = 1) -> None:
        """Check that the prompt and ``answer`` generated tokens fit.

        Raises
        ------
        ContextOverflowError
            They do not; the message names the numbers.
        """
        if len(self) + answer > n_ctx:
            documents = sum(len(self.segments[i]) for i in self.documents)
            raise ContextOverflowError(
                f"the prompt has {len(self)} tokens ({documents} of them in {len(self.documents)} documents) and "
                f"{answer} for the answer, but the context holds {n_ctx}: pass fewer or shorter documents, "
                f"set max_document_tokens, or load the model with a larger n_ctx"
            )


def document_tokens(model: Tokenizer, text: str, max_tokens: int | None = None) -> tuple[tuple[int, ...], int]:
    """Ids of a document and how many were cut; used at index time and at query time, so both cut alike.

    A document never carries a BOS, and control-token markup in it stays text.
    """
    ids = tuple(model.tokenize(text, special=False)) if text else ()
    if max_tokens is not None and len(ids) > max_tokens:
        return ids[:max_tokens], len(ids) - max_tokens
    return ids, 0


def build_prompt(
    model: Tokenizer,
    messages: Sequence[Message],
    *,
    max_document_tokens: int | None = None,
    add_generation_prompt: bool = True,
    template_args: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render ``messages`` with the model's chat template, split around the documents, and tokenize the pieces.

    The prompt begins with exactly one BOS if the model takes one, and with none otherwise, whatever the template adds.
    A model without a template gets ``role: content`` lines. ``template_args`` are further template variables.

    Raises
    ------
    ConfigError
        There is no message, the template cannot be rendered, or it loses or repeats a document.
    """
    if not messages:
        raise ConfigError("messages is empty: a prompt needs at least one message")
    parts: list[str | Document] = []
    turns: list[dict[str, str]] = []
    for message in messages:
        marks = []
        for part in message.parts:
            if isinstance(part, Document) or part:
                marks.append(placeholder(len(parts)))
                parts.append(part)
        turns.append({"role": message.role, "content": "".join(marks)})
    if model.chat_template:
        rendered = render(model.chat_template, turns, add_generation_prompt, dict(template_args or {}))
    else:
        rendered = render_plain(turns, add_generation_prompt)
    return _tokenize(model, rendered, parts, max_document_tokens)


def plain_prompt(
    model: Tokenizer, parts: Sequence[str | Document], *, max_document_tokens: int | None = None, special: bool = False
) -> Prompt:
    """A prompt without a chat template: these texts and documents, one BOS in front if the model takes one.

    ``special=True`` lets control tokens in the texts (not in the documents) be control tokens: for a prompt that the
    application rendered itself.
    """
    segments: list[Segment] = []
    pending = _Text(model)
    for part in parts:
        if isinstance(part, Document):
            segments += pending.flush()
            segments.append(_document(model, part, max_document_tokens))
        else:
            pending.add(part, special=special)
    return _with_bos(model, segments + pending.flush())


def with_documents(
    messages: Sequence[Message], documents: Sequence[Document], separator: str = DEFAULT_SEPARATOR
) -> list[Message]:
    """Put ``documents`` in front of the last user message's own text, each behind its separator.

    Raises
    ------
    ConfigError
        There is no user message.
    """
    if not documents:
        return list(messages)
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        raise ConfigError("documents were given without a user message to put them in")
    parts: list[str | Document] = []
    for number, document in enumerate(documents, 1):
        heading = separator.format(number=number)
        parts += [heading.lstrip("\n") if number == 1 else heading, document]
    out = list(messages)
    out[last] = Message(out[last].role, (*parts, "\n\n", *out[last].parts))
    return out


class _Text:
    """Collects adjacent pieces of text into one segment."""

    def __init__(self, model: Tokenizer) -> None:
        self._model = model
        self._ids: list[int] = []
        self._texts: list[str] = []

    def add(self, text: str, *, special: bool) -> None:
        if text:
            self._ids += self._model.tokenize(text, special=special)
            self._texts.append(text)

    def add_eos(self) -> None:
        """The template's EOS variable (between the turns of some templates), by id: engines differ in its text."""
        eos = getattr(self._model, "eos_id", None)
        if eos is not None:
            self._ids.append(int(eos))

    def flush(self) -> list[Segment]:
        out = [Segment("text", tuple(self._ids), "".join(self._texts))] if self._ids else []
        self._ids, self._texts = [], []
        return out


def _document(model: Tokenizer, document: Document, max_tokens: int | None) -> Segment:
    ids, cut = document_tokens(model, document.text, max_tokens)
    return Segment("document", ids, document.text, document.doc_id, cut)


def _tokenize(model: Tokenizer, rendered: str, parts: Sequence[str | Document], max_tokens: int | None) -> Prompt:
    """Cut a rendered template at its placeholders and tokenize piece by piece."""
    segments: list[Segment] = []
    pending = _Text(model)
    seen: list[int] = []
    for n, piece in enumerate(PLACEHOLDER.split(rendered)):
        if n % 2 == 0:
            pending.add(piece, special=True)
        elif piece == "e":
            pending.add_eos()
        elif piece != "b":  # the template's BOS variable: ours is put in front, once
            part = parts[int(piece)]
            if isinstance(part, Document):
                seen.append(int(piece))
                segments += pending.flush()
                segments.append(_document(model, part, max_tokens))
            else:
                pending.add(part, special=False)
    wanted = [i for i, part in enumerate(parts) if isinstance(part, Document)]
    if sorted(seen) != wanted:
        raise ConfigError(
            f"the chat template renders {len(seen)} of {len(wanted)} documents (it loses or repeats some): "
            f"put documents into messages whose role the template keeps"
        )
    return _with_bos(model, segments + pending.flush())


def _with_bos(model: Tokenizer, segments: list[Segment]) -> Prompt:
    """Exactly one BOS in front if the model takes one: those that the template spelled out are taken off first."""
    bos = model.bos_id
    if bos is None:
        return Prompt(tuple(segments))
    first = segments[0] if segments and segments[0].kind == "text" else Segment("text", ())
    rest = segments[1:] if segments and segments[0].kind == "text" else segments
    ids = tuple(itertools.dropwhile(lambda i: i == bos, first.token_ids))
    return Prompt((Segment("text", (bos, *ids), first.text), *rest))
