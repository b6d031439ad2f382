"""Every kernel compiles to machine code for sm_80 and sm_90, without a GPU: no spills, bounded shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from cachegen_rag.bench.cubins import MAX_SHARED_BYTES, TARGETS, compile_variant, variants

VARIANTS = list(variants())


def test_every_kernel_has_a_variant():
    from cachegen_rag.kernels import triton_decode, triton_encode

    kernels = {
        name
        for module in (triton_decode, triton_encode)
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    assert kernels == {v.kernel.fn.__name__ for v in VARIANTS} and len(kernels) == 5


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.kernel.fn.__name__} {v.name}")
def test_no_spills_and_bounded_shared_memory(variant):
    for architecture in TARGETS:
        cubin = compile_variant(variant, architecture)
        assert cubin.spills == 0, cubin
        assert cubin.shared_bytes <= MAX_SHARED_BYTES == 100 * 1024, cubin
        assert 0 < cubin.registers <= 255 and cubin.bytes > 1000, cubin
        assert cubin.within_bounds
