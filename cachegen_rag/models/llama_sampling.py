"""Choose tokens with llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cachegen_rag.errors import ConfigError, ModelError
from cachegen_rag.models.base import Sampling
from cachegen_rag.models.llama_native import NativeModel

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_LAST_SEED = 0xFFFFFFFE  # 0xFFFFFFFF asks llama.cpp for a random one


class Sampler:
    """llama.cpp's sampler chain for one generation: penalties, grammar, then greedy or top-k, top-p, min-p, dist.

    ``prompt`` are the ids of the whole prompt, taken ones included: penalties look back over them,
    at most ``n_ctx`` tokens.

    Raises
    ------
    ConfigError
        The grammar does not parse.
    """

    def __init__(self, model: NativeModel, sampling: Sampling, prompt: Sequence[int], n_ctx: int) -> None:
        lib = self._lib = model.lib
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._candidates = np.empty(model.n_vocab, _CANDIDATE)
        self._ids = np.arange(model.n_vocab, dtype=np.int32)
        penalized = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0.0, 0.0)
        greedy = sampling.temperature <= 0
        self._plain = greedy and not penalized and sampling.grammar is None
        if penalized:
            last = sampling.repeat_last_n if sampling.repeat_last_n >= 0 else len(prompt)
            last = min(last, n_ctx)  # llama.cpp allocates this many
            arguments = (last, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            try:  # later versions take the vocabulary's size first
                penalties = lib.llama_sampler_init_penalties(model.n_vocab, *arguments)
            except (TypeError, ctypes.ArgumentError):
                penalties = lib.llama_sampler_init_penalties(*arguments)
            for token in prompt[max(len(prompt) - last, 0) :]:
                lib.llama_sampler_accept(penalties, token)
            lib.llama_sampler_chain_add(self._chain, penalties)
        if sampling.grammar is not None:
            self._add_grammar(model, sampling.grammar)
        if greedy:
            lib.llama_sampler_chain_add(self._chain, lib.llama_sampler_init_greedy())
        else:
            seed = secrets.randbelow(_LAST_SEED) if sampling.seed is None else int(sampling.seed) % _LAST_SEED
            for sampler in (
                lib.llama_sampler_init_top_k(sampling.top_k),
                lib.llama_sampler_init_top_p(sampling.top_p, 1),
                lib.llama_sampler_init_min_p(sampling.min_p, 1),
                lib.llama_sampler_init_temp(sampling.temperature),
                lib.llama_sampler_init_dist(seed),
            ):
                lib.llama_sampler_chain_add(self._chain, sampler)

    def _add_grammar(self, model: NativeModel, grammar: str) -> None:
        lib = self._lib
        sampler = lib.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root") if grammar.strip() else None
        if not sampler:
            self.free()
            raise ConfigError("grammar: llama.cpp cannot parse it; it must be GBNF with a rule named root")
        lib.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token, given the logits ``[vocabulary]`` of the last one.

        Raises ModelError when the logits are not finite, or the grammar allows no token at all.
        """
        if self._plain:
            token = int(np.argmax(logits))
            if not np.isfinite(logits[token]):
                raise ModelError("the model's logits are not finite; its weights or its KV are damaged")
            return token
        candidates = self._candidates
        candidates["id"], candidates["logit"], candidates["p"] = self._ids, logits, 0.0
        data = self._lib.llama_token_data_array(
            data=candidates.ctypes.data_as(ctypes.POINTER(self._lib.llama_token_data)),
            size=len(candidates),
            selected=-1,
            sorted=False,
        )
        self._lib.llama_sampler_apply(self._chain, ctypes.byref(data))
        chosen = candidates[data.selected] if 0 <= data.selected < data.size else None
        if chosen is None or not np.isfinite(chosen["logit"]):
            raise ModelError("no token can be chosen: the grammar allows none, or the logits are not finite")
        token = int(chosen["id"])
        self._lib.llama_sampler_accept(self._chain, token)
        return token

    def free(self) -> None:
        """Free the chain and its samplers. Idempotent."""
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural log probabilities ``[vocabulary]``, before any sampling setting."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float32)


def top_logprobs(logprobs: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` likeliest tokens and their log probabilities, likeliest first."""
    count = min(count, len(logprobs))
    if count <= 0:
        return ()
    best = np.argpartition(-logprobs, count - 1)[:count]
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return tuple((int(i), float(logprobs[i])) for i in best)
