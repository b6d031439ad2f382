"""How the next token is chosen: transformers' own logits processors, in llama.cpp's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import Sampling


@dataclass(frozen=True)
class Picked:
    """A chosen token, its log-probability before any processing, and the alternatives asked for."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class CountPenalty(LogitsProcessor):
    """llama.cpp's frequency and presence penalties, which transformers does not have."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Subtract ``count * frequency + presence`` from every token that occurs in ``input_ids [1, n]``."""
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - counts * self.frequency - (counts > 0) * self.presence


class Sampler:
    """Chooses tokens by ``sampling``; one instance a generation, because it holds the random state."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        if sampling.grammar is not None:
            raise ConfigError("grammar: the transformers engine has no GBNF grammars; use the llama.cpp engine")
        self._last_n, self._logprobs = sampling.repeat_last_n, sampling.logprobs
        self._penalties, self._warpers = LogitsProcessorList(), LogitsProcessorList()
        if sampling.repeat_penalty != 1.0:
            self._penalties.append(RepetitionPenaltyLogitsProcessor(sampling.repeat_penalty))
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._penalties.append(CountPenalty(sampling.frequency_penalty, sampling.presence_penalty))
        self._greedy = sampling.temperature <= 0
        if not self._greedy:
            if sampling.top_k > 0:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
            if 0 < sampling.min_p <= 1:
                self._warpers.append(MinPLogitsWarper(sampling.min_p))
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        self._random = torch.Generator(device)
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def pick(self, logits: torch.Tensor, token_ids: Sequence[int]) -> Picked:
        """Choose by ``logits [vocabulary]``; ``token_ids`` is the whole prompt, which the penalties look back over."""
        raw = logits.float()[None]
        scores = raw
        last = len(token_ids) if self._last_n < 0 else self._last_n
        if self._penalties and last:
            seen: Any = torch.tensor([list(token_ids[-last:])], device=raw.device)
            scores = self._penalties(seen, scores.clone())
        if self._greedy:
            chosen = int(scores.argmax())
        else:
            unseen: Any = torch.empty(1, 0, dtype=torch.long)  # the warpers do not look at the prompt
            weights = torch.softmax(self._warpers(unseen, scores), dim=-1)
            chosen = int(torch.multinomial(weights, 1, generator=self._random))
        if self._logprobs is None:
            return Picked(chosen, None, ())
        logprobs = torch.log_softmax(raw[0], dim=-1)
        top = torch.topk(logprobs, min(self._logprobs, len(logprobs)))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Picked(chosen, float(logprobs[chosen]), pairs)
