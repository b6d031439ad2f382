"""Products in fixed point: every path gives the same bits, close to the real product; what has no norm is refused."""

from __future__ import annotations

import numpy as np
import pytest

from cachegen_rag.kernels import cpu, native, reference
from cachegen_rag.kernels.reference import FixedMatrix, KernelError


@pytest.fixture(params=["numba", "portable", "avx2", "avx512"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CACHEGEN_RAG_KERNELS", request.param)
    native.library.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 1), (3, 2, 31), (47, 63, 33), (49, 64, 64), (130, 193, 16)])
@pytest.mark.parametrize("kind", ["normal", "outlier", "tiny", "huge", "zero rows", "constant"])
def test_every_path_gives_the_same_bits(path: str, rows: int, k: int, n: int, kind: str) -> None:
    rng = np.random.default_rng(rows + k)
    x, m = rng.standard_normal((rows, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    if kind == "outlier":
        x[rows // 2, k // 2] = 6e4
    elif kind == "tiny":
        x, m = x * np.float32(1e-20), m * np.float32(1e-12)
    elif kind == "huge":
        x *= np.float32(1e15)
    elif kind == "zero rows":
        x[::2], m[:, ::2] = 0, 0
    elif kind == "constant":
        x[:], m[:] = 3.25, -0.5
    matrix = FixedMatrix.of(m)
    want = reference.multiply(x, matrix)
    np.testing.assert_array_equal(cpu.multiply(x, matrix), want)
    wide = np.zeros((rows, k + 5), np.float32)
    wide[:, 2 : 2 + k] = x
    np.testing.assert_array_equal(cpu.multiply(wide[:, 2 : 2 + k], matrix), want)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(m.astype(np.float64), axis=0)
    assert np.all(np.abs(want - x.astype(np.float64) @ m) <= 1e-4 * np.sqrt(max(k, 4)) * norms)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_finite_or_too_large_is_refused(path: str, bad: float) -> None:
    x = np.ones((60, 7), np.float32)
    x[55, 3] = bad
    for multiply in (cpu.multiply, reference.multiply):
        with pytest.raises(KernelError, match="not finite, or too large"):
            multiply(x, FixedMatrix.of(np.ones((7, 3))))
