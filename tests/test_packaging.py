"""What the installed package promises: its names, what importing it loads, and that every file is in the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cachegen_rag

ROOT = Path(__file__).resolve().parents[1]

PUBLIC_NAMES = {
    "__version__",
    "errors",
    "CacheGenError",
    "Codec",
    "KV",
    "KVCache",
    "KVModel",
    "KVShape",
    "LlamaCppModel",
    "ModelFingerprint",
    "PrefillReport",
    "Profile",
    "RequestRecord",
    "Sampling",
    "SegmentRecord",
    "Store",
    "Token",
    "TransformersModel",
    "calibrate",
    "open_store",
}


def test_public_names_are_pinned() -> None:
    assert set(cachegen_rag.__all__) == PUBLIC_NAMES
    assert set(dir(cachegen_rag)) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(cachegen_rag, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cachegen_rag.nonsense


HEAVY = ("torch", "triton", "transformers", "llama_cpp", "langchain_core", "langchain", "numba", "httpx", "pydantic")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    return set(out.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import cachegen_rag") & set(HEAVY)


def test_the_base_install_never_loads_what_is_an_extra() -> None:
    statement = "import cachegen_rag.cli, cachegen_rag; cachegen_rag.KVCache; cachegen_rag.LlamaCppModel"
    assert not loaded_after(statement) & {"torch", "triton", "transformers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "cachegen_rag").rglob("*.py")}
    for folder in ("kernels", "integrations"):
        wanted |= {"cachegen_rag/" + str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "cachegen_rag" / "data").rglob("*") if path.is_file()}
    wanted.add("cachegen_rag/py.typed")
    assert not {path for path in wanted if "__pycache__" not in path} - packed


def test_imports_point_down_only(wheel: Path, tmp_path: Path) -> None:
    """The layers of pyproject.toml, checked in the wheel: only there do all folders stand in their places."""
    pytest.importorskip("importlinter")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(ROOT / "pyproject.toml")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
