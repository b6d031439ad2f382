"""Runs ``test_triton.py`` in Triton's interpreter: a process of its own, because Triton decides that on import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    here = Path(__file__)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here.with_name("test_triton.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 20, result.stdout[-500:]


def test_without_a_gpu_the_error_says_what_to_do():
    torch = pytest.importorskip("torch")
    from cachegen_rag.errors import KernelUnavailableError
    from cachegen_rag.kernels import triton_decoder, triton_encoder

    for kernels in (triton_decoder, triton_encoder):
        with pytest.raises(KernelUnavailableError, match="CUDA device, or numpy arrays"):
            kernels(torch.device("cpu"))


def test_without_triton_the_error_names_the_extra(monkeypatch):
    import importlib

    from cachegen_rag import kernels
    from cachegen_rag.errors import KernelUnavailableError

    def missing(name: str):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(importlib, "import_module", missing)
    device = type("Device", (), {"type": "cuda"})()
    with pytest.raises(KernelUnavailableError, match=r"cachegen-rag\[gpu\]"):
        kernels.triton_decoder(device)
