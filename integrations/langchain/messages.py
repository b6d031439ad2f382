"""LangChain messages as prompt messages whose documents keep their boundaries.

Documents arrive by five ways, in this order: the ``documents=`` argument, ``ToolMessage.artifact``, ``text-plain``
content blocks, one ``text`` block a document, and known texts found again inside a plain prompt. A text that occurs in
the messages stays where it is; only a document of ``documents=`` that occurs nowhere is put in front of the last user
message. So the prompt's text never depends on what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.documents import Document as LCDocument
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, ToolMessage

from cachegen_rag.errors import ConfigError
from cachegen_rag.inputs import as_document, listed
from cachegen_rag.known_texts import MIN_MATCH_CHARS, KnownTexts
from cachegen_rag.prompt import Document, Message, with_documents

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "user", "function": "user"}
"""Roles that every chat template has. Tool results are user turns inside ``<tool_response>``, as Hermes and Qwen do."""


def convert(
    messages: Sequence[BaseMessage],
    documents: Iterable[Any] | None,
    known: KnownTexts,
    is_stored: Callable[[str], bool],
    instructions: str = "",
) -> list[Message]:
    """Prompt messages of LangChain messages and the documents given beside them.

    ``is_stored`` tells of a text block whether its KV is stored; ``instructions`` are added to the system message.

    Raises
    ------
    ConfigError
        A message holds what a text model cannot read (an image, audio, a file), or a document is no text.
    """
    given = [] if documents is None else [_document(item) for item in listed(documents)]
    turns = [_message(message, is_stored) for message in messages]
    text = "\n".join(part if isinstance(part, str) else part.text for turn in turns for part in turn.parts)
    missing = [document for document in given if document.text and document.text not in text]
    artifacts = [d for m in messages if isinstance(m, ToolMessage) for d in _artifact(m)]
    turns = KnownTexts([*artifacts, *given]).match(turns)  # the last of equal texts names it: the argument's
    turns = known.match(turns)
    if missing:  # in front of the last human message, also when tool results follow it
        asked = 1 + max((i for i, m in enumerate(messages) if m.type == "human"), default=len(messages) - 1)
        turns = with_documents(turns[:asked], missing) + turns[asked:]
    return _instruct(turns, instructions) if instructions else turns


def _message(message: BaseMessage, is_stored: Callable[[str], bool]) -> Message:
    role = message.role if isinstance(message, ChatMessage) else ROLES.get(message.type)
    if role is None:
        raise ConfigError(f"a {message.type!r} message has no place in a chat prompt")
    parts = list(_parts(message, is_stored))
    if isinstance(message, AIMessage):
        parts += [tool_call_text(call["name"], call["args"]) for call in message.tool_calls]
    elif isinstance(message, (ToolMessage, FunctionMessage)):
        if not any(parts):
            for number, document in enumerate(_artifact(message), 1):
                parts += ["\n\n" if number > 1 else "", document]
        parts = ["<tool_response>\n", *parts, "\n</tool_response>"]
    return Message(role, tuple(part for part in parts if not isinstance(part, str) or part))


def _parts(message: BaseMessage, is_stored: Callable[[str], bool]) -> Iterable[str | Document]:
    content = message.content
    if isinstance(content, str):
        yield content
        return
    blocks = [{"type": "text", "text": block} if isinstance(block, str) else block for block in content]
    several = sum(block.get("type") == "text" for block in blocks) > 1
    for block in blocks:
        kind, text = block.get("type"), block.get("text")
        if kind is not None and not isinstance(kind, str):
            raise ConfigError(f"the type of a content block must be a text, got {type(kind).__name__}")
        if kind == "text-plain" and isinstance(text, str):
            yield Document(text, block.get("id") or block.get("title"))
        elif isinstance(text, str) and kind in ("text", None):
            stored = several and len(text) >= MIN_MATCH_CHARS and is_stored(text)
            yield Document(text, block.get("id")) if stored else text
        elif kind not in ("tool_use", "tool_call", "tool_call_chunk", "reasoning", "thinking", "non_standard"):
            raise ConfigError(f"a {kind!r} content block was given, but this model reads text only")


def _artifact(message: BaseMessage) -> list[Document]:
    """The documents that a retriever tool attached to its result."""
    artifact = getattr(message, "artifact", None)
    if isinstance(artifact, LCDocument):
        artifact = [artifact]
    if not isinstance(artifact, (list, tuple)):
        return []
    return [as_document(item) for item in artifact if isinstance(item, LCDocument)]


def _document(item: Any) -> Document:
    if isinstance(item, dict) and isinstance(item.get("page_content"), str):
        return Document(item["page_content"], item.get("id"))
    return as_document(item)


def _instruct(turns: list[Message], instructions: str) -> list[Message]:
    """Add to the system message, or make one."""
    if turns and turns[0].role == "system":
        return [Message("system", (*turns[0].parts, "\n\n", instructions)), *turns[1:]]
    return [Message("system", (instructions,)), *turns]


def tool_call_text(name: str, arguments: object) -> str:
    """A tool call as the model writes it."""
    try:
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the arguments of a call of {name!r:.80} are no JSON: {error}") from error
    return f"<tool_call>\n{call}\n</tool_call>"
