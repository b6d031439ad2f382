"""Read the queries that llama.cpp computes, through its evaluation callback.

The scheduler calls ``bool callback(tensor, ask, user_data)`` for every tensor of the graph: first to ask whether it is
wanted, then, if so, with the data there. The callback is fixed when the context is made, so a compiled gate
(``llama_gate.py``) stands in front: while nothing is tapped it answers "no" without touching Python (a thousand calls
a decode, each of which would otherwise wait for the GIL). Only ggml's exported functions are called on a tensor; no
struct is read.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import SpliceRefusedError

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_NAME = re.compile(rb"Qcur-(\d+)")


@cache
def _ggml() -> Any:
    """ggml's functions on tensors."""
    import llama_cpp

    from cachegen_rag.models.llama_native import library

    lib = library()
    folder = Path(llama_cpp.__file__).parent / "lib"
    names = ["libggml-base.so", "libggml-base.dylib", "ggml-base.dll"]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    ggml = ctypes.CDLL(str(path)) if path else lib._lib
    for name, arguments, result in (
        ("ggml_get_name", [ctypes.c_void_p], ctypes.c_char_p),
        ("ggml_op_desc", [ctypes.c_void_p], ctypes.c_char_p),
        ("ggml_nbytes", [ctypes.c_void_p], ctypes.c_size_t),
        ("ggml_is_contiguous", [ctypes.c_void_p], ctypes.c_bool),
        ("ggml_backend_tensor_get", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t], None),
    ):
        function = getattr(ggml, name)
        function.argtypes, function.restype = arguments, result
    return ggml


class QueryTap:
    """Captures the rotated queries of the tokens that are decoded while :meth:`tapped` is open."""

    def __init__(self) -> None:
        from cachegen_rag.models.llama_gate import gate

        self._python = _CALLBACK(self._on_tensor)
        self._state = (ctypes.c_int64 * 2)(0, ctypes.cast(self._python, ctypes.c_void_p).value or 0)
        self.user_data = ctypes.cast(self._state, ctypes.c_void_p)
        self.callback = ctypes.c_void_p(gate.address)
        self._captured: dict[int, NDArray[np.float32]] = {}
        self._failure: BaseException | None = None

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Capture while the block runs; one decode at a time."""
        self._captured, self._failure = {}, None
        _ggml()
        self._state[0] = 1
        try:
            yield
        finally:
            self._state[0] = 0

    def queries(self, layers: int, tokens: int, heads: int, key_dim: int) -> NDArray[np.float32]:
        """What was captured: float32 ``[layers, tokens, heads, key_dim]``, rotated, in the engine's pair layout.

        Raises SpliceRefusedError when this llama.cpp does not name or shape its queries as expected.
        """
        if self._failure is not None:
            raise SpliceRefusedError(f"the queries of this model cannot be read: {self._failure}") from self._failure
        expected = tokens * heads * key_dim
        wrong = [layer for layer in range(layers) if getattr(self._captured.get(layer), "size", 0) != expected]
        if wrong or len(self._captured) != layers:
            raise SpliceRefusedError(
                f"the queries of this model cannot be read: {len(self._captured)} of {layers} layers named "
                f"Qcur-<layer>, {len(wrong)} of another size than {tokens} tokens of {heads} heads of {key_dim}"
            )
        return np.stack([self._captured[layer].reshape(tokens, heads, key_dim) for layer in range(layers)])

    def _on_tensor(self, tensor: int, ask: bool, _: int | None) -> bool:
        try:
            ggml = _ggml()
            match = _NAME.fullmatch(ggml.ggml_get_name(tensor) or b"")
            if match is None or ggml.ggml_op_desc(tensor) != b"ROPE":
                return not ask
            if not ask:
                if not ggml.ggml_is_contiguous(tensor):
                    raise ValueError("a query tensor is not contiguous")
                size = ggml.ggml_nbytes(tensor)
                values = np.empty(size // 4, np.float32)
                ggml.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, size)
                self._captured[int(match.group(1))] = values
            return True
        except Exception as failure:  # an exception cannot pass through C
            self._failure = failure
            return not ask
