"""What every command shares: options, the way results and errors are printed, and exit codes.

Exit codes: 0 done; 1 an error of ours, said in one message; 2 wrong usage or a wrong setting; 3 damage was found;
130 interrupted. Progress and errors go to stderr, so stdout holds the answer or, with ``--json``, one JSON object.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from cachegen_rag.config import Settings, load_settings
from cachegen_rag.errors import CacheGenError, ConfigError

EXIT_ERROR, EXIT_USAGE, EXIT_DAMAGED, EXIT_INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="cachegen-rag",
    help="KV caches of documents: computed once, compressed, stored, spliced into the prompts of local models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

P = ParamSpec("P")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.", metavar="FILE")]
ModelFile = Annotated[
    Path | None, typer.Option("--model", "-m", help="GGUF file. [default: the demo extra's small model]")
]
StoreUrl = Annotated[
    str | None, typer.Option("--store", "-s", help="A directory, file://, memory:// or http(s):// URL.")
]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="Codec profile made by `calibrate`.")]
LevelNumber = Annotated[
    int | None, typer.Option("--level", "-l", help="Level, 0 is the finest. [default: the profile's]")
]
ContextTokens = Annotated[int | None, typer.Option("--n-ctx", help="Tokens that prompt and answer may have together.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads that compute.")]
IndexFile = Annotated[
    Path | None, typer.Option("--index", help="File of passages that `prefill` writes.", metavar="FILE")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from cachegen_rag import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _main(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log to stderr; twice for more.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if verbose:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("cachegen_rag").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


def command(**settings: Any) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command whose errors become one message and an exit code. ``settings`` are typer's."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except ConfigError as error:
                _fail(error, EXIT_USAGE, bool(kwargs.get("as_json")))
            except CacheGenError as error:
                _fail(error, EXIT_ERROR, bool(kwargs.get("as_json")))
            except KeyboardInterrupt:
                err.print("interrupted; what was stored stays stored")
                raise typer.Exit(EXIT_INTERRUPTED) from None

        app.command(**settings)(run)
        return function

    return register


def _fail(error: CacheGenError, code: int, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        err.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def print_json(value: object) -> None:
    """One JSON object on stdout, nothing else."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def settings_from(
    config: Path | None = None,
    *,
    model: Path | None = None,
    store: str | None = None,
    profile: Path | None = None,
    level: int | None = None,
    n_ctx: int | None = None,
    threads: int | None = None,
    index: Path | None = None,
) -> Settings:
    """Settings from options, environment and file, in that order of precedence."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": model, "n_ctx": n_ctx, "n_threads": threads},
        "store": {"url": store},
        "codec": {"profile": profile, "level": level},
    }
    values: dict[str, Any] = {}
    for name, section in sections.items():
        given = {key: value for key, value in section.items() if value is not None}
        if given:
            values[name] = given
    if index is not None:
        values["index"] = index
    settings = load_settings(config, **values)
    if logging.getLogger("cachegen_rag").level == logging.NOTSET:  # -v was not given
        logging.getLogger("cachegen_rag").setLevel(settings.log_level)
    return settings


def progress_bar(quiet: bool) -> Progress:
    """A bar with rate and time left on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        disable=quiet,
    )


def size(count: float) -> str:
    """``count`` bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def table(title: str | None, *columns: str, rows: Iterable[tuple[object, ...]]) -> Table:
    """A table; the columns after the first are aligned right."""
    made = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        made.add_column(column, justify="left" if n == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made
