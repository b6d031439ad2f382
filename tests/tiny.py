"""Writes tiny random-weight GGUF models, so that most tests need no real model.

``write_tiny(path)`` gives a Llama of a few layers with grouped query attention, a byte-level BPE vocabulary with
control tokens and a ChatML template. Other architectures are variants of the same few tensors; each exists because
the llama.cpp engine must treat it differently (rotary layout, scaling, sliding window, recurrence).

Control tokens get a zero row in the output matrix, so greedy decoding practically never stops by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the a of and to in is was for on that with as by it at from this be are were an which or have not but document "
    "question answer passage cache key value token model prompt text prefill river city king science stone name where "
    "what who when how first second third context system user assistant you use only given pass ##  ## \n\n \n"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")


@dataclass(frozen=True)
class TinySpec:
    """What kind of model to write. ``arch``: llama, deci, qwen2, qwen3, qwen2vl, gemma3, stablelm, mamba or jamba."""

    arch: str = "llama"
    layers: int = 3
    heads: int = 4
    kv_heads: int | list[int] = 2  # a list gives every layer its own (deci)
    head_dim: int = 32
    ffn: int = 192
    context: int = 4096
    rope_base: float = 10000.0
    rotary_dim: int | None = None  # partial rotary embedding (stablelm)
    rope_scaling: str | None = None  # "linear" or "yarn"
    rope_factor: float = 4.0
    rope_original_context: int = 1024
    llama3_factors: bool = False  # a rope_freqs tensor, as Llama 3.1 has
    bos: str | None = None  # a control token that the tokenizer adds in front
    eos: str = "<|im_end|>"
    chat_template: str | None = CHATML
    merges: int = 240
    dtype: Any = np.float32
    seed: int = 7
    extra: dict[str, Any] = field(default_factory=dict)  # more metadata: uint32 or float32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def vocabulary(merges: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and BPE merges, learned from ``WORDS``."""
    characters = byte_characters()
    words = [[characters[b] for b in (" " + w).encode()] for w in WORDS.split(" ") if w.strip()] * 2
    words += [[characters[b] for b in w.encode()] for w in WORDS.split(" ") if w]
    learned: list[str] = []
    tokens = list(characters)
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
        words = [_merge(word, left, right) for word in words]
    types = [int(gguf.TokenType.NORMAL)] * len(tokens) + [int(gguf.TokenType.CONTROL)] * len(CONTROL)
    return tokens + list(CONTROL), types, learned


def _merge(word: list[str], left: str, right: str) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and out[-1] == left and piece == right:
            out[-1] = left + right
        else:
            out.append(piece)
    return out


def write_tiny(path: str | Path, spec: TinySpec | None = None, **changes: Any) -> Path:
    """Write the model of ``spec`` (or of ``TinySpec(**changes)``) to ``path`` and return the path."""
    spec = spec or TinySpec(**changes)
    path = Path(path)
    writer = gguf.GGUFWriter(str(path), spec.arch)
    tokens, types, merges = vocabulary(spec.merges)
    _write_metadata(writer, spec)
    _write_vocabulary(writer, spec, tokens, types, merges)
    random = np.random.default_rng(spec.seed)

    def weight(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * (scale / np.sqrt(columns))
        writer.add_tensor(f"{name}.weight", values.astype(spec.dtype))

    def vector(name: str, size: int | tuple[int, ...], mean: float = 1.0, suffix: str = "weight") -> None:
        values = mean + 0.1 * random.standard_normal(size).astype(np.float32)
        writer.add_tensor(f"{name}.{suffix}" if suffix else name, values)

    weight("token_embd", len(tokens), spec.width, scale=np.sqrt(spec.width))
    norms = ("weight", "bias") if spec.arch == "stablelm" else ("weight",)
    for suffix in norms:
        vector("output_norm", spec.width, mean=float(suffix == "weight"), suffix=suffix)
    if spec.llama3_factors:
        half = (spec.rotary_dim or spec.head_dim) // 2
        writer.add_tensor("rope_freqs.weight", np.linspace(1.0, spec.rope_factor, half, dtype=np.float32))
    for layer in range(spec.layers):
        recurrent = spec.arch == "mamba" or (spec.arch == "jamba" and layer % 2 == 0)
        for suffix in norms:
            vector(f"blk.{layer}.attn_norm", spec.width, mean=float(suffix == "weight"), suffix=suffix)
        (_write_mamba if recurrent else _write_attention)(spec, layer, weight, vector)
        if spec.arch != "mamba":
            for suffix in norms:
                vector(f"blk.{layer}.ffn_norm", spec.width, mean=float(suffix == "weight"), suffix=suffix)
            weight(f"blk.{layer}.ffn_gate", spec.ffn, spec.width)
            weight(f"blk.{layer}.ffn_up", spec.ffn, spec.width)
            weight(f"blk.{layer}.ffn_down", spec.width, spec.ffn)
    output = random.standard_normal((len(tokens), spec.width), dtype=np.float32) * (3.0 / np.sqrt(spec.width))
    output[-len(CONTROL) :] = 0
    writer.add_tensor("output.weight", output.astype(spec.dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    writer.add_name(f"tiny {spec.arch}")
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if spec.dtype == np.float32 else gguf.LlamaFileType.MOSTLY_F16)
    if spec.arch in ("mamba", "jamba"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * spec.width)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
    if spec.arch == "mamba":
        return
    writer.add_head_count(spec.heads)
    kv_heads = [0 if layer % 2 == 0 else 2 for layer in range(spec.layers)] if spec.arch == "jamba" else spec.kv_heads
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_base)
    writer.add_rope_dimension_count(spec.rotary_dim or spec.head_dim)
    if spec.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(spec.rope_scaling))
        writer.add_rope_scaling_factor(spec.rope_factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope_original_context)
    if spec.arch == "gemma3":
        writer.add_sliding_window(64)
    if spec.arch == "stablelm":
        writer.add_parallel_residual(False)
    if spec.arch == "qwen2vl":
        writer.add_rope_dimension_sections([4, 6, 6, 0])
    for key, value in spec.extra.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{spec.arch}.{key}", value)


