"""Whether a transformers model can be spliced, seen by its config and proven by a trial.

The trial: one token decoded alone at position 0 and alone at P attends only to itself, so every layer's key must differ
by the rotation that we assume, and by nothing else. That proves base, scaling, pairing and partial rotary, per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cachegen_rag.kv import KVShape
from cachegen_rag.models.torch_attention import Step, forward
from cachegen_rag.models.torch_cache import RecordingCache
from cachegen_rag.models.torch_rope import rotation_error
from cachegen_rag.rope import RopeSpec

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a key from its rotation, relative to the largest key. A wrong base is off by about 1."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Layer types whose KV is one row a token under a mask that positions decide."""


@dataclass(frozen=True)
class Inspection:
    """What was found. ``shape`` and ``rope`` are only a guess where ``refusal`` is set."""

    shape: KVShape
    rope: RopeSpec
    refusal: str | None


def inspect(model: Any, n_ctx: int) -> Inspection:
    """Inspect ``model``, whose attention implementation is ours, for prompts of ``n_ctx`` tokens."""
    config = model.config.get_text_config()
    shape = _config_shape(config)
    rope, reason = _rope(model, config, n_ctx)
    reason = next(_config_reasons(model, config), reason)
    if reason is None:
        try:
            shape, rope, reason = _trial(model, config, rope, n_ctx)
        except Exception as error:
            # Whatever a foreign cache or attention trips over here would trip a request later.
            reason = f"its attention does not work with a prebuilt cache ({type(error).__name__}: {error})"
    return Inspection(shape, rope, reason)


def _config_shape(config: Any) -> KVShape:
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    dim = int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads)
    layers = int(getattr(config, "num_hidden_layers", 1))
    return KVShape(layers, int(getattr(config, "num_key_value_heads", None) or heads), dim, dim)


def _config_reasons(model: Any, config: Any) -> Iterator[str]:
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if kinds:
        yield f"it has layers whose state is not one KV row a token ({', '.join(sorted(kinds))})"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention cannot be given a mask (no attention interface in this version of transformers)"


def _rope(model: Any, config: Any, n_ctx: int) -> tuple[RopeSpec, str | None]:
    nothing = RopeSpec((), "half")
    settings = getattr(config, "rope_parameters", None) or {}
    if not settings:
        return nothing, "it has no rotary position embedding"
    if "rope_type" not in settings:
        kinds = [v for v in settings.values() if isinstance(v, dict)]
        if not kinds or any(k != kinds[0] for k in kinds):
            return nothing, "its layers rotate keys in different ways"
        settings = kinds[0]
    kind = settings.get("rope_type", "default")
    if "mrope_section" in settings:
        return nothing, "its rotary embedding has several position axes"
    if "dynamic" in kind:
        return nothing, "dynamic NTK scaling changes the rotation of all keys with the prompt's length"
    if kind == "longrope":
        switch = settings.get("original_max_position_embeddings") or config.max_position_embeddings
        if n_ctx > switch:
            return nothing, (
                f"LongRoPE changes the rotation of all keys beyond {switch} tokens and the context has {n_ctx}; "
                f"n_ctx={switch} makes it possible"
            )
    buffers = [b for name, b in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    if not buffers or any(b.shape != buffers[0].shape or not torch.equal(b, buffers[0]) for b in buffers):
        return nothing, "its rotary frequencies were not found" if not buffers else "its layers rotate differently"
    measured = buffers[0].detach().double().cpu()
    exact = RopeSpec.plain(
        2 * len(measured), float(settings.get("rope_theta", 1e4)), "half", 1 / settings.get("factor", 1.0)
    )
    # The buffer is float32; where the formula is the plain one, its float64 value is what every engine agrees on.
    plain = kind in ("default", "linear") and torch.allclose(
        measured, torch.tensor(exact.inv_freq, dtype=torch.float64), rtol=1e-5, atol=0
    )
    return (exact if plain else RopeSpec(tuple(measured.tolist()), "half")), None


@torch.inference_mode()
def _trial(model: Any, config: Any, rope: RopeSpec, n_ctx: int) -> tuple[KVShape, RopeSpec, str | None]:
    device = model.get_input_embeddings().weight.device
    layers = int(config.num_hidden_layers)
    positions = sorted({0, min(100, n_ctx - 1), n_ctx - 1})
    token = min(100, int(config.vocab_size) - 1)
    records = []
    for position in positions:
        cache = RecordingCache(layers)
        forward(model, torch.tensor([[token]], device=device), cache, 1, Step([position], [position], device))
        records.append(cache.rows())
    first = records[0]
    if len(first) != layers:
        return _config_shape(config), rope, f"only {len(first)} of its {layers} layers keep KV of their own"
    keys, values = first[0]
    shape = KVShape(layers, keys.shape[1], keys.shape[3], values.shape[3])
    if any(k.shape != keys.shape or v.shape != values.shape for k, v in first):
        return shape, rope, "its layers have KV of different shapes"
    moved = [(position, [k[0, :, 0] for k, _ in record]) for position, record in zip(positions, records, strict=True)]
    # Which channels form a pair is written nowhere but in a model's code; nearly all split the head in halves.
    other = RopeSpec(rope.inv_freq, "interleaved")
    reason = _not_rotated(moved, rope)
    if reason is not None and _not_rotated(moved, other) is None:
        return shape, other, None
    return shape, rope, reason


def _not_rotated(moved: list[tuple[int, list[torch.Tensor]]], rope: RopeSpec) -> str | None:
    """Why the keys ``[kv_heads, key_dim]`` of every layer, by position, are not rotations of the first; or None."""
    _, first = moved[0]
    for position, keys in moved:
        for layer, (at_zero, there) in enumerate(zip(first, keys, strict=True)):
            tolerance = TOLERANCE.get(there.dtype, TOLERANCE[torch.bfloat16])
            error = rotation_error(at_zero, there, position, rope)
            if not error <= tolerance:
                return (
                    f"layer {layer}: its keys at position {position} are not a rotation of those at 0 "
                    f"(relative difference {error:.2g}, at most {tolerance:.2g} is expected)"
                )
    return None
