"""Commands that run the model: ``prefill``, ``ask``, ``demo``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.text import Text

from cachegen_rag.cli.app import (
    AsJson,
    ConfigFile,
    ContextTokens,
    IndexFile,
    LevelNumber,
    ModelFile,
    ProfileFile,
    StoreUrl,
    Threads,
    command,
    err,
    out,
    print_json,
    progress_bar,
    settings_from,
    size,
    table,
)
from cachegen_rag.cli.corpus import (
    PASSAGE_CHARS,
    Passage,
    Retriever,
    find_files,
    load_index,
    save_index,
    shipped_corpus,
    split_file,
)
from cachegen_rag.errors import ConfigError
from cachegen_rag.metrics import RequestRecord
from cachegen_rag.models.base import Sampling
from cachegen_rag.opening import open_cache
from cachegen_rag.prompt import Document

if TYPE_CHECKING:
    from cachegen_rag.cache import KVCache

SYSTEM = "You answer questions from the documents that are given, in one or two sentences."
LINE_SECONDS = 15.0
"""How often progress is told where a bar cannot be drawn."""
DEMO_QUESTION = "How many GiB does the store hold at most?"
"""A question that the small model can answer: it is asked for one fact. Two passages keep it from losing its way."""

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of the answer at most.")]
Passages = Annotated[int, typer.Option("-k", "--passages", min=1, help="Passages to answer from.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the sampler, with a temperature above 0.")]


def fill(cache: KVCache, passages: Sequence[Passage], quiet: bool) -> dict[str, Any]:
    """Prefill what is missing, with a progress bar on stderr; a line now and then where that is no terminal."""
    with progress_bar(quiet) as bar:
        task = bar.add_task("computing KV", total=len(passages), rate="")
        told = 0.0

        def progress(done: int, total: int, tokens: int, seconds: float) -> None:
            nonlocal told
            if not quiet and not err.is_terminal and seconds >= told + LINE_SECONDS:
                told = seconds
                left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
                err.print(f"{done} of {total} passages, {tokens} tokens in {seconds:.0f} s{left}")
            bar.update(task, completed=done, total=total, rate=f"{tokens / seconds:.0f} tokens/s" if tokens else "")

        report: dict[str, Any] = cache.prefill([Document(p.text, p.id) for p in passages], progress=progress).as_dict()
    return report


def run_answer(
    cache: KVCache,
    question: str,
    passages: Sequence[Passage],
    sampling: Sampling,
    *,
    spliced: bool = True,
    show: bool = False,
) -> tuple[str, RequestRecord]:
    """The answer and its record; ``show`` prints the answer while it comes."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Question: {question}"}]
    prompt = cache.prompt(messages, documents=[Document(p.text, p.id) for p in passages])
    stream = cache.stream(prompt, sampling, spliced=spliced)
    parts = []
    for token in stream:
        parts.append(token.text)
        if show:
            out.print(Text(token.text), end="", soft_wrap=True)
    if show:
        out.print()
    return "".join(parts), stream.record


@command()
def prefill(
    paths: Annotated[list[Path], typer.Argument(help="Text files, or directories to search for them.")],
    chars: Annotated[
        int, typer.Option("--passage-chars", min=100, help="Length of a passage, characters.")
    ] = PASSAGE_CHARS,
    index: IndexFile = None,
    model: ModelFile = None,
    store: StoreUrl = None,
    profile: ProfileFile = None,
    level: LevelNumber = None,
    n_ctx: ContextTokens = None,
    threads: Threads = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Split files into passages, compute and store the KV of each. Interrupted, it goes on where it stopped."""
    settings = settings_from(
        config, model=model, store=store, profile=profile, level=level, n_ctx=n_ctx, threads=threads, index=index
    )
    files = list(find_files(paths))
    passages = [passage for path in files for passage in split_file(path, chars)]
    if not passages:
        raise ConfigError(f"no text was found in {', '.join(map(str, paths))}")
    read = {p.source for p in passages}
    kept = [p for p in load_index(settings.index) if p.source not in read] if settings.index.exists() else []
    cache = open_cache(settings)
    try:
        cache.check()
        save_index(settings.index, kept + passages)
        report = fill(cache, passages, quiet=as_json)
    finally:
        cache.close()
        cache.model.close()
    result = {"files": len(files), "passages": len(passages), "index": str(settings.index), **report}
    if as_json:
        print_json(result)
    else:
        out.print(table(None, "", "", rows=list(result.items())))


@command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    passages: Passages = 4,
    document: Annotated[
        list[Path] | None, typer.Option("--document", "-d", help="Search these files, not the index.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Compute the whole prompt: splice nothing.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Append the request's record to this JSON-lines file.")
    ] = None,
    index: IndexFile = None,
    model: ModelFile = None,
    store: StoreUrl = None,
    profile: ProfileFile = None,
    level: LevelNumber = None,
    n_ctx: ContextTokens = None,
    threads: Threads = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from the passages that `prefill` indexed."""
    settings = settings_from(
        config, model=model, store=store, profile=profile, level=level, n_ctx=n_ctx, threads=threads, index=index
    )
    if document:
        texts = [p for path in find_files(document) for p in split_file(path)]
    else:
        texts = load_index(settings.index)
    found = Retriever(texts).search(question, passages)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    cache = open_cache(settings)
    try:
        answer, seen = run_answer(cache, question, found, sampling, spliced=not text, show=not as_json)
    finally:
        cache.close()
        cache.model.close()
    if record is not None:
        with record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(seen.as_dict()) + "\n")
    if as_json:
        print_json({"answer": answer, "passages": [p.id for p in found], "record": seen.as_dict()})
    else:
        print_segments(seen)