def _write_vocabulary(
    writer: gguf.GGUFWriter, spec: TinySpec, tokens: list[str], types: list[int], merges: list[str]
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(spec.bos or "<|im_start|>"))
    writer.add_eos_token_id(tokens.index(spec.eos))
    writer.add_add_bos_token(spec.bos is not None)
    if spec.chat_template is not None:
        writer.add_chat_template(spec.chat_template)


def _write_attention(spec: TinySpec, layer: int, weight: Any, vector: Any) -> None:
    block = f"blk.{layer}"
    heads = 2 if spec.arch == "jamba" else spec.kv_heads[layer] if isinstance(spec.kv_heads, list) else spec.kv_heads
    kv_width = heads * spec.head_dim
    weight(f"{block}.attn_q", spec.width, spec.width, scale=1.5)
    weight(f"{block}.attn_k", kv_width, spec.width, scale=1.5)
    weight(f"{block}.attn_v", kv_width, spec.width)
    weight(f"{block}.attn_output", spec.width, spec.width)
    if spec.arch in ("qwen2", "qwen2vl"):
        for name, size in (("attn_q", spec.width), ("attn_k", kv_width), ("attn_v", kv_width)):
            vector(f"{block}.{name}", size, mean=0.0, suffix="bias")
    if spec.arch in ("qwen3", "gemma3"):
        vector(f"{block}.attn_q_norm", spec.head_dim)
        vector(f"{block}.attn_k_norm", spec.head_dim)
    if spec.arch == "gemma3":
        vector(f"{block}.post_attention_norm", spec.width)
        vector(f"{block}.post_ffw_norm", spec.width)


def _write_mamba(spec: TinySpec, layer: int, weight: Any, vector: Any) -> None:
    block, inner, state, rank = f"blk.{layer}", 2 * spec.width, 16, 8
    weight(f"{block}.ssm_in", 2 * inner, spec.width)
    weight(f"{block}.ssm_conv1d", inner, 4)
    vector(f"{block}.ssm_conv1d", inner, mean=0.0, suffix="bias")
    weight(f"{block}.ssm_x", rank + 2 * state, inner)
    weight(f"{block}.ssm_dt", inner, rank)
    vector(f"{block}.ssm_dt", inner, mean=0.0, suffix="bias")
    weight(f"{block}.ssm_out", spec.width, inner)
    vector(f"{block}.ssm_d", inner, suffix="")
    vector(f"{block}.ssm_a", (inner, state), mean=-1.0, suffix="")
    if spec.arch == "jamba":
        vector(f"{block}.ssm_dt_norm", rank)
        vector(f"{block}.ssm_b_norm", state)
        vector(f"{block}.ssm_c_norm", state)
