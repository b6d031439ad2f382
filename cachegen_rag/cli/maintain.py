"""Commands about what is stored: ``inspect``, ``verify``, ``stats``, ``evict``. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from cachegen_rag.cli.app import (
    EXIT_DAMAGED,
    AsJson,
    ConfigFile,
    StoreUrl,
    command,
    out,
    print_json,
    settings_from,
    size,
    table,
)
from cachegen_rag.config import Settings, parse_size
from cachegen_rag.errors import ConfigError
from cachegen_rag.stores.base import Store
from cachegen_rag.upkeep import describe_manifest, describe_object, describe_store, evict_store, verify_store


def store_of(settings: Settings) -> Store:
    """The store that the settings name. Looking at a directory that is not there must not make it: ConfigError."""
    from cachegen_rag.opening import open_settings_store

    url = settings.store.url
    scheme, colon, _ = url.partition("://")
    path = Path(url) if not colon else Path(unquote(urlsplit(url).path)) if scheme == "file" else None
    if path is not None and not path.is_dir():
        raise ConfigError(f"there is no store and no bitstream at {path}")
    return open_settings_store(settings)


@command()
def inspect(
    what: Annotated[
        str | None, typer.Argument(help="A bitstream file, a manifest key, or a store. [default: the store]")
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a bitstream, a document's manifest or a store: header, chunks, levels, sizes."""
    if what is not None and Path(what).is_file():
        result = describe_object(Path(what).read_bytes())
    else:
        key = what if what is not None and len(what) == 64 and "/" not in what else None
        opened = store_of(settings_from(config, store=store if key or what is None else what))
        try:
            result = describe_manifest(opened, key) if key else describe_store(opened)
        finally:
            opened.close()
    if as_json:
        print_json(result)
        return
    facts = [(k, v) for k, v in result.items() if not isinstance(v, list)]
    out.print(table(None, "", "", rows=[(k, v) for k, v in facts]))
    for name, rows in result.items():
        if isinstance(rows, list) and rows:
            columns = list(rows[0])
            out.print(table(name, *columns, rows=[tuple(row.get(c, "") for c in columns) for row in rows]))


@command()
def stats(store: StoreUrl = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Count documents, tokens, objects and bytes of a store."""
    opened = store_of(settings_from(config, store=store))
    try:
        result = describe_store(opened)
    finally:
        opened.close()
    del result["largest"]
    if as_json:
        print_json(result)
        return
    rows = [(k, size(v) if k == "bytes" else v) for k, v in result.items() if not isinstance(v, list)]
    rows += [(f"level {r['level']}", f"{r['bitstreams']} bitstreams, {size(r['bytes'])}") for r in result["levels"]]
    out.print(table(None, "", "", rows=rows))


@command()
def verify(
    store: StoreUrl = None,
    config: ConfigFile = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is damaged; it is computed again when needed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every stored object and check it. Exit code 3 if something is damaged."""
    opened = store_of(settings_from(config, store=store))
    try:
        result = verify_store(opened, repair=repair)
    finally:
        opened.close()
    if as_json:
        print_json(result)
    else:
        out.print(
            f"{result['checked']} objects checked, {len(result['damaged'])} damaged, "
            f"{len(result['incomplete'])} documents incomplete" + ("; those were deleted" if repair else "")
        )
        for item in result["damaged"]:
            out.print(f"  {item['namespace']}/{item['key']}: {item['reason']}", markup=False, highlight=False)
    if result["damaged"] or result["incomplete"]:
        raise typer.Exit(EXIT_DAMAGED)


@command()
def evict(
    to: Annotated[str, typer.Option("--to", help="Bytes to keep at most, e.g. 500MB or 2GiB; 0 empties the store.")],
    store: StoreUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete whole documents, the longest unused first, until a store is small enough."""
    try:
        limit = parse_size(to)
    except ValueError as error:
        raise ConfigError(f"--to {to!r}: {error}") from None
    opened = store_of(settings_from(config, store=store))
    try:
        result = evict_store(opened, limit)
    finally:
        opened.close()
    if as_json:
        print_json(result)
    else:
        out.print(
            f"{result['documents']} documents deleted; {size(result['before'])} before, {size(result['bytes'])} now"
        )
