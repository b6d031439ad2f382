"""The command line on the tiny model: every command, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachegen_rag.cli import app, tools
from cachegen_rag.cli.corpus import Passage, Retriever, find_files, load_index, save_index, shipped_corpus, split_file
from cachegen_rag.errors import ConfigError

GUIDE = """# Harbour guide

## Lighthouses

The lighthouse of Port Alder was built of granite in 1807 by Mara Quint.

## Ferries

The ferry to Port Bexley leaves the northern pier at noon.

## Bridges

The stone bridge over the river carries the road to the old city.
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Path:
    """A folder with documents, a profile, and a store and an index that `prefill` has filled."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "docs").mkdir()
    (folder / "docs" / "guide.md").write_text(GUIDE)
    (folder / "sample.txt").write_text("\n\n".join(f"{n}. {part}" for n in range(9) for part in GUIDE.split("\n\n")))
    options = ["-o", str(folder / "tiny.profile"), "-m", str(tiny_gguf), "--threads", "1", "--no-gate", "--json"]
    done = CliRunner().invoke(app, ["calibrate", str(folder / "sample.txt"), *options])
    assert done.exit_code == 0, done.output
    (folder / "settings.yaml").write_text(
        f"model: {{path: '{tiny_gguf}', n_threads: 1, n_ctx: 1500}}\nstore: {{url: '{folder / 'store'}'}}\n"
        f"codec: {{profile: '{folder / 'tiny.profile'}'}}\nindex: '{folder / 'index.jsonl'}'\n"
    )
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("CACHEGEN_RAG_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def result(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    parsed = json.loads(run(*arguments, "--json", code=code))
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture(scope="module")
def filled(place: Path) -> Path:
    os.environ.pop("CACHEGEN_RAG_STORE__URL", None)
    seen = result("prefill", place / "docs", "--passage-chars", "100", "--config", place / "settings.yaml")
    assert (seen["files"], seen["passages"], seen["computed"]) == (1, 4, 4)
    return place


def test_prefill_goes_on_where_it_stopped(filled: Path) -> None:
    again = result("prefill", filled / "docs", "--passage-chars", "100", "--config", filled / "settings.yaml")
    assert (again["computed"], again["present"]) == (0, 4)


def test_ask_splices_what_was_prefilled(filled: Path, tmp_path: Path) -> None:
    arguments = (
        "ask",
        "Who built the lighthouse?",
        "-k",
        "1",
        "--max-tokens",
        "4",
        "--config",
        filled / "settings.yaml",
    )
    log = tmp_path / "log.jsonl"
    seen = result(*arguments, "--record", log)
    assert seen["passages"] and "guide.md#" in seen["passages"][0]
    assert seen["record"]["spliced_tokens"] > 0 and seen["record"]["completion_tokens"] == 4
    text = result(*arguments, "--text", "--record", log)
    assert text["record"]["spliced_tokens"] == 0
    assert text["record"]["prompt_tokens"] == seen["record"]["prompt_tokens"]
    assert len(log.read_text().splitlines()) == 2
    page = tmp_path / "report.html"
    assert result("report", log, "-o", page)["bytes"] == page.stat().st_size
    assert "first token after" in CliRunner().invoke(app, [str(a) for a in arguments]).output


def test_ask_can_search_files(filled: Path) -> None:
    seen = result(
        "ask",
        "Where does the ferry go?",
        "-d",
        filled / "docs",
        "--max-tokens",
        "2",
        "--config",
        filled / "settings.yaml",
    )
    assert seen["passages"]


def test_looking_at_a_store(filled: Path) -> None:
    counted = result("stats", "--config", filled / "settings.yaml")
    assert counted["documents"] == 4 and counted["objects"] >= 4 and counted["bytes"] > 0
    shown = result("inspect", "--store", filled / "store")
    assert shown["documents"] == 4
    assert result("inspect", filled / "store") == shown
    manifest = result("inspect", shown["largest"][0]["key"], "--store", filled / "store")
    assert manifest["chunks"][0]["start"] == 0 and manifest["kind"] == "manifest"
    checked = result("verify", "--store", filled / "store")
    assert checked["checked"] == counted["objects"] + 4 and not checked["damaged"]
    for command in (("stats",), ("inspect",), ("verify",)):
        assert run(*command, "--store", filled / "store").strip()


def test_inspecting_a_bitstream_needs_no_model(tmp_path: Path) -> None:
    golden = next((Path(__file__).parent / "golden").rglob("*.cgb"))
    assert result("inspect", golden)["kind"] == "bitstream"
    (tmp_path / "cut.cgb").write_bytes(golden.read_bytes()[:-9])
    error = result("inspect", tmp_path / "cut.cgb", code=1)["error"]
    assert error["type"].endswith("BitstreamError")


def test_damage_has_an_exit_code_of_its_own(filled: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(filled / "store", tmp_path / "store")
    from cachegen_rag.stores.disk import DiskStore

    store = DiskStore(tmp_path / "store")
    store.delete("cas", next(store.keys("cas")))
    store.close()
    assert len(result("verify", "--store", tmp_path / "store", code=3)["incomplete"]) == 1
    assert "1 documents incomplete" in run("verify", "--store", tmp_path / "store", "--repair", code=3)
    assert result("verify", "--store", tmp_path / "store")["incomplete"] == []


def test_evicting(filled: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(filled / "store", tmp_path / "store")
    seen = result("evict", "--to", "0", "--store", tmp_path / "store")
    assert seen["documents"] == 4
    assert result("stats", "--store", tmp_path / "store")["documents"] == 0
    assert "--to" in result("evict", "--to", "much", "--store", tmp_path / "store", code=2)["error"]["message"]


def test_doctor(filled: Path) -> None:
    seen = result("doctor", "--config", filled / "settings.yaml")
    assert seen["model"]["spliced"] and seen["model"]["refusal"] is None
    assert seen["versions"]["numpy"] and seen["kernels"] and seen["extras"]["settings"] is True
    bad = result("doctor", "--model", filled / "none.gguf", "--store", "memory://", code=1)
    assert "none.gguf" in bad["model"]["error"]
    assert "fingerprint" in run("doctor", "--config", filled / "settings.yaml")


def test_calibrate_measures_the_gate_and_doctor_shows_it(
    place: Path, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachegen_rag.codec import calibrate
    from cachegen_rag.codec.profile import Profile
    from cachegen_rag.gate import Gate, path_beside

    learnt = Profile.from_bytes((place / "tiny.profile").read_bytes())
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: learnt)
    profile, store = tmp_path / "own.cgp", tmp_path / "store"
    common = ("-m", tiny_gguf, "--store", store)
    seen = result("calibrate", "-o", profile, *common, "--threads", "1", "--n-ctx", "1500")
    gate = Gate.from_bytes(path_beside(profile).read_bytes())
    assert gate.questions == 4 and "0" in gate.kl
    assert seen["gate"] == gate.summary == result("doctor", *common)["model"]["gate"]
    (tmp_path / "settings.yaml").write_text(f"codec: {{profile: '{profile}'}}")
    elsewhere = ("-m", tiny_gguf, "--store", "memory://")
    assert "not measured" in result("doctor", *elsewhere)["model"]["gate"]
    assert result("doctor", *elsewhere, "--config", tmp_path / "settings.yaml")["model"]["gate"] == gate.summary


def test_doctor_says_why_a_model_is_not_spliced(tiny_path: Any) -> None:
    refused = tiny_path(arch="mamba")
    seen = result("doctor", "--model", refused, "--store", "memory://")
    assert seen["model"]["spliced"] is False and seen["model"]["refusal"]


def test_the_demo(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = [
        Passage("a.md", 0, "Documents are computed once, compressed and stored."),
        Passage("b.md", 0, "Keys are rotated."),
    ]
    monkeypatch.setattr("cachegen_rag.cli.answer.shipped_corpus", lambda: passages)
    arguments = (
        "demo",
        "What are documents?",
        "-k",
        "1",
        "--max-tokens",
        "4",
        "--config",
        place / "settings.yaml",
        "--store",
        place / "demo",
    )
    seen = result(*arguments)
    assert seen["spliced"]["spliced_tokens"] > 0 == seen["text"]["spliced_tokens"]
    assert seen["spliced"]["prompt_tokens"] == seen["text"]["prompt_tokens"]
    assert seen["prefill"]["computed"] == 2 and seen["ttft_ratio"] > 0
    shown = run(*arguments)
    for line in ("time to first token", "tokens spliced", "tokens recomputed", "bytes read", "level", "answer"):
        assert line in shown
    assert "no word" in result("demo", "xyzzy", "--config", place / "settings.yaml", code=2)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("ask", "q", "--index", "none.jsonl", "--store", "memory://"), 2, "prefill"),
        (("prefill", "nowhere"), 2, "nowhere"),
        (("stats", "--store", "nowhere"), 2, "nowhere"),
        (("verify", "--store", "gopher://x"), 2, "gopher"),
        (("inspect", "0" * 64, "--store", "memory://"), 2, "no document"),
        (("stats", "--config", "nowhere.yaml"), 2, "nowhere.yaml"),
        (("report", "nowhere.json"), 2, "nowhere.json"),
        (("bench", "nothing"), 2, "there is no benchmark"),
        (("bench", "ttft", "--nonsense", "1"), 2, "--repeats"),
        (("demo", "--model", "none.gguf", "--store", "memory://"), 1, "none.gguf"),
        (("prefill", __file__, "--level", "99", "--store", "memory://"), 1, "99"),
    ],
)
def test_errors(arguments: tuple[str, ...], code: int, says: str, tiny_gguf: Path, place: Path) -> None:
    if arguments[0] == "prefill" and "--level" in arguments:
        arguments = (*arguments, "--model", str(tiny_gguf), "--profile", str(place / "tiny.profile"), "--threads", "1")
    assert says in result(*arguments, code=code)["error"]["message"]
    plain = CliRunner().invoke(app, list(arguments))
    assert plain.exit_code == code and "Traceback" not in plain.output and says in plain.stderr.replace("\n", "")


def test_wrong_usage() -> None:
    assert CliRunner().invoke(app, ["ask"]).exit_code == 2
    assert CliRunner().invoke(app, ["evict", "--nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["--version"]).stdout.strip()
    assert "prefill" in CliRunner().invoke(app, ["--help"]).stdout


def test_interrupted(monkeypatch: pytest.MonkeyPatch, filled: Path) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cachegen_rag.cli.answer.fill", interrupt)
    run("prefill", filled / "docs", "--config", filled / "settings.yaml", code=130)


def test_benchmarks_are_found_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    names = result("bench")["benchmarks"]
    assert {"ttft", "codec"} <= set(names) and all(names.values())
    made = types.ModuleType("cachegen_rag.bench.fake")

    def fake(repeats: int = 1, quick: bool = False, data: str | None = None) -> dict[str, Any]:
        """A benchmark."""
        return {
            "benchmark": "fake",
            "rows": [{"n": repeats, "q": quick, "d": data, "x": 0.123456}],
            "summary": {"n": repeats},
        }

    made.run = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cachegen_rag.bench.fake", made)
    monkeypatch.setattr(tools, "benchmarks", lambda: {"fake": "A fake."})
    out = tmp_path / "run.json"
    seen = result("bench", "fake", "--repeats", "3", "--quick", "--data=a.txt", "-o", out)
    assert seen["rows"] == [{"n": 3, "q": True, "d": "a.txt", "x": 0.123456}] and json.loads(out.read_text()) == seen
    assert "0.1235" in run("bench", "fake")
    assert "draws no plot" in result("bench", "fake", "--plot", tmp_path / "p.png", code=2)["error"]["message"]


def test_completion_and_start_up() -> None:
    code = (
        "import sys; import cachegen_rag.cli; print({'torch', 'llama_cpp', 'bm25s', 'transformers'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )
    environment = {
        **os.environ,
        "_CACHEGEN_RAG_COMPLETE": "complete_bash",
        "COMP_WORDS": "cachegen-rag pre",
        "COMP_CWORD": "1",
    }
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; sys.argv[0] = 'cachegen-rag'; from cachegen_rag.cli import main; main()",
    ]
    assert "prefill" in subprocess.run(command, env=environment, capture_output=True, text=True).stdout


# ---- the corpus ----


def test_passages_are_pieces_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(GUIDE)
    passages = split_file(path, 100)
    assert len(passages) == 4
    assert all(GUIDE[p.start :].startswith(p.text) and len(p.text) <= 100 for p in passages)


def test_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", ".hidden.md", "picture.png", "sub/c.rst", ".git/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [str(f.relative_to(tmp_path)) for f in find_files([tmp_path])] == ["a.txt", "b.md", "sub/c.rst"]
    assert list(find_files([tmp_path / "picture.png"])) == [tmp_path / "picture.png"]
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="UTF-8"):
        split_file(tmp_path / "latin.txt")


@pytest.mark.parametrize("text", ["", "{}", '{"cachegen_rag_index": 99}', '{"cachegen_rag_index": 1}\n{"x": 1}'])
def test_what_is_no_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="prefill"):
        load_index(tmp_path / "index.jsonl")


def test_an_index_comes_back(tmp_path: Path) -> None:
    passages = [Passage("a", 0, "line\nline\u2028é"), Passage("b", 5, "x")]
    save_index(tmp_path / "deep" / "index.jsonl", passages)
    assert load_index(tmp_path / "deep" / "index.jsonl") == passages


def test_search() -> None:
    retriever = Retriever([Passage("a", 0, "the ferry leaves at noon"), Passage("b", 0, "the bridge is stone")])
    assert [p.source for p in retriever.search("when does the ferry leave?", 5)] == ["a"]
    assert retriever.search("xyzzy", 5) == []


def test_the_shipped_corpus_is_this_documentation() -> None:
    root = Path(__file__).resolve().parents[1]
    assert {"README.md", "SPEC.md", "SECURITY.md", "concepts.md"} <= {p.source for p in shipped_corpus()}
    for passage in shipped_corpus():
        file = next(f for f in (root / passage.source, root / "docs" / passage.source) if f.is_file())
        assert passage.text in file.read_text(encoding="utf-8")


def test_an_index_that_cannot_be_written_is_one_error(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "index.jsonl"
    seen = result("prefill", place / "docs", "--config", place / "settings.yaml", "--index", bad, code=2)
    assert "cannot write the index" in seen["error"]["message"]


def test_a_wrong_level_writes_no_index(place: Path, tmp_path: Path) -> None:
    index = tmp_path / "index.jsonl"
    settings = place / "settings.yaml"
    seen = result("prefill", place / "docs", "--config", settings, "--index", index, "--level", "99", code=1)
    assert seen["error"]["type"] == "UnknownLevelError"
    assert not index.exists()


def test_something_that_is_no_index_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "index.jsonl").write_text("")
    assert "not an index" in result("ask", "what?", "--index", tmp_path / "index.jsonl", code=2)["error"]["message"]
