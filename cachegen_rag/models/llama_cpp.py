"""The llama.cpp engine: any GGUF model, on llama-cpp-python's low-level API. Loads on first use.

Reading order: ``llama_native`` (the raw calls), ``llama_state`` (a sequence's bytes), ``llama_rope`` and
``llama_check`` (may it be spliced?), ``llama_session`` (a prompt), ``llama_kept`` (what the next prompt begins with),
``llama_sampling``, ``llama_queries``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from cachegen_rag.config import expect
from cachegen_rag.errors import ConfigError, ModelError, ModelLoadError, RequestCancelledError, SpliceRefusedError
from cachegen_rag.fingerprint import ModelFingerprint
from cachegen_rag.kv import KVShape
from cachegen_rag.models.identity import file_hash, tokenizer_hash
from cachegen_rag.models.llama_check import check_context, refuse_by_kind
from cachegen_rag.models.llama_kept import KeptRuns
from cachegen_rag.models.llama_native import KV_TYPES, NativeContext, NativeModel, check_gguf
from cachegen_rag.models.llama_rope import rope_spec
from cachegen_rag.models.llama_session import LlamaSession
from cachegen_rag.models.turns import Turns
from cachegen_rag.rope import RopeSpec

EXIT_SECONDS = 2.0  # that the end of the process waits for a request under way; its memory goes with the process then
DEFAULT_CONTEXT = 8192  # tokens, or the context the model was trained with if that is shorter


class LlamaCppModel:
    """A GGUF model in llama.cpp (a :class:`cachegen_rag.models.base.KVModel`).

    Parameters
    ----------
    path : the .gguf file. It must exist; it is loaded on first use.
    n_ctx : tokens that prompt and answer may have together. None: the model's own context, at most 8,192.
    n_threads : threads for compute. None: as many as this process may use cores.
    n_batch : tokens a decode call; longer runs are split.
    kv_type : type of the engine's cache. Only ``f16`` can be spliced; the others answer by plain prefill.
    n_gpu_layers : layers to offload, if llama-cpp-python was built for a GPU.
    keep_tokens : room for leading runs that sessions keep for later ones (``Session.keep``).

    Notes
    -----
    The cache is a quarter larger than ``n_ctx``, plus ``keep_tokens``: staged rows that are recomputed instead of
    taken, and kept runs, need cells of their own.

    Raises
    ------
    ModelLoadError
        The file is missing, is no GGUF, or llama.cpp cannot load it (the last on first use).
    ConfigError
        A parameter is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        n_batch: int = 512,
        kv_type: str = "f16",
        n_gpu_layers: int = 0,
        keep_tokens: int = 2048,
        name: str | None = None,
    ) -> None:
        expect("path", path, (str, os.PathLike), "the path of a GGUF file")
        self.path = Path(path)
        check_gguf(self.path)
        for field, value, least in (("n_ctx", n_ctx, 8), ("n_threads", n_threads, 1), ("n_batch", n_batch, 1)):
            expect(field, value, (int, type(None)), "a whole number")
            if value is not None and value < least:
                raise ConfigError(f"{field}={value} must be at least {least}")
        if kv_type not in KV_TYPES:
            raise ConfigError(f"kv_type={kv_type!r} must be one of {', '.join(KV_TYPES)}")
        self._n_ctx = n_ctx
        self.n_threads = n_threads or _usable_cores()
        self._n_batch = n_batch
        self._kv_type = kv_type
        self._n_gpu_layers = n_gpu_layers
        self.name = name or self.path.stem
        self.kept = KeptRuns(max(keep_tokens, 0))
        self._turns = Turns()
        self._loading = threading.RLock()
        self._native: NativeModel | None = None
        self._context: NativeContext | None = None
        self._engine: list[NativeContext | NativeModel] = []  # what to free, the context first
        weakref.finalize(self, _free_when_idle, self._turns, self._engine)
        self._refusal: str | None = None
        self._closed = False
        self._loaded_file: tuple[int, ...] = ()
        self._pieces: dict[int, bytes] = {}

    # What is known of the model: needs its weights loaded, not its context.

    @property
    def native(self) -> NativeModel:
        """The loaded weights and vocabulary."""
        with self._loading:
            if self._closed:
                raise ModelError(f"the model {self.name} has been closed")
            if self._native is None:
                self._loaded_file = _file_state(self.path)
                self._native = NativeModel(self.path, n_gpu_layers=self._n_gpu_layers)
                self._engine.append(self._native)
            return self._native

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar entries, as text."""
        return self.native.metadata()

    @cached_property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
        return self.native.n_vocab

    @cached_property
    def n_head(self) -> int:
        """Query heads of a layer."""
        return int(self.native.lib.llama_model_n_head(self.native.pointer))

    @cached_property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""
        if self._n_ctx is not None:
            return self._n_ctx
        return min(int(self.native.lib.llama_model_n_ctx_train(self.native.pointer)), DEFAULT_CONTEXT)

    @cached_property
    def shape(self) -> KVShape:
        """The shape of one token's KV, as the metadata has it."""
        lib, pointer = self.native.lib, self.native.pointer
        attention = f"{self.metadata['general.architecture']}.attention"
        head_dim = int(lib.llama_model_n_embd(pointer)) // max(self.n_head, 1)
        return KVShape(
            layers=int(lib.llama_model_n_layer(pointer)),
            kv_heads=int(lib.llama_model_n_head_kv(pointer)),
            key_dim=int(self.metadata.get(f"{attention}.key_length", head_dim)),
            value_dim=int(self.metadata.get(f"{attention}.value_length", head_dim)),
        )

    @cached_property
    def rope(self) -> RopeSpec:
        """How the engine rotates its keys; no rotation for a model that is refused because of it."""
        try:
            return self._rope()
        except SpliceRefusedError:
            return RopeSpec((), "interleaved")

    def _rope(self) -> RopeSpec:
        lib, pointer = self.native.lib, self.native.pointer
        rope_type, trained = lib.llama_model_rope_type(pointer), lib.llama_model_n_ctx_train(pointer)
        return rope_spec(self.metadata, rope_type, self.shape.key_dim, trained, self.path)

    @cached_property
    def fingerprint(self) -> ModelFingerprint:
        """The identity of this model's KV: hashes the whole file once a process.

        Raises ModelLoadError when the file is no longer the one that was loaded.
        """
        native = self.native
        weights = file_hash(self.path)
        if _file_state(self.path) != self._loaded_file:
            raise ModelLoadError(f"the model file {self.path} has changed since it was loaded; load it again")
        texts = [native.lib.llama_vocab_get_text(native.vocab, i) or b"" for i in range(native.n_vocab)]
        return ModelFingerprint(
            weights=weights,
            tokenizer=tokenizer_hash(texts),
            shape=self.shape,
            rope=RopeSpec(self.rope.inv_freq, "interleaved"),
            kv_dtype=self._kv_type,
        )

    @cached_property
    def bos_id(self) -> int | None:
        """The id a prompt must begin with, or None."""
        lib, vocab = self.native.lib, self.native.vocab
        bos = int(lib.llama_vocab_bos(vocab))
        return bos if lib.llama_vocab_get_add_bos(vocab) and bos >= 0 else None

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a turn, or None."""
        eos = int(self.native.lib.llama_vocab_eos(self.native.vocab))
        return eos if eos >= 0 else None

    @cached_property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        text = self.native.lib.llama_model_chat_template(self.native.pointer, None)
        return text.decode("utf-8", "replace") if text else None

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of ``text``, without BOS or EOS. ``special=False`` keeps control-token markup plain text."""
        return self.native.tokenize(text.encode("utf-8", "replace"), special) if text else []

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, control tokens by their names; undecodable bytes become U+FFFD."""
        native = self.native
        return b"".join(native.piece(int(i), True) for i in token_ids).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a generated token adds to the answer; control tokens add none."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.native.piece(token, False)
        return piece

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends an answer."""
        return bool(self.native.lib.llama_vocab_is_eog(self.native.vocab, token))

    # The context.

    @property
    def context(self) -> NativeContext:
        """The engine's context; made, and checked for splicing, on first use."""
        with self._loading:
            native = self.native
            if self._context is None:
                cells = self.n_ctx + self.n_ctx // 4 + self.kept.room
                self._check_memory(cells)
                context = NativeContext(
                    native,
                    cells=cells,
                    n_batch=min(self._n_batch, cells),
                    n_threads=self.n_threads,
                    kv_type=self._kv_type,
                )
                self._engine.insert(0, context)
                try:
                    refuse_by_kind(native, self._kv_type)
                    check_context(context, self.shape, self._rope(), self.n_ctx - 1)
                except SpliceRefusedError as refusal:
                    self._refusal = str(refusal)
                self._context = context
            return self._context

    def _check_memory(self, cells: int) -> None:
        """Raise ModelLoadError if the cache exceeds the machine's memory; the system would end the process."""
        needed = cells * self.shape.fp16_bytes_per_token
        if self._n_gpu_layers == 0 and needed > (memory := _physical_memory()):
            raise ModelLoadError(
                f"n_ctx={self.n_ctx} needs a cache of {needed / 2**30:.1f} GiB; this machine has "
                f"{memory / 2**30:.1f} GiB of memory. Give a smaller n_ctx."
            )

    @property
    def refusal(self) -> str | None:
        """Why this model is not spliced, or None."""
        if self._context is None:
            _ = self.context
        return self._refusal

    @contextmanager
    def session(self) -> Iterator[LlamaSession]:
        """Exclusive use of the context with an empty prompt; sessions are served in the order they came.

        Raises ModelError when this thread has one open already, or the model has been closed.
        """
        self._turns.acquire()
        try:
            session = LlamaSession(self)
            failed = True
            try:
                yield session
                failed = False
            except (GeneratorExit, RequestCancelledError):  # the prompt is as it was before the decode
                failed = False
                raise
            finally:
                session._close(failed)
        finally:
            self._turns.release()

    def read_on(self) -> None:
        """The open session goes on in this thread; its answer may be read by changing threads."""
        self._turns.here()

    def close(self) -> None:
        """Free the engine, after the session that is open. Idempotent."""
        if self._closed:
            return
        self._turns.acquire()
        try:
            with self._loading:
                self._closed = True
                for part in self._engine:
                    part.free()
        finally:
            self._turns.release()

    def __enter__(self) -> LlamaCppModel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LlamaCppModel({str(self.path)!r})"


def _free_when_idle(turns: Turns, engine: list[NativeContext | NativeModel]) -> None:
    """Free a forgotten engine, or one at the end of the process, unless a thread still computes with it."""
    for part in engine:
        if isinstance(part, NativeContext):
            part.abort()
    try:
        idle = turns.acquire(EXIT_SECONDS, patience=0.0)
    except ModelError:  # this thread itself left a stream unfinished: nothing computes
        idle = True
    if idle:
        for part in engine:
            part.free()


def _file_state(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62  # unknown
