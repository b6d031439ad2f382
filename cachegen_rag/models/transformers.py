"""transformers as an engine: any decoder-only model with attention in every layer, from safetensors or GGUF.

The KV stays on the model's device: staging hands out device memory, export returns device tensors. Nothing of a
model's code is changed; its attention is told where rows lie (see :mod:`cachegen_rag.models.torch_attention`).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError, MissingDependencyError, ModelError, ModelLoadError
from cachegen_rag.fingerprint import ModelFingerprint, canonical_bytes
from cachegen_rag.kv import KVShape
from cachegen_rag.models.base import Session
from cachegen_rag.models.identity import file_hash, tokenizer_hash
from cachegen_rag.models.turns import Turns
from cachegen_rag.rope import RopeSpec

try:
    import torch
    import transformers

    from cachegen_rag.models.torch_attention import NAME
    from cachegen_rag.models.torch_cache import KeptRuns, Library, PromptCache
    from cachegen_rag.models.torch_fisher import kv_fisher
    from cachegen_rag.models.torch_session import TransformersSession
    from cachegen_rag.models.transformers_check import inspect
except ImportError as error:
    raise MissingDependencyError(
        f"the transformers engine is not installed ({error}): pip install 'cachegen-rag[transformers]'"
    ) from error

DEFAULT_CONTEXT = 8192
"""Tokens of context unless asked otherwise; the model's own limit where that is smaller."""

_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "quantization_config"}
"""Fields of a config that say nothing about what the model computes."""


