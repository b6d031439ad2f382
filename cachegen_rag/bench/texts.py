"""Texts that benchmarks measure on, cut into documents. Half of all pieces of text is held out, decided by a hash.

Profiles are calibrated and settings tuned on the other half only, so no figure is reported on a text that anything
was fitted to. A piece is the unit in which texts recur: LongChat prompts are shuffles of one pool of conversations,
and MuSiQue questions share passages, so a division by prompt or question would not hold anything out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import KVModel

Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
KEY_CHARS = 200
"""Pieces that begin with the same so many letters are the same piece."""
_CONVERSATION = re.compile(r"(?=USER: I would like to discuss the topic of )")


@dataclass(frozen=True)
class Texts:
    """Long texts, one a source and half: to fit things on, and to report on. No piece occurs twice or in both."""

    tuned: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Passage:
    """A document and the text that follows it: token ids int32, the first of a text or from its middle."""

    document: NDArray[np.int32]
    continuation: NDArray[np.int32]


def is_held_out(piece: str) -> bool:
    """Whether a piece of text belongs to the half that nothing is tuned on."""
    return bool(hashlib.sha256(_key(piece).encode()).digest()[0] & 1)


def load(data: Data = None) -> Texts:
    """Texts of files: MuSiQue-like ``.json`` (passages), ``.jsonl`` with ``prompt`` or ``text``, plain text.

    A directory stands for its files. None: the texts shipped with the package and the manual that ships with Python.
    A text of a single piece, such as a plain file, is divided at its paragraphs.

    Raises
    ------
    ConfigError
        A path does not exist, or holds no text.
    """
    if data is None:
        sources = [pieces for pieces in (list(_shipped()), list(_python_manual())) if pieces]
    else:
        paths = [data] if isinstance(data, (str, os.PathLike)) else list(data)
        sources = [pieces for path in paths for pieces in _sources(Path(path)) if pieces]
    seen: set[str] = set()
    tuned, held_out = [], []
    for pieces in sources:
        halves: tuple[list[str], list[str]] = ([], [])
        for piece in pieces if len(pieces) > 1 else _paragraphs(pieces[0]):
            if piece.strip() and _key(piece) not in seen:
                seen.add(_key(piece))
                halves[is_held_out(piece)].append(piece.strip())
        tuned += ["\n\n".join(halves[0])] * bool(halves[0])
        held_out += ["\n\n".join(halves[1])] * bool(halves[1])
    if not tuned and not held_out:
        raise ConfigError(f"data={data!r}: no texts in there")
    return Texts(tuple(tuned), tuple(held_out))


def shipped_text() -> str:
    """One long held-out text, from those that :func:`load` finds by default."""
    return "\n\n".join(load().held_out)


def passages(model: KVModel, texts: Sequence[str], *, tokens: int, continuation: int, count: int) -> list[Passage]:
    """``count`` passages of ``tokens`` tokens with the ``continuation`` tokens that follow them.

    The first window of every text is taken, then the second of every text, and so on, so that few texts are needed
    and many are used. The first token is BOS where the model takes one.

    Raises
    ------
    ConfigError
        The texts do not yield so many.
    """
    size = tokens + continuation
    ids = [np.asarray(model.tokenize(text[: 8 * size * count]), np.int32) for text in texts]
    found: list[Passage] = []
    for window in range(count):
        for text in ids:
            piece = text[window * size : (window + 1) * size]
            if len(piece) == size and len(found) < count:
                found.append(Passage(piece[:tokens], piece[tokens:]))
    if len(found) < count:
        raise ConfigError(f"the texts yield {len(found)} passages of {size} tokens, {count} were asked for")
    return found


def _sources(path: Path) -> Iterator[list[str]]:
    """The pieces of every file at or below ``path``."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in {".json", ".jsonl", ".md", ".txt", ".rst"}:
                yield from _sources(file)
        return
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".json":
            yield [piece for item in json.loads(content) for piece in _pieces(item)]
        elif path.suffix == ".jsonl":
            yield [piece for line in content.splitlines() if line.strip() for piece in _pieces(json.loads(line))]
        else:
            yield [content]
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"data: {path} is not the JSON of texts or passages ({error})") from error


def _pieces(item: Any) -> list[str]:
    if isinstance(item, dict) and "ctxs" in item:
        return [f"{passage.get('title', '')}\n{passage['text']}".strip() for passage in item["ctxs"]]
    text = item if isinstance(item, str) else str(item.get("prompt") or item.get("text") or "")
    conversations = _CONVERSATION.split(text)
    return conversations[1:] if len(conversations) > 1 else [text]


def _paragraphs(text: str) -> list[str]:
    """Paragraphs joined to pieces of a few hundred words, so that a piece makes sense by itself."""
    pieces, piece = [], ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) > 3000:
            pieces.append(piece)
            piece = ""
    return [*pieces, piece]


def _key(piece: str) -> str:
    return "".join(filter(str.isalnum, piece.lower()))[:KEY_CHARS]


def _shipped() -> Iterator[str]:
    folder = resources.files("cachegen_rag") / "data" / "corpus"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []:
        if entry.name.endswith((".md", ".txt")):
            yield from _paragraphs(entry.read_text(encoding="utf-8"))


def _python_manual() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        return
    yield from (topics[name] for name in sorted(topics))
