"""The measure itself: known differences between known distributions, intervals, and the two runs of a real engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cachegen_rag.bench.quality import Difference, changed_run, difference, exact_run, summarize
from cachegen_rag.kv import KV
from cachegen_rag.trial import place


def test_difference_of_known_distributions() -> None:
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])).astype(np.float32)
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]])).astype(np.float32)
    found = difference(p + 7, q - 3, np.array([2, 1]))  # logits are free up to a constant
    np.testing.assert_allclose(found.kl, [0.25 * np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(found.exact_nll, [-np.log(0.25)], rtol=1e-6)
    np.testing.assert_allclose(found.changed_nll, [-np.log(0.5)], rtol=1e-6)
    assert found.agree.tolist() == [0, 1]


def test_difference_over_many_rows_and_large_logits() -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.normal(0, 30, (70, 50)).astype(np.float32) for _ in range(2))
    ids = rng.integers(0, 50, 70)
    found = difference(p, q, ids)
    log_p = p - np.logaddexp.reduce(p.astype(np.float64), axis=1)[:, None]
    log_q = q - np.logaddexp.reduce(q.astype(np.float64), axis=1)[:, None]
    np.testing.assert_allclose(found.kl, (np.exp(log_p) * (log_p - log_q)).sum(1), rtol=1e-9)
    np.testing.assert_allclose(found.changed_nll, -log_q[np.arange(69), ids[1:]], rtol=1e-9, atol=1e-12)
    assert (difference(p, p, ids).kl == 0).all()


class TestSummary:
    @staticmethod
    def document(kl: float, shift: float, agree: float, tokens: int = 10) -> Difference:
        nll = np.full(tokens - 1, 2.0)
        return Difference(np.full(tokens, kl), nll, nll + shift, np.full(tokens, agree))

    def test_estimates_pool_the_tokens(self) -> None:
        quality = summarize([self.document(0.1, 0.1, 1.0, 10), self.document(0.4, 0.1, 0.0, 30)])
        assert quality.kl.value == pytest.approx((0.1 * 10 + 0.4 * 30) / 40)
        assert quality.dppl.value == pytest.approx(np.expm1(0.1))
        assert quality.top1.value == pytest.approx(0.25)
        assert (quality.documents, quality.tokens) == (2, 40)

    def test_intervals_cover_and_shrink_with_documents(self) -> None:
        rng = np.random.default_rng(0)
        few, many = (summarize([self.document(abs(rng.normal(1, 0.2)), 0, 1) for _ in range(n)]) for n in (5, 80))
        for quality in (few, many):
            assert quality.kl.low <= quality.kl.value <= quality.kl.high
        assert many.kl.high - many.kl.low < few.kl.high - few.kl.low
        assert many.kl.low < 1.0 < many.kl.high

    def test_is_deterministic_and_flat(self) -> None:
        documents = [self.document(k / 10, 0.1, 0.5) for k in range(4)]
        flat = summarize(documents).as_dict()
        assert flat == summarize(documents).as_dict()
        assert {"kl", "kl_low", "kl_high", "dppl_low", "top1_high", "documents", "tokens"} <= flat.keys()


class TestRuns:
    def ids(self, model: Any, seed: int, n: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(10, 200, n).astype(np.int32)

    @pytest.mark.parametrize("prefix", [(), (5, 6, 7, 8)])
    def test_the_exact_kv_changes_next_to_nothing_and_another_one_much(self, tiny_model: Any, prefix: Any) -> None:
        document, continuation = self.ids(tiny_model, 0, 40), self.ids(tiny_model, 1, 12)
        exact = exact_run(tiny_model, document, continuation, prefix=prefix)
        assert len(exact.kv) == 40
        same = changed_run(tiny_model, document, continuation, place(exact.kv), prefix=prefix)
        kl = difference(exact.logits, same, continuation).kl
        assert kl.shape == (12,)
        assert np.abs(kl).max() < 1e-3
        noisy = KV(exact.kv.keys, exact.kv.values[:, ::-1].copy(), exact.kv.token_ids, exact.kv.positions)
        other = changed_run(tiny_model, document, continuation, place(noisy), prefix=prefix)
        assert difference(exact.logits, other, continuation).kl.mean() > 20 * max(np.abs(kl).mean(), 1e-6)
