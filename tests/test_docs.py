"""The guides and docstrings say what is so: examples run, commands and settings exist, nginx works."""

from __future__ import annotations

import doctest
import importlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachegen_rag.cli import app
from cachegen_rag.config import Settings
from cachegen_rag.errors import StoreError

sys.path.insert(0, str(Path(__file__).parent / "stores"))
import nginx as nginx_of_tests

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "cookbook" / "README.md",
]


def modules_with_examples() -> list[str]:
    found = []
    for folder, package in (
        ("cachegen_rag", "cachegen_rag"),
        ("kernels", "cachegen_rag.kernels"),
        ("integrations", "cachegen_rag.integrations"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *(p for p in parts if p != "__init__")]))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_and_settings_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    for name in re.findall(r"(?:`|^    )(?:\S+/)?cachegen-rag ([a-z]+)", text, re.MULTILINE):
        assert name in commands, name
    for name in re.findall(r"CACHEGEN_RAG_([A-Z_]+)", text):
        section, _, field = name.lower().partition("__")
        if field:
            model: Any = Settings.model_fields[section].annotation
            assert field in model.model_fields, name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_python_in_the_guides_compiles_and_its_names_exist(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, str(path), "exec")
        for module, names in re.findall(r"^from (cachegen_rag[\w.]*) import ([\w, ]+)$", block, re.MULTILINE):
            for name in names.split(","):
                assert hasattr(importlib.import_module(module), name.strip()), f"{module}.{name}"


@pytest.fixture
def guide_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """nginx with the configuration of the guide, its paths, names and token replaced: URL and certificate."""
    if nginx_of_tests.missing():
        pytest.skip(str(nginx_of_tests.missing()))
    guide = (ROOT / "docs" / "shared-store.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```nginx\n(.*?)```", guide, re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "kv").mkdir()
    certificate = nginx_of_tests.make_certificate(tmp_path)
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/kv.pem", str(certificate)),
        ("/etc/ssl/kv.key", str(tmp_path / "key.pem")),
        ("/srv/kv", str(tmp_path / "kv")),
        ("REPLACE-WITH-A-TOKEN", "open-sesame"),
    ):
        assert old in block
        block = block.replace(old, new)
    others = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
        f"http {{ access_log off; {others}\n{block}\n}}\n"
    )
    process = subprocess.Popen([str(nginx_of_tests.NGINX), "-p", tmp_path, "-c", conf], stderr=subprocess.PIPE)
    try:
        for _ in range(200):
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"https://localhost:{port}", certificate
    finally:
        process.terminate()
        process.wait()


@pytest.mark.nginx
def test_the_nginx_configuration_of_the_guide(guide_server: tuple[str, Path]) -> None:
    from cachegen_rag.fingerprint import content_hash
    from cachegen_rag.stores.http import HTTPStore

    url, certificate = guide_server
    data = b"a bitstream" * 1000
    key = content_hash(data)
    writer = HTTPStore(url, token="open-sesame", ca_file=str(certificate))
    reader = HTTPStore(url, ca_file=str(certificate))
    thief = HTTPStore(url, token="open-barley", ca_file=str(certificate))
    try:
        writer.put("cas", key, data)
        writer.put("ac", "a" * 64, b"a manifest")
        assert reader.get("cas", key) == data and reader.contains("ac", "a" * 64)
        for stranger in (reader, thief):
            with pytest.raises(StoreError):
                stranger.put("ac", "a" * 64, b"another manifest")
            with pytest.raises(StoreError):
                stranger.delete("cas", key)
        assert reader.get("ac", "a" * 64) == b"a manifest"
        writer.put("ac", "a" * 64, b"a newer manifest")
        assert reader.get("ac", "a" * 64) == b"a newer manifest"
        assert writer.delete("cas", key) and reader.get("cas", key) is None
    finally:
        for store in (writer, reader, thief):
            store.close()