@dataclass
class Loaded:
    """A model in memory, and what its sessions need to know of it."""

    name: str
    model: Any
    tokenizer: Any
    n_ctx: int
    shape: KVShape
    rope: RopeSpec
    refusal: str | None
    weights: str
    tokens: str
    end_ids: frozenset[int]
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    vocabulary: int = field(init=False)

    def __post_init__(self) -> None:
        embedding = self.model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, self.model.dtype
        self.vocabulary = int(self.model.config.get_text_config().vocab_size)

    @property
    def on_host(self) -> bool:
        """Whether KV is handed out and exported as numpy arrays; on any other device as tensors."""
        return self.device.type == "cpu"

    @property
    def shares_memory(self) -> bool:
        """Whether KV is handed out as it lies in memory; numpy, which the CPU decoder uses, has no bfloat16."""
        return not self.on_host or self.dtype != torch.bfloat16

    @property
    def kv_dtype(self) -> str:
        """What a cached value is rounded to; float32 models keep fp16 precision, as llama.cpp's cache does."""
        return "bf16" if self.dtype == torch.bfloat16 else "f16"

    def prompt_cache(self) -> PromptCache:
        """Memory for one prompt."""
        rounding = torch.float16 if self.dtype == torch.float32 else None
        return PromptCache(self.shape, self.n_ctx, self.dtype, self.device, rounding)

    def plain_cache(self) -> Any:
        """The model's own kind of cache, for a model that is not spliced."""
        return transformers.DynamicCache(config=self.model.config)

    def visible_text(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens, control tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TransformersModel:
    """A transformers model as a :class:`~cachegen_rag.models.base.KVModel`. Loads on first use.

    path_or_id : a folder with safetensors weights, a ``.gguf`` file, or the id of a model in the local hub cache
        (nothing is downloaded).
    gguf_file : name of a GGUF file inside the folder ``path_or_id``.
    device : for example ``"cuda"``; by default a GPU if there is one.
    dtype : for example ``torch.bfloat16``; by default the checkpoint's own on a GPU and float32 on the CPU.
    n_ctx : tokens that prompt and answer may have together; by default ``DEFAULT_CONTEXT`` or the model's own limit.
    keep_tokens : room for leading runs that sessions keep for later ones (``Session.keep``).

    Raises
    ------
    ConfigError
        A parameter is out of range.
    ModelLoadError
        On first use: the model is missing, unreadable, or no decoder-only model.
    """

    def __init__(
        self,
        path_or_id: str | os.PathLike[str],
        *,
        gguf_file: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        n_ctx: int | None = None,
        keep_tokens: int = 2048,
    ) -> None:
        if n_ctx is not None and n_ctx < 8:
            raise ConfigError(f"n_ctx={n_ctx} must be at least 8")
        self._source, self._gguf = os.fspath(path_or_id), gguf_file
        if gguf_file is None and self._source.endswith(".gguf"):
            self._source, self._gguf = os.path.split(self._source)
        self._device, self._dtype, self._n_ctx = device, dtype, n_ctx
        self._given: tuple[Any, Any] | None = None
        self._loaded: Loaded | None = None
        self._memory: tuple[PromptCache | None, Library] | None = None
        self._kept = KeptRuns(max(keep_tokens, 0))
        self._loading, self._turns = threading.Lock(), Turns()
        self._closed = False

    @classmethod
    def from_loaded(cls, model: Any, tokenizer: Any, *, n_ctx: int | None = None) -> TransformersModel:
        """Wrap a causal language model that is in memory already; its attention implementation is set to ours."""
        self = cls(getattr(model.config, "_name_or_path", "") or type(model).__name__, n_ctx=n_ctx)
        self._given = (model, tokenizer)
        return self

    @property
    def name(self) -> str:
        """A short name for records and reports."""
        return Path(self._gguf or self._source).stem if self._gguf else Path(self._source).name

    @property
    def fingerprint(self) -> ModelFingerprint:
        """The identity of this model's KV; that of the llama.cpp engine where the same GGUF file is loaded."""
        loaded = self._load()
        rope = RopeSpec(loaded.rope.inv_freq, "interleaved")
        return ModelFingerprint(loaded.weights, loaded.tokens, loaded.shape, rope, loaded.kv_dtype)

    @property
    def shape(self) -> KVShape:
        """Layers, key/value heads and their sizes."""
        return self._load().shape

    @property
    def rope(self) -> RopeSpec:
        """The rotary embedding in the model's own pair layout."""
        return self._load().rope

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._load().n_ctx

    @property
    def refusal(self) -> str | None:
        """Why this model is not spliced, or None. A refused model answers by plain prefill."""
        return self._load().refusal

    @property
    def bos_id(self) -> int | None:
        """The id a prompt must begin with, or None if this model's tokenizer adds none."""
        tokenizer = self._load().tokenizer
        ids = tokenizer("a").input_ids
        return int(ids[0]) if ids and ids[0] == tokenizer.bos_token_id and len(ids) > 1 else None

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text."""
        eos = self._load().tokenizer.eos_token_id
        return None if eos is None else int(eos)

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        template = self._load().tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of ``text``, without BOS or EOS added. ``special=False`` keeps control-token markup plain text."""
        encoded = self._load().tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return [int(i) for i in encoded.input_ids]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``; undecodable bytes become U+FFFD."""
        return str(self._load().tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def output_weights(self) -> list[Any]:
        """Every layer's attention output projection, float32 ``[heads * value_dim, hidden]``, for calibration."""
        modules = [m for _, m in self._load().model.named_modules() if hasattr(m, "o_proj") and hasattr(m, "layer_idx")]
        ordered = sorted(modules, key=lambda m: int(m.layer_idx))
        return [m.o_proj.weight.detach().float().T.cpu().numpy() for m in ordered]

    def kv_fisher(
        self, prefix: Sequence[int], document: Sequence[int], continuation: Sequence[int], *, draws: int, seed: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What errors in a document's KV cost, for calibration (see :mod:`cachegen_rag.models.torch_fisher`).

        Returns ``[layers, channels, channels]`` for keys and for values.
        """
        with self.session():  # nobody else computes meanwhile
            return kv_fisher(self._load(), prefix, document, continuation, draws, seed)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Exclusive use of the context with an empty prompt; waits for the session before it."""
        loaded = self._load()
        self._turns.acquire()
        session = None
        try:
            if self._memory is None:
                library = Library(loaded.shape, loaded.n_ctx, loaded.dtype, loaded.device)
                self._memory = (loaded.prompt_cache() if loaded.refusal is None else None, library)
            cache, library = self._memory
            session = TransformersSession(loaded, cache or loaded.plain_cache(), library, self._kept, self._turns.here)
            yield session
        finally:
            if session is not None:
                session.close()
            self._turns.release()

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._turns.acquire()
        try:
            with self._loading:
                self._loaded = self._memory = self._given = None
                self._kept, self._closed = KeptRuns(0), True
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        finally:
            self._turns.release()

    def _load(self) -> Loaded:
        with self._loading:
            if self._closed:
                raise ModelError(f"the model {self.name} has been closed")
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> Loaded:
        if self._given is not None:
            model, tokenizer = self._given
            weights, tokens = _hash_tensors(model), _hash_tokenizer(tokenizer)
        else:
            model, tokenizer, weights, tokens = self._open()
        model.eval()
        config = model.config.get_text_config()
        if getattr(model.config, "is_encoder_decoder", False):
            raise ModelLoadError(f"{self.name} is an encoder-decoder model; only decoder-only models are supported")
        limit = int(getattr(config, "max_position_embeddings", DEFAULT_CONTEXT) or DEFAULT_CONTEXT)
        n_ctx = min(DEFAULT_CONTEXT, limit) if self._n_ctx is None else self._n_ctx
        original = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        found = inspect(model, n_ctx)
        if found.refusal is not None:
            model.set_attn_implementation(original)
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        end_ids = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
        return Loaded(
            self.name,
            model,
            tokenizer,
            n_ctx,
            found.shape,
            found.rope,
            found.refusal,
            weights,
            tokens,
            frozenset(int(i) for i in end_ids if i is not None),
        )

    def _open(self) -> tuple[Any, Any, str, str]:
        device = torch.device(self._device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = self._dtype or (torch.float32 if device.type == "cpu" else "auto")
        folder = self._folder()
        gguf = {"gguf_file": self._gguf} if self._gguf else {}
        options = {"local_files_only": True, **gguf}
        if self._gguf:
            weights, tokens = file_hash(folder / self._gguf), tokenizer_hash(_gguf_tokens(folder / self._gguf))
            # "auto" would keep what the file's blocks expand to.
            dtype = torch.float16 if dtype == "auto" else dtype
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, **options, **({} if gguf else {"use_safetensors": True})
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelLoadError(f"transformers cannot load {self._source}: {error}") from error
        if not self._gguf:
            weights, tokens = _hash_files(folder, model.config), _hash_tokenizer(tokenizer)
        placed: Any = model
        return placed.to(device), tokenizer, weights, tokens

    def _folder(self) -> Path:
        if self._gguf or os.path.isdir(self._source):
            return Path(self._source)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self._source, local_files_only=True))
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"{self._source} is neither a folder nor a model in the local hub cache; fetch it first: "
                f"huggingface-cli download {self._source}"
            ) from error


def _gguf_tokens(path: Path) -> list[bytes]:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    if field is None:
        raise ModelLoadError(f"{path} has no tokenizer")
    return [bytes(field.parts[i]) for i in field.data]


def _config_bytes(config: Any) -> bytes:
    fields = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    return json.dumps(fields, sort_keys=True, default=str).encode()


def _hash_files(folder: Path, config: Any) -> str:
    """Of the weight files' bytes and of the config, without names and paths."""
    files = sorted(folder.glob("*.safetensors"))
    parts = [file_hash(file) for file in files]
    return hashlib.sha256(canonical_bytes([*parts, _config_bytes(config)])).hexdigest()


def _hash_tensors(model: Any) -> str:
    digest = hashlib.sha256(_config_bytes(model.config))
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(canonical_bytes([name, str(tensor.dtype), list(tensor.shape)]))
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
