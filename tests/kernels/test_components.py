"""The forward transform in fixed point: every path gives the same bits, close to the real product; or refuses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cachegen_rag.kernels import cpu, native, reference
from cachegen_rag.kernels.reference import FixedMatrix, Forward, KernelError


@pytest.fixture(params=["numba", "portable", "avx2", "avx512"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CACHEGEN_RAG_KERNELS", request.param)
    native.library.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


def forward(rng: np.random.Generator, cells: list[int], joint: int, own: int, active: int) -> Forward:
    def matrix(rows: int, columns: int) -> FixedMatrix:
        return FixedMatrix.of(rng.standard_normal((rows, columns)))

    return Forward(
        tuple(rng.standard_normal(c).astype(np.float32) for c in cells),
        tuple(matrix(c, joint + own) for c in cells),
        joint,
        matrix(joint * len(cells), active),
        tuple(rng.standard_normal(c) for c in cells),
        0.25,
    )


def arrays(rng: np.random.Generator, rows: int, cells: list[int], kind: str) -> list[NDArray[np.floating]]:  # type: ignore[type-arg]
    out = []
    for number, channels in enumerate(cells):
        x = rng.standard_normal((rows, 1, channels)).astype(np.float32)
        if kind == "outlier":
            x[rows // 2, 0, channels // 2] = 6e4
        elif kind == "tiny":
            x *= np.float32(1e-20)
        elif kind == "zero rows":
            x[::2] = 0
        elif kind == "constant":
            x[:] = 3.25
        elif kind == "half" or (kind == "mixed types" and number % 2):
            x = x.astype(np.float16)
        elif kind == "cut from wider rows":
            x = np.concatenate([x, x, x], axis=2)[:, :, channels : 2 * channels]
        out.append(x)
    return out


@pytest.mark.parametrize(
    "kind", ["outlier", "tiny", "zero rows", "constant", "half", "mixed types", "cut from wider rows"]
)
@pytest.mark.parametrize(
    ("rows", "cells", "joint", "own", "active"),
    [
        (1, [1], 1, 0, 1),
        (3, [2, 31], 2, 17, 3),
        (47, [63, 64, 65], 24, 33, 50),
        (49, [64], 0, 64, 0),
        (130, [16, 16], 16, 0, 31),
        (5, [40, 40], 24, 0, 1),
        (5, [40, 40], 24, 3, 0),
    ],
)
def test_every_path_gives_the_same_bits(
    path: str, rows: int, cells: list[int], joint: int, own: int, active: int, kind: str
) -> None:
    rng = np.random.default_rng(rows)
    transform, given = forward(rng, cells, joint, own, active), arrays(rng, rows, cells, kind)
    want, estimate = reference.components(given, transform)
    have, ours = cpu.components(given, transform)
    np.testing.assert_array_equal(have, want)
    np.testing.assert_allclose(ours, estimate, rtol=1e-12)


def test_close_to_the_real_product() -> None:
    rng = np.random.default_rng(0)
    x, m = rng.standard_normal((90, 193)).astype(np.float32), rng.standard_normal((193, 70))
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(m, axis=0)
    error = np.abs(reference.multiply(x, FixedMatrix.of(m)) - x.astype(np.float64) @ m) / norms
    assert error.max() < 2e-4 and np.sqrt((error**2).mean()) < 4e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_finite_or_too_large_is_refused(path: str, bad: float) -> None:
    rng = np.random.default_rng(1)
    transform, given = forward(rng, [7, 9], 2, 3, 4), arrays(rng, 60, [7, 9], "plain")
    given[1][55, 0, 3] = bad
    for kernels in (cpu, reference):
        with pytest.raises(KernelError, match="not finite, or too large"):
            kernels.components(given, transform)
