"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own, on awkward shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-g", "-std=c11", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def runtime(name: str) -> str:
    """The path of a compiler's library; its name alone if the compiler has none."""
    return subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("gcc"), reason="needs gcc on Linux")
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    if not all(os.path.isabs(path) for path in libraries):
        pytest.skip("gcc has no sanitizers")
    kernels = tmp_path / "cachegen_rag" / "kernels"
    kernels.mkdir(parents=True)
    for source in (ROOT / "cachegen_rag").iterdir():
        (tmp_path / "cachegen_rag" / source.name).symlink_to(source)
    for source in (ROOT / "kernels").glob("*.py"):
        (kernels / source.name).symlink_to(source)
    # Rows of an engine's cache may lie at odd addresses: the processors that we write for read them all the same.
    flags = [*FLAGS, "-fno-sanitize=alignment"]
    library = kernels / f"_codec{EXTENSION_SUFFIXES[0]}"
    subprocess.run(["gcc", *flags, str(ROOT / "kernels/codec.c"), "-o", str(library), "-lm"], check=True)
    tests = ["tests/kernels/test_components.py", "tests/attacks/test_hostile_payload.py", "tests/codec/test_golden.py"]
    environment = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *(str(ROOT / test) for test in tests)],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
