"""Passages of text files, and which of them answer a question: splitting, an index file, BM25."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachegen_rag.errors import ConfigError

SUFFIXES = frozenset({".md", ".markdown", ".txt", ".rst", ".adoc", ".org", ".tex", ".html", ".csv", ".json", ".py"})
"""What is read from a directory; a file that is named itself may have any suffix."""
MAX_FILE_BYTES = 64 << 20
"""Larger files are refused: they are not documents."""
PASSAGE_CHARS = 1500
"""Default length of a passage, characters (about 350 tokens)."""
INDEX_VERSION = 1


@dataclass(frozen=True)
class Passage:
    """A piece of a file: where it begins (character) and its text."""

    source: str
    start: int
    text: str

    @property
    def id(self) -> str:
        """``source#start``"""
        return f"{self.source}#{self.start}"


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Files named themselves, and those with a known suffix below directories, in order.

    Raises
    ------
    ConfigError
        A path does not exist.
    """
    for path in paths:
        if path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(f for f in folders if not f.startswith("."))
                for name in sorted(names):
                    if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                        yield Path(folder, name)
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"{path} is neither a file nor a directory")


def split_file(path: Path, chars: int = PASSAGE_CHARS, name: str | None = None) -> list[Passage]:
    """The passages of a file, without overlap, cut at headings and paragraphs where possible.

    Raises
    ------
    ConfigError
        The file cannot be read, is no UTF-8 text, or is larger than ``MAX_FILE_BYTES``.
    """
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; split it first")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {error}") from None
    options: dict[str, Any] = {"chunk_size": chars, "chunk_overlap": 0, "add_start_index": True}
    if path.suffix.lower() in {".md", ".markdown"}:
        splitter = RecursiveCharacterTextSplitter.from_language(Language.MARKDOWN, **options)
    else:
        splitter = RecursiveCharacterTextSplitter(**options)
    pieces = splitter.create_documents([text])
    return [Passage(name or str(path), piece.metadata["start_index"], piece.page_content) for piece in pieces]


def shipped_corpus() -> list[Passage]:
    """The passages of this project's own documentation, which the package carries."""
    folder = Path(__file__).resolve().parents[1] / "data" / "corpus"
    return [p for path in sorted(folder.glob("*.md")) for p in split_file(path, name=path.name)]


def save_index(path: Path, passages: Sequence[Passage]) -> None:
    """Write the index whole or not at all. Raises ConfigError if it cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"cachegen_rag_index": INDEX_VERSION}) + "\n")
            for passage in passages:
                out.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the index {path}: {error.strerror}") from None


def load_index(path: Path) -> list[Passage]:
    """The passages of an index file.

    Raises
    ------
    ConfigError
        There is no such file, or it is not an index of this version.
    """
    try:
        head, *lines = (
            path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        )  # not at U+2028, as splitlines would
        if json.loads(head) != {"cachegen_rag_index": INDEX_VERSION}:
            raise ValueError("it was written by another version")
        return [Passage(**json.loads(line)) for line in lines]
    except FileNotFoundError:
        raise ConfigError(f"there is no index at {path}: run `cachegen-rag prefill DIR` first, or name it") from None
    except json.JSONDecodeError:
        raise ConfigError(f"{path} is not an index; run `cachegen-rag prefill` again, or name another") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read the index {path}: {error}; run `cachegen-rag prefill` again") from None


class Retriever:
    """BM25 over passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        if not passages:
            raise ConfigError("there is no text to search in")
        import bm25s

        self.passages = list(passages)
        self._bm25 = bm25s.BM25()
        self._bm25.index(
            bm25s.tokenize([p.text for p in passages], stopwords="en", show_progress=False), show_progress=False
        )

    def search(self, question: str, k: int) -> list[Passage]:
        """The ``k`` best passages, best first; fewer where fewer share a word with the question."""
        import bm25s

        tokens = bm25s.tokenize([question], stopwords="en", show_progress=False)
        k = min(k, len(self.passages))
        found, scores = self._bm25.retrieve(tokens, k=k, show_progress=False)
        return [self.passages[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
