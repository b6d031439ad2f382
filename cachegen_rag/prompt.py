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
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cachegen_rag.errors import ConfigError, ContextOverflowError

DEFAULT_SEPARATOR = "\n\nPassage:\n\n"
"""What :func:`with_documents` puts before each document. ``{number}`` in it counts from 1, but a separator that is the
same everywhere, in the warm context too, is one the model has seen before and splices better behind."""

MIN_MATCH_CHARS = 32
"""Shorter texts are not looked for inside a plain prompt: a false match costs more than a splice saves."""

# Private-use characters, which no template produces or strips, and a number that nobody outside this process knows:
# what a caller hands to the template (roles are checked, template_args are not) cannot act as a placeholder.
_OPEN, _CLOSE = f"\ue000{secrets.randbits(64)}.", "\ue001"
_PLACEHOLDER = re.compile(re.escape(_OPEN) + "(b|e|[0-9]+)" + _CLOSE)
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BOS, _EOS = f"{_OPEN}b{_CLOSE}", f"{_OPEN}e{_CLOSE}"


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
                marks.append(f"{_OPEN}{len(parts)}{_CLOSE}")
                parts.append(part)
        turns.append({"role": message.role, "content": "".join(marks)})
    if model.chat_template:
        rendered = _render(model.chat_template, turns, add_generation_prompt, dict(template_args or {}))
    else:
        rendered = _plain(turns, add_generation_prompt)
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


class KnownTexts:
    """Texts of known documents, found again inside plain text: exact matches, the longest first, left to right.

    Thread-safe.
    """

    def __init__(self, documents: Iterable[Document] = (), min_chars: int = MIN_MATCH_CHARS) -> None:
        self._anchor = max(1, min_chars)
        self._by_anchor: dict[str, dict[str, Document]] = {}
        self._lock = threading.Lock()
        for document in documents:
            self.add(document)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(texts) for texts in self._by_anchor.values())

    def add(self, document: Document) -> None:
        """Know this document; one shorter than ``min_chars`` is never matched and is ignored."""
        if len(document.text) >= self._anchor:
            with self._lock:
                self._by_anchor.setdefault(document.text[: self._anchor], {})[document.text] = document

    def discard(self, text: str) -> None:
        """Forget this text."""
        with self._lock:
            texts = self._by_anchor.get(text[: self._anchor], {})
            texts.pop(text, None)
            if not texts:
                self._by_anchor.pop(text[: self._anchor], None)

    def split(self, text: str) -> list[str | Document]:
        """``text`` as texts and documents in order; joined again they are ``text`` to the character."""
        out: list[str | Document] = []
        if not self._by_anchor:
            return [text] if text else []
        start = at = 0
        while at + self._anchor <= len(text):
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            if at > start:
                out.append(text[start:at])
            out.append(found)
            at += len(found.text)
            start = at
        if start < len(text):
            out.append(text[start:])
        return out

    def _longest(self, text: str, at: int) -> Document | None:
        """The longest known text that ``text`` has at ``at``."""
        texts = self._by_anchor.get(text[at : at + self._anchor])
        if not texts:
            return None
        with self._lock:
            return max((d for t, d in texts.items() if text.startswith(t, at)), key=_length, default=None)

    def match(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` with every known text in their plain parts turned into a document."""
        out = []
        for message in messages:
            pieces = [[p] if isinstance(p, Document) else self.split(p) for p in message.parts]
            out.append(Message(message.role, tuple(itertools.chain.from_iterable(pieces))))
        return out


def _length(document: Document) -> int:
    return len(document.text)


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
    for n, piece in enumerate(_PLACEHOLDER.split(rendered)):
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


@functools.lru_cache(maxsize=16)
def _template(source: str) -> Any:
    """Compile a chat template as transformers does, in jinja2's sandbox: a template is the model file's, not ours."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be read: {error}") from error


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _render(source: str, turns: list[dict[str, str]], generation: bool, arguments: dict[str, Any]) -> str:
    """Render; a template that refuses system messages gets them in front of the first user message."""
    import jinja2

    template = _template(source)

    def render(messages: list[dict[str, str]]) -> str:
        return str(
            template.render(
                messages=messages, add_generation_prompt=generation, bos_token=_BOS, eos_token=_EOS, **arguments
            )
        )

    try:
        return render(turns)
    except jinja2.TemplateError as error:
        system = [t["content"] for t in turns if t["role"] == "system"]
        others = [dict(t) for t in turns if t["role"] != "system"]
        if system and others:
            others[0]["content"] = "\n\n".join([*system, others[0]["content"]])
            try:
                return render(others)
            except jinja2.TemplateError:
                pass
        raise ConfigError(f"the model's chat template refuses these messages: {error}") from error


def _plain(turns: list[dict[str, str]], generation: bool) -> str:
    def line(role: str, content: str) -> str:
        return f"{content}\n\n" if role == "system" else f"{role.title()}: {content}\n"

    return "".join(line(**turn) for turn in turns) + ("Assistant:" if generation else "")
