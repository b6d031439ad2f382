"""May this model's KV be spliced? Decided when it loads, by what its context actually does, not by its name.

Two checks. The sequence state is read, parsed, rebuilt and restored and must come out byte-identical: a library with
another layout is refused, not guessed at. And one token decoded alone, attending only to itself, must have keys that
differ between position 0 and position P by the rotation alone, in every layer: that proves base, pairing, partial
rotation and scaling.
"""

from __future__ import annotations

import numpy as np

from cachegen_rag.errors import SpliceRefusedError
from cachegen_rag.kv import KVShape
from cachegen_rag.models.llama_native import SCRATCH, NativeContext, NativeModel
from cachegen_rag.models.llama_state import layout, parse
from cachegen_rag.rope import RopeSpec, from_interleaved, rotate, to_interleaved

KEY_TOLERANCE = 0.01  # of a layer's largest key: fp16 keys, and llama.cpp's float32 angles at large positions


def refuse_by_kind(model: NativeModel, kv_type: str) -> None:
    """Raise SpliceRefusedError for models and contexts whose KV is more than one row of f16 a token and layer."""
    lib, pointer = model.lib, model.pointer
    if lib.llama_model_is_hybrid(pointer):
        raise SpliceRefusedError("the model is hybrid: part of its state is recurrent")
    if lib.llama_model_is_recurrent(pointer):
        raise SpliceRefusedError("the model is recurrent: its state is not rows of keys and values")
    if lib.llama_model_has_encoder(pointer):
        raise SpliceRefusedError("the model has an encoder")
    if lib.llama_model_n_swa(pointer) > 0:
        raise SpliceRefusedError(
            f"the model attends through a sliding window of {lib.llama_model_n_swa(pointer)} tokens in some layers"
        )
    if kv_type != "f16":
        raise SpliceRefusedError(f"the context holds {kv_type} keys and values; splicing needs kv_type='f16'")


def check_context(context: NativeContext, shape: KVShape, rope: RopeSpec, last: int) -> None:
    """Run both checks on an empty context whose last usable position is ``last``; it is left empty.

    Raises
    ------
    SpliceRefusedError
        Naming the check, the layer and the numbers.
    """
    try:
        _check_state(context, shape)
        _check_rotation(context, shape, rope, last)
    finally:
        context.clear()


def _check_state(context: NativeContext, shape: KVShape) -> None:
    tokens = [i % context.model.n_vocab for i in range(1, 1 + min(8, context.n_batch))]
    context.decode(tokens, 0, all_logits=False, sequence=SCRATCH)
    data = context.get_sequence(SCRATCH)
    state = parse(data, shape)
    built = layout(shape, state.positions, SCRATCH)
    for source, target in zip(state.keys + state.values, built.keys + built.values, strict=True):
        target[...] = source
    if built.data.tobytes() != data.tobytes():
        raise SpliceRefusedError("the sequence state rebuilt from its parts differs from the one read")
    context.remove(SCRATCH)
    if not context.set_sequence(SCRATCH, built.data) or context.get_sequence(SCRATCH).tobytes() != data.tobytes():
        raise SpliceRefusedError("the sequence state read back after a restore differs from the one restored")
    context.remove(SCRATCH)


def _check_rotation(context: NativeContext, shape: KVShape, rope: RopeSpec, last: int) -> None:
    token = min(1, context.model.n_vocab - 1)

    def keys(position: int) -> np.ndarray:
        context.remove(SCRATCH)
        context.decode([token], position, all_logits=False, sequence=SCRATCH)
        state = parse(context.get_sequence(SCRATCH), shape)
        return np.stack(state.keys).astype(np.float32)  # [layers, 1, heads, dim]

    at_zero = to_interleaved(keys(0), rope)
    for position in sorted({min(p, last) for p in (1, 37, 1000, last)}):
        expected = from_interleaved(rotate(at_zero, np.array([position], np.int32), rope), rope)
        error = np.abs(keys(position) - expected).max(axis=(1, 2, 3))
        allowed = KEY_TOLERANCE * np.abs(at_zero).max(axis=(1, 2, 3)) + 1e-4
        if not np.all(error <= allowed):
            layer = int(np.argmax(error / allowed))
            raise SpliceRefusedError(
                f"keys of layer {layer} at position {position} are not those of position 0 rotated: off by "
                f"{error[layer]:.3g}, allowed {allowed[layer]:.3g}"
            )
    context.remove(SCRATCH)
