"""Loads the C kernels (``codec.c``), where the package was built with a compiler. Internal; ``cpu.py`` uses it."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

ABI = 4
_INSTRUCTION_SETS = {"portable": 0, "avx2": 1, "avx512": 2}


COLUMN = np.dtype([("scale", "f4"), ("shrink", "f4", 2), ("part", "i4"), ("row", "i4")])
"""``Column`` of codec.c."""


class Cell(ctypes.Structure):
    """``Cell`` of codec.c."""

    _fields_ = [
        ("head", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("own", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
    ]


class ForwardCell(ctypes.Structure):
    """``ForwardCell`` of codec.c."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("mean", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("top_scale", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("own_scale", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("n_own", ctypes.c_int64),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: not built, of another version, or CACHEGEN_RAG_KERNELS asks for another path.

    CACHEGEN_RAG_KERNELS may be ``numba``, ``portable``, ``avx2`` or ``avx512``; by default the best there is.
    """
    wanted = os.environ.get("CACHEGEN_RAG_KERNELS", "").lower()
    if wanted == "numba":
        return None
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_codec" + suffix)
        if path.exists():
            try:
                return _load(path, _INSTRUCTION_SETS.get(wanted, -1))
            except (OSError, AttributeError):
                return None
    return None


def _load(path: Path, instruction_set: int) -> ctypes.CDLL | None:
    lib = ctypes.CDLL(str(path))
    if lib.cg_abi() != ABI:
        return None
    p, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    lib.cg_decode.argtypes = [p, size, p, p, p, p, p, i64, i64, p]
    lib.cg_encode.argtypes = [p, i64, i64, p, p, p, p, p, p]
    lib.cg_encode.restype = i64
    f32 = ctypes.c_float
    lib.cg_components.argtypes = [p, i64, i64, i64, p, p, i64, p, i64, p]
    lib.cg_quantize.argtypes = [p, i64, i64, p, p, i64, f32, f32, p, p, p, p, p, i64]
    lib.cg_quantize.restype = i64
    lib.cg_reconstruct.argtypes = [
        p, i64, p, i64, p, p, i64, p, p, i64, i64, i64, p, i64, p, p, ctypes.c_int, ctypes.c_int
    ]  # fmt: skip
    lib.cg_set_isa(instruction_set)
    return lib
