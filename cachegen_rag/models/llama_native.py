"""The raw llama.cpp calls: load a model, make a context, decode a batch, read logits, read and write sequences.

The only file that deals in pointers. ``llama_cpp.Llama`` hides the unified cache and its sequences, so the context is
made through the low-level API. The library is imported on first use.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import (
    ContextOverflowError,
    MissingDependencyError,
    ModelError,
    ModelLoadError,
    RequestCancelledError,
)
from cachegen_rag.models.llama_queries import QueryTap

MAIN, LIBRARY, SCRATCH = 0, 1, 2  # sequences: the prompt, staged rows, in between
FIRST_KEPT = 3  # and the leading runs kept from earlier prompts
FIRST_RUN = FIRST_KEPT + 5  # and runs of one prompt that are computed in one call
RUNS_AT_ONCE = 64
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
GGML_LOG_LEVEL_ERROR = 4
LOGGED_ERRORS = 8  # lines, the last ones
_log = logging.getLogger(__name__)
_errors: list[str] = []
_errors_lock = threading.Lock()


@cache
def library() -> Any:
    """The ``llama_cpp.llama_cpp`` module, its backend ready and its log going to ``logging`` instead of stderr."""
    try:
        import llama_cpp
    except ImportError as error:
        raise MissingDependencyError("llama.cpp is not installed: pip install llama-cpp-python") from error
    llama_cpp.llama_cpp.llama_log_set(_log_callback(), ctypes.c_void_p(0))
    llama_cpp.llama_cpp.llama_backend_init()
    return llama_cpp.llama_cpp


@cache
def _log_callback() -> Any:
    """Takes llama.cpp's log to this module's logger; and to llama-cpp-python's own when somebody made that verbose."""
    from llama_cpp import _logger, llama_log_callback

    @llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(level: int, text: bytes, user_data: Any) -> None:
        line = text.decode("utf-8", "replace").strip()
        _log.debug("%s", line)
        if level == GGML_LOG_LEVEL_ERROR:
            _errors.append(line)
            del _errors[:-LOGGED_ERRORS]
        if _logger.logger.level == logging.DEBUG:
            _logger.llama_log_callback(level, text, user_data)

    return on_log


def call_quietly(call: Callable[[], Any]) -> tuple[Any, str]:
    """What ``call`` returns and the errors that llama.cpp logged meanwhile, in one line."""
    with _errors_lock:
        _errors.clear()
        result = call()
        return result, "; ".join(_errors)


class NativeModel:
    """Weights and vocabulary.

    Raises ModelLoadError when the file is missing, is no GGUF, or llama.cpp does not load it.
    """

    def __init__(self, path: Path, *, n_gpu_layers: int = 0) -> None:
        check_gguf(path)
        lib = self.lib = library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self.pointer, errors = call_quietly(lambda: lib.llama_model_load_from_file(str(path).encode(), params))
        if not self.pointer:
            raise ModelLoadError(
                f"llama.cpp cannot load {path}: {errors or 'no reason given'}. "
                "The file may be damaged, or need a newer llama-cpp-python."
            )
        self.vocab = lib.llama_model_get_vocab(self.pointer)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)

    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar entries, as text."""
        lib = self.lib
        keys, values = lib.llama_model_meta_key_by_index, lib.llama_model_meta_val_str_by_index
        count = lib.llama_model_meta_count(self.pointer)
        return {self._text(keys, index): self._text(values, index) for index in range(count)}

    def _text(self, function: Callable[..., int], index: int) -> str:
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = function(self.pointer, index, buffer, size)
            if needed < size:
                return buffer.value.decode("utf-8", "replace")
            size = needed + 1

    @property
    def is_recurrent(self) -> bool:
        """Whether a sequence has a state of its own, all of it or in part."""
        return bool(self.lib.llama_model_is_recurrent(self.pointer) or self.lib.llama_model_is_hybrid(self.pointer))

    def tokenize(self, text: bytes, special: bool) -> list[int]:
        """Token ids without BOS or EOS; ``special`` parses control-token markup."""
        room = len(text) + 16
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self.lib.llama_tokenize(self.vocab, text, len(text), ids, room, False, special)
            if count >= 0:
                return ids[:count]
            room = -count

    def piece(self, token: int, special: bool) -> bytes:
        """The bytes of one token; control tokens are empty unless ``special``."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self.lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def free(self) -> None:
        if self.pointer:
            self.lib.llama_model_free(self.pointer)
            self.pointer = None


