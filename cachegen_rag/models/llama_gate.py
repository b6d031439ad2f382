"""The compiled gate before llama.cpp's evaluation callback (see ``llama_queries.py``). Importing it imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, address: Any, tensor: Any, ask: Any, data: Any) -> Any:
    """``((bool (*)(void *, bool, void *)) address)(tensor, ask, data)``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, pointer = ir.IntType(8), ir.IntType(8).as_pointer()
        function = ir.FunctionType(byte, [pointer, byte, pointer])
        callee = builder.inttoptr(args[0], function.as_pointer())
        asked = builder.zext(args[2], byte) if args[2].type.width < 8 else args[2]
        answer = builder.call(callee, [args[1], asked, args[3]])
        return builder.icmp_unsigned("!=", builder.and_(answer, byte(1)), byte(0))

    return types.boolean(types.int64, types.voidptr, types.boolean, types.voidptr), generate


def _gate(tensor: Any, ask: Any, data: Any) -> Any:
    """``data`` points to two int64: armed or not, and the address of the callback that answers when armed."""
    state = numba.carray(data, (2,), np.int64)  # type: ignore[attr-defined]
    return _call(state[1], tensor, ask, data) if state[0] != 0 else False  # type: ignore[call-arg]


def _compiled() -> Any:
    signature = types.boolean(types.voidptr, types.boolean, types.voidptr)
    try:
        return numba.cfunc(signature, cache=True)(_gate)
    except RuntimeError:  # no folder to cache in: a read-only installation
        return numba.cfunc(signature)(_gate)


gate = _compiled()
