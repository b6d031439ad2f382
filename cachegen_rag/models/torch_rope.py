"""Rotary embedding on tensors: the same arithmetic as :mod:`cachegen_rag.rope`, on the device where the KV lies."""

from __future__ import annotations

import numpy as np
import torch

from cachegen_rag.rope import RopeSpec, cos_sin, interleaving


def unrotate(keys: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Remove the rotation of keys ``[..., tokens, heads, key_dim]`` in the engine's own layout.

    positions : ``[tokens]``. Returns float32 with interleaved pairs.
    """
    out = keys.float()
    if rope.layout == "half":
        out = out[..., torch.from_numpy(interleaving(keys.shape[-1], rope)).to(out.device)]
    elif out is keys:
        out = keys.clone()
    cos, sin = (torch.from_numpy(x).to(out.device)[:, None, :] for x in cos_sin(positions.numpy(), rope))
    even, odd = out[..., 0 : rope.rotary_dim : 2], out[..., 1 : rope.rotary_dim : 2]
    even, odd = even * cos + odd * sin, odd * cos - even * sin
    out[..., 0 : rope.rotary_dim : 2], out[..., 1 : rope.rotary_dim : 2] = even, odd
    return out


def rotated(keys: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Rotate keys ``[..., tokens, heads, key_dim]`` with interleaved pairs to ``positions [tokens]``.

    Returns float32 in the engine's own layout.
    """
    out = keys.float().clone()
    cos, sin = (torch.from_numpy(x).to(out.device)[:, None, :] for x in cos_sin(positions.cpu().numpy(), rope))
    even, odd = out[..., 0 : rope.rotary_dim : 2], out[..., 1 : rope.rotary_dim : 2]
    even, odd = even * cos - odd * sin, even * sin + odd * cos
    out[..., 0 : rope.rotary_dim : 2], out[..., 1 : rope.rotary_dim : 2] = even, odd
    if rope.layout == "half":
        out = out[..., torch.from_numpy(np.argsort(interleaving(keys.shape[-1], rope))).to(out.device)]
    return out


def rotation_error(at_zero: torch.Tensor, moved: torch.Tensor, position: int, rope: RopeSpec) -> float:
    """How far ``moved`` is from ``at_zero`` rotated to ``position``, relative to the largest key; ``[heads, dim]``."""
    back = unrotate(moved[None], torch.from_numpy(np.asarray([position])), rope)[0]
    plain = unrotate(at_zero[None], torch.from_numpy(np.asarray([0])), rope)[0]
    return float((back - plain).abs().max() / plain.abs().max().clamp_min(1e-12))
