"""Texts that benchmarks measure on, cut into documents. Half of all texts is held out, decided by a hash.

Profiles are calibrated and settings tuned on the other half only, so no figure is reported on a text that anything
was fitted to.
"""

from __future__ import annotations

import hashlib
import json
import os
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
STANDARD_TEXT_CHARS = 12_000
"""Topics of Python's manual are joined to texts of about this length."""


@dataclass(frozen=True, eq=False)
class Passage:
    """A document and the text that follows it: token ids int32, the first of a text or from its middle."""

    document: NDArray[np.int32]
    continuation: NDArray[np.int32]


def is_held_out(text: str) -> bool:
    """Whether a text belongs to the half that nothing is tuned on."""
    return bool(hashlib.sha256(text.encode()).digest()[0] & 1)


def load(data: Data = None) -> list[str]:
    """Texts of files: MuSiQue-like ``.json`` (passages joined), ``.jsonl`` with ``prompt`` or ``text``, plain text.

    A directory stands for its files. None: the texts shipped with the package and the manual that ships with Python.

    Raises
    ------
    ConfigError
        A path does not exist, or holds no text.
    """
    if data is None:
        return [*_shipped(), *_python_manual()]
    paths = [data] if isinstance(data, (str, os.PathLike)) else list(data)
    texts = [text for path in paths for text in _read(Path(path)) if text.strip()]
    if not texts:
        raise ConfigError(f"data = {', '.join(map(str, paths))}: no texts in there")
    return texts


def shipped_text() -> str:
    """One long held-out text, from those that :func:`load` finds by default."""
    return "\n\n".join(text for text in load() if is_held_out(text))


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
    ids = [np.asarray(model.tokenize(text[: 12 * size * count]), np.int32) for text in texts]
    found: list[Passage] = []
    for window in range(count):
        for text in ids:
            piece = text[window * size : (window + 1) * size]
            if len(piece) == size and len(found) < count:
                found.append(Passage(piece[:tokens], piece[tokens:]))
    if len(found) < count:
        raise ConfigError(f"the texts yield {len(found)} passages of {size} tokens, {count} were asked for")
    return found


def _read(path: Path) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in {".json", ".jsonl", ".md", ".txt", ".rst"}:
                yield from _read(file)
        return
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"data = {path}: cannot be read ({error.strerror})") from error
    if path.suffix == ".json":
        yield from (_text_of(item) for item in json.loads(content))
    elif path.suffix == ".jsonl":
        yield from (_text_of(json.loads(line)) for line in content.splitlines() if line.strip())
    else:
        yield content


def _text_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        if "ctxs" in item:
            return "\n\n".join(f"{passage.get('title', '')}\n{passage['text']}".strip() for passage in item["ctxs"])
        return str(item.get("prompt") or item.get("text") or "")
    return ""


def _shipped() -> Iterator[str]:
    folder = resources.files("cachegen_rag") / "data" / "corpus"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []:
        if entry.name.endswith((".md", ".txt")):
            yield entry.read_text(encoding="utf-8")


def _python_manual() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        return
    text = ""
    for name in sorted(topics):
        text += topics[name] + "\n\n"
        if len(text) >= STANDARD_TEXT_CHARS:
            yield text
            text = ""