def print_segments(record: RequestRecord) -> None:
    """What every piece of the prompt cost and where it came from, on stderr."""
    rows = [
        (s.doc_id or s.kind, s.tokens, s.source if s.level is None else f"{s.source}, level {s.level}", s.recomputed,
         size(s.bytes), f"{s.fetch_ms + s.decode_ms + s.splice_ms + s.recompute_ms:.0f}", s.reason or "")
        for s in record.segments
    ]  # fmt: skip
    err.print(table(None, "segment", "tokens", "from", "recomputed", "read", "ms", "reason", rows=rows))
    err.print(f"first token after {record.ttft_ms:.0f} ms; {record.prompt_tokens} + {record.completion_tokens} tokens")


@command()
def demo(
    question: Annotated[str, typer.Argument(help="A question about this project.")] = DEMO_QUESTION,
    passages: Passages = 2,
    max_tokens: MaxTokens = 16,
    model: ModelFile = None,
    store: StoreUrl = None,
    profile: ProfileFile = None,
    level: LevelNumber = None,
    n_ctx: ContextTokens = None,
    threads: Threads = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question about this project from its own documentation, spliced and from the text, side by side."""
    settings = settings_from(
        config, model=model, store=store, profile=profile, level=level, n_ctx=n_ctx, threads=threads
    )
    corpus = shipped_corpus()
    found = Retriever(corpus).search(question, passages)
    if not found:
        raise ConfigError(f"no word of {question!r} occurs in the documentation: ask something about this project")
    sampling = Sampling(max_tokens=max_tokens, stop=("\n",))
    cache = open_cache(settings)
    try:
        if not as_json:
            err.print(f"{len(corpus)} passages of this project's documentation, model {cache.model.name}")
        report = fill(cache, corpus, quiet=as_json)
        if not as_json:
            out.print(Panel(question, title="question", title_align="left"))
        answer, spliced = run_answer(cache, question, found, sampling, show=not as_json)
        if not as_json:
            err.print("the same question again, computed from the text ...", style="dim")
        text_answer, text = run_answer(cache, question, found, sampling, spliced=False)
    finally:
        cache.close()
        cache.model.close()
    rows = comparison(text, spliced)
    result = {
        "question": question,
        "passages": [p.id for p in found],
        "prefill": report,
        "text": {"answer": text_answer, **rows["text"]},
        "spliced": {"answer": answer, **rows["spliced"]},
        "ttft_ratio": spliced.ttft_ms / text.ttft_ms if text.ttft_ms else None,
        "same_answer": answer == text_answer,
        "record": spliced.as_dict(),
    }
    if as_json:
        print_json(result)
        return
    names = {"ttft_ms": "time to first token, ms", "prompt_tokens": "prompt tokens", "spliced_tokens": "tokens spliced",
             "recomputed_tokens": "tokens recomputed", "bytes_fetched": "bytes read", "levels": "level"}  # fmt: skip
    shown = [(names[key], _cell(key, rows["text"][key]), _cell(key, rows["spliced"][key])) for key in names]
    shown.append(("answer", text_answer.strip(), answer.strip()))
    out.print(table("the same question", "", "text prefill", "spliced", rows=shown))


def comparison(text: RequestRecord, spliced: RequestRecord) -> dict[str, dict[str, Any]]:
    """The figures of two requests that are worth a row."""
    return {
        name: {
            "ttft_ms": round(record.ttft_ms, 1),
            "prompt_tokens": record.prompt_tokens,
            "spliced_tokens": record.spliced_tokens,
            "recomputed_tokens": record.recomputed_tokens,
            "bytes_fetched": record.bytes_fetched,
            "levels": sorted({s.level for s in record.segments if s.level is not None}),
        }
        for name, record in (("text", text), ("spliced", spliced))
    }


def _cell(key: str, value: Any) -> str:
    if key == "bytes_fetched":
        return size(value) if value else "-"
    if key == "levels":
        return ", ".join(map(str, value)) or "-"
    return f"{value:,.0f}"