def check_gguf(path: Path) -> None:
    """Raise ModelLoadError unless ``path`` is a readable file that begins like a GGUF."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except FileNotFoundError as error:
        raise ModelLoadError(f"there is no model file at {path}; give the path of a .gguf file") from error
    except OSError as error:
        raise ModelLoadError(f"the model file {path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF model (it begins with {magic!r}); give the path of a .gguf file")


def _strlen() -> Any:
    """C's ``strlen`` as the abort callback: asked between a graph's nodes, it says "yes" once its text is not empty.

    A Python callback would take the GIL a thousand times a decode. The caller reads a bool, the low byte of the length.
    """
    libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    return libc.strlen


class NativeContext:
    """One context: a unified KV cache that several sequences share, and the batch that feeds it."""

    def __init__(self, model: NativeModel, *, cells: int, n_batch: int, n_threads: int, kv_type: str) -> None:
        lib = self.lib = model.lib
        self.model = model
        self.n_batch = n_batch
        params = lib.llama_context_default_params()
        self.runs_at_once = 1 if model.is_recurrent else RUNS_AT_ONCE  # there each sequence is a whole state
        sequences = FIRST_RUN + self.runs_at_once
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = max(n_batch, sequences)  # llama.cpp aborts on a batch with no room for each
        params.n_seq_max, params.kv_unified, params.flash_attn_type = sequences, True, 1
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.no_perf = True
        self.tap = QueryTap()
        params.cb_eval = ctypes.cast(self.tap.callback, lib.ggml_backend_sched_eval_callback)
        params.cb_eval_user_data = self.tap.user_data
        self._abort = ctypes.create_string_buffer(2)
        params.abort_callback = ctypes.cast(_strlen(), lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._abort, ctypes.c_void_p)
        self.pointer, errors = call_quietly(lambda: lib.llama_init_from_model(model.pointer, params))
        if not self.pointer:
            raise ModelLoadError(f"llama.cpp makes no context of {cells} tokens: {errors or 'no reason given'}")
        self.memory = lib.llama_get_memory(self.pointer)
        self._make_batch()

    def _make_batch(self) -> None:
        size = self.n_batch
        self._tokens, self._positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._counts, self._outputs = np.ones(size, np.int32), np.zeros(size, np.int8)
        self._sequence = np.zeros(size, np.int32)  # of each token

        def pointer(array: NDArray[Any], kind: Any) -> Any:
            return array.ctypes.data_as(ctypes.POINTER(kind))

        one = ctypes.POINTER(ctypes.c_int32)
        self._sequences = (one * size)(*[pointer(self._sequence[i : i + 1], ctypes.c_int32) for i in range(size)])
        self._batch = self.lib.llama_batch(
            n_tokens=0,
            token=pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=pointer(self._positions, ctypes.c_int32),
            n_seq_id=pointer(self._counts, ctypes.c_int32),
            seq_id=self._sequences,
            logits=pointer(self._outputs, ctypes.c_int8),
        )

    def decode(self, token_ids: Sequence[int], start: int, *, all_logits: bool, sequence: int = MAIN) -> None:
        """Compute at most ``n_batch`` tokens at positions from ``start``; logits of all or of the last one.

        Raises ContextOverflowError when the cache has no room, RequestCancelledError after :meth:`abort`, ModelError
        when llama.cpp fails otherwise.
        """
        count = len(token_ids)
        self._outputs[:count] = all_logits
        self._outputs[count - 1] = 1
        self._decode([(sequence, start, token_ids)])

    def decode_runs(self, runs: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Compute several runs in one call, without logits: of each its sequence, its first position and its tokens.

        At most ``n_batch`` tokens; no two runs in one sequence. Raises as :meth:`decode` does.
        """
        self._outputs[:] = 0
        self._decode(runs)

    def _decode(self, runs: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        count = 0
        for sequence, start, token_ids in runs:
            stop = count + len(token_ids)
            self._tokens[count:stop] = token_ids
            self._positions[count:stop] = np.arange(start, start + len(token_ids), dtype=np.int32)
            self._sequence[count:stop] = sequence
            count = stop
        self._batch.n_tokens = count
        self._abort[0] = b"\0"
        code = self.lib.llama_decode(self.pointer, self._batch)
        if code == 2:
            raise RequestCancelledError(f"the request was cancelled while {count} tokens were computed")
        start = runs[0][1]
        if code == 1:
            raise ContextOverflowError(
                f"the engine's cache has no room for {count} tokens at position {start}: "
                "prompt, staged rows and kept prefixes together are too many"
            )
        if code != 0:
            raise ModelError(f"llama_decode failed with code {code} on {count} tokens at position {start}")

    def abort(self) -> None:
        """End the decode under way within a few milliseconds; any thread may call it."""
        self._abort[0] = b"x"

    def logits(self, rows: int) -> NDArray[np.float32]:
        """A view ``[rows, vocabulary]`` of the last decode's logits, valid until the next decode."""
        pointer = self.lib.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.model.n_vocab))

    def get_sequence(self, sequence: int) -> NDArray[np.uint8]:
        """The state bytes of a sequence."""
        data = np.empty(self.lib.llama_state_seq_get_size(self.pointer, sequence), np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = self.lib.llama_state_seq_get_data(self.pointer, pointer, len(data), sequence)
        return data[:written]

    def set_sequence(self, sequence: int, data: NDArray[np.uint8]) -> bool:
        """Replace a sequence by state bytes; False (and an empty sequence) when llama.cpp does not accept them."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if 0 < self.lib.llama_state_seq_set_data(self.pointer, pointer, len(data), sequence) == len(data):
            return True
        self.remove(sequence)  # a failed restore can leave rows behind
        return False

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Let ``target`` share the cells of ``source`` at positions ``start`` to ``stop`` (-1: to the end)."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, start, stop)

    def last_logits(self) -> NDArray[np.float32]:
        """A view ``[vocabulary]`` of the logits of the token decoded last, valid until the next decode."""
        pointer = self.lib.llama_get_logits_ith(self.pointer, -1)
        if not pointer:
            raise ModelError("llama.cpp has no logits for the token decoded last")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def remove(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        """Take a sequence out of the cells at positions ``start`` to ``stop`` (-1: to the end).

        False, and nothing done, where that is impossible (part of a recurrent state).
        """
        return bool(self.lib.llama_memory_seq_rm(self.memory, sequence, start, stop))

    def last_position(self, sequence: int) -> int:
        """The last position of a sequence; -1 when it is empty."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, sequence))

    def clear(self, *, rows: bool = True) -> None:
        """Empty every sequence; ``rows`` zeroes the rows too, so that nothing of them can be read again."""
        self.lib.llama_memory_clear(self.memory, rows)

    def free(self) -> None:
        if self.pointer:
            self.lib.llama_free(self.pointer)
            self.pointer = None
