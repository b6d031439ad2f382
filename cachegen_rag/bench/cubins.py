"""Compile every Triton kernel to machine code for a GPU that need not be there, and read what it uses.

Registers, spills and shared memory decide how many programs share a multiprocessor; a spill is a fault. The figures
come from the binaries themselves: ptxas' report and the resource table that cuobjdump prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_SHARED_BYTES = 100 * 1024
"""Shared memory a block may use: what every GPU from sm_80 on grants."""

TARGETS = (80, 90)


@dataclass(frozen=True)
class Cubin:
    """What one kernel, compiled for one architecture, uses. ``spills``: bytes of registers kept in local memory."""

    kernel: str
    variant: str
    architecture: int
    registers: int
    shared_bytes: int
    spills: int
    warps: int
    bytes: int

    @property
    def within_bounds(self) -> bool:
        """No spills, and not too much shared memory."""
        return self.spills == 0 and self.shared_bytes <= MAX_SHARED_BYTES


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def variants() -> Iterator[Variant]:
    """Every kernel at the tile sizes that its launcher chooses, for heads of 64 to 256 channels."""
    from cachegen_rag.kernels import triton_decode

    yield from (Variant(*v) for v in triton_decode.variants())
    try:
        from cachegen_rag.kernels import triton_encode
    except ImportError:
        return
    yield from (Variant(*v) for v in triton_encode.variants())


def compile_variant(variant: Variant, architecture: int) -> Cubin:
    """Compile for ``sm_<architecture>``. Needs Triton, no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    # What a launch specializes on: pointers to whole allocations are aligned, and so are rows of coefficients.
    names = variant.kernel.arg_names
    aligned = [n for n, kind in variant.signature.items() if kind[0] == "*" or n in ("n_coefficients", "n_columns")]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    built: Any = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=variant.options)
    registers, stack = _resources(built.asm["cubin"])
    # Without a stack there can be no spill; with one, ptxas says whether it is for spills or for something else.
    spills = _spills(built.asm["ptx"], built.metadata.target.arch) if stack else 0
    return Cubin(
        variant.kernel.fn.__name__,
        variant.name,
        architecture,
        registers,
        int(built.metadata.shared),
        spills,
        int(built.metadata.num_warps),
        len(built.asm["cubin"]),
    )


def compile_all(architectures: tuple[int, ...] = TARGETS) -> list[dict[str, Any]]:
    """One row a kernel, variant and architecture."""
    rows = []
    for variant in variants():
        for architecture in architectures:
            cubin = compile_variant(variant, architecture)
            rows.append({**asdict(cubin), "within_bounds": cubin.within_bounds})
    return rows


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _spills(ptx: str, architecture: int) -> int:
    """Bytes a thread that ptxas stores and loads because it has no register left."""
    suffix = "a" if architecture == 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        text = subprocess.run(
            [_tool("ptxas"), "-v", f"--gpu-name=sm_{architecture}{suffix}", file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if found is None:
        raise RuntimeError(f"ptxas said nothing of spills: {text:.200}")
    return int(found[1]) + int(found[2])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack or local memory a thread (where spills would go)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text:.200}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
