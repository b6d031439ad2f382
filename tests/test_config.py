"""Settings: sizes, durations, precedence, and errors that name the field."""

import subprocess
import sys
import traceback

import pytest
from pydantic import ValidationError

from cachegen_rag.config import Settings, load_settings, parse_duration, parse_size
from cachegen_rag.errors import ConfigError, MissingDependencyError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.upper().startswith("CACHEGEN_RAG_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5k", 1500),
        ("7", 7),
        (7, 7),
        ("3KiB", 3072),
        ("1TB", 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("2s", 2), ("5min", 300), ("1h", 3600), ("3", 3), (0.5, 0.5), ("10us", 1e-5), ("1d", 86400)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "GiB", "2 GiBB", "-1", "1e3", None, True, [], "two"])
def test_what_is_no_size_or_duration(value):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(value)
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(value)


WRONG = [
    ({"store": {"size_limit": "2 GiBB"}}, "store.size_limit"),
    ({"store": {"size_limit": "1B"}}, "store.size_limit"),
    ({"store": {"timeout": "0s"}}, "store.timeout"),
    ({"stream": {"slo": "soon"}}, "stream.slo"),
    ({"model": {"n_ctx": 3}}, "model.n_ctx"),
    ({"model": {"n_ctx": 1 << 30}}, "model.n_ctx"),
    ({"model": {"n_threads": 0}}, "model.n_threads"),
    ({"codec": {"level": -1}}, "codec.level"),
    ({"codec": {"levle": 1}}, "codec.levle"),
    ({"nothing": 1}, "nothing"),
    ({"log_level": "LOUD"}, "log_level"),
    ({"recompute": "many"}, "recompute"),
]


@pytest.mark.parametrize(("values", "field"), WRONG, ids=[field for _, field in WRONG])
def test_a_wrong_value_names_its_field(values, field, tmp_path):
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("pydantic_settings")
    with pytest.raises(ConfigError, match=f"(?m)^{field}( = |:)"):
        load_settings(**values)
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=f"(?m)^{field}( = |:)"):
        load_settings(file)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        load_settings(store={"size_limit": "x"}, model={"n_ctx": 1})
    assert {line.split(" = ")[0] for line in str(caught.value).splitlines()} == {"store.size_limit", "model.n_ctx"}


def test_precedence(tmp_path, monkeypatch):
    pytest.importorskip("pydantic_settings")
    file = tmp_path / "settings.yaml"
    file.write_text("store: {size_limit: 3GiB, timeout: 4s}\nstream: {slo: 200ms}\nmodel: {n_batch: 64}\n")
    monkeypatch.setenv("CACHEGEN_RAG_STORE__SIZE_LIMIT", "2GiB")
    monkeypatch.setenv("CACHEGEN_RAG_MODEL__N_BATCH", "32")
    settings = load_settings(file, model={"n_batch": 16})
    assert (settings.store.size_limit, settings.store.timeout) == (2 << 30, 4.0)
    assert (settings.stream.slo, settings.model.n_batch, settings.model.n_ctx) == (0.2, 16, Settings().model.n_ctx)


def test_environment(monkeypatch):
    pytest.importorskip("pydantic_settings")
    monkeypatch.setenv("CACHEGEN_RAG_STORE__SIZE_LIMIT", "big")
    with pytest.raises(ConfigError, match=r"store\.size_limit = 'big'"):
        load_settings()
    assert load_settings(environment=False).store.size_limit > 0
    monkeypatch.setenv("CACHEGEN_RAG_STORE__SIZE_LIMIT", "")
    assert load_settings() == Settings()
    monkeypatch.setenv("CACHEGEN_RAG_STOER__SIZE_LIMIT", "1GiB")
    with pytest.raises(ConfigError, match="CACHEGEN_RAG_STOER__SIZE_LIMIT"):
        load_settings()


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_a_file_that_holds_no_settings(tmp_path, text):
    pytest.importorskip("pydantic_settings")
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load_settings(file)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_settings(tmp_path / "missing.yaml")


def test_secrets_are_not_shown(capsys):
    canary = "canary-5f1e"
    settings = load_settings(store={"token": canary, "salt": canary})
    assert canary not in repr(settings) + str(settings) + settings.model_dump_json()
    wrong: list[object] = [
        {"token": [canary]},
        {"salt": {canary: 1}},
        {"tokn": canary},
        [{"token": canary}],
        f"token: {canary}",
        {"url": [canary]},
        {"url": f"https://user:{canary}@host"},
        {"url": f"https://host?token={canary}"},
    ]
    for store in wrong:
        with pytest.raises(ConfigError) as caught:
            load_settings(store=store)
        assert canary not in str(caught.value) and "store" in str(caught.value)
        with pytest.raises(ValidationError) as invalid:
            Settings(store=store)
        assert canary not in str(invalid.value)


@pytest.mark.parametrize(
    "text",
    ["store:\n  token: canary-5f1e: x\n", "token: *canary-5f1e", "a: !canary-5f1e x", "- canary-5f1e", "canary-5f1e"],
)
def test_a_broken_file_is_not_quoted(tmp_path, text):
    pytest.importorskip("pydantic_settings")
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.yaml") as caught:
        load_settings(file)
    assert "canary-5f1e" not in "".join(traceback.format_exception(caught.value))


def test_settings_do_not_change():
    with pytest.raises(ValidationError):
        Settings().recompute = 3


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic_settings", None)
    monkeypatch.setenv("CACHEGEN_RAG_KERNELS", "numba")  # read elsewhere; no setting
    assert load_settings(store={"url": "memory://"}).store.url == "memory://"
    with pytest.raises(MissingDependencyError, match=r"cachegen-rag\[settings\]"):
        load_settings(tmp_path / "settings.yaml")


def test_importing_settings_is_light():
    code = "import sys, cachegen_rag.config; print(sorted({'yaml', 'pydantic_settings', 'numpy'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
