"""What an error in a document's KV costs, from gradients: the Fisher information of keys and values.

For a small error ``e`` of a token's keys (or values) of a layer, the KL divergence of the predictions grows by about
``e^T F e / 2`` with ``F = E[g g^T]``: ``g`` is the gradient of the log probability of a continuation that is drawn
from the model's own predictions (see Martens, "New insights and perspectives on the natural gradient method", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cachegen_rag.models.torch_attention import forward
from cachegen_rag.models.torch_rope import unrotate

if TYPE_CHECKING:
    from cachegen_rag.models.transformers import Loaded


def kv_fisher(
    loaded: Loaded, prefix: Sequence[int], document: Sequence[int], continuation: Sequence[int], draws: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fisher information summed over the document's tokens and the continuation's predictions, mean over ``draws``.

    Returns ``[layers, channels, channels]`` for keys (rotation removed, interleaved pairs) and for values.
    """
    model, shape, n = loaded.model, loaded.shape, len(document)
    start, stop = len(prefix), len(prefix) + n
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        ids = torch.tensor([[*prefix, *document]], device=loaded.device)
        cache = loaded.plain_cache()
        with torch.no_grad():
            forward(model, ids, cache, 1)
        leaves, given = [], loaded.plain_cache()
        for layer in range(shape.layers):
            pair = [t.detach() for t in (cache.layers[layer].keys, cache.layers[layer].values)]
            middle = [t[:, :, start:stop].clone().requires_grad_(True) for t in pair]
            leaves.append(middle)
            given.update(*(torch.cat([t[:, :, :start], m], dim=2) for t, m in zip(pair, middle, strict=True)), layer)
        with torch.enable_grad():
            logits = forward(model, torch.tensor([list(continuation)], device=loaded.device), given, len(continuation))
            logp = logits.float().log_softmax(-1).reshape(len(continuation), -1)
        generator = torch.Generator().manual_seed(seed)
        keys = np.zeros((shape.layers, shape.key_channels, shape.key_channels))
        values = np.zeros((shape.layers, shape.value_channels, shape.value_channels))
        positions = torch.arange(start, stop)
        for draw in range(draws):
            drawn = torch.multinomial(logp.detach().exp().cpu(), 1, generator=generator).to(logp.device)
            total = logp.gather(1, drawn).sum()
            flat = [leaf for pair in leaves for leaf in pair]
            gradients = torch.autograd.grad(total, flat, retain_graph=draw + 1 < draws)
            for layer in range(shape.layers):
                # A rotation keeps inner products, so the gradient turns back as a key does.
                g = unrotate(gradients[2 * layer][0].transpose(0, 1), positions, loaded.rope).reshape(n, -1)
                keys[layer] += (g.T @ g).double().cpu().numpy() / draws
                g = gradients[2 * layer + 1][0].transpose(0, 1).float().reshape(n, -1)
                values[layer] += (g.T @ g).double().cpu().numpy() / draws
        return keys, values
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
