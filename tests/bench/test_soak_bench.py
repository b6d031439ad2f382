from __future__ import annotations

import synthetic

from cachegen_rag.bench import soak


def test_a_short_soak_on_the_tiny_model(tiny_model):
    profile = synthetic.profile(tiny_model.shape)
    result = soak.run(seconds=6, model=tiny_model, threads=3, documents=3, profile=profile)
    summary = result["summary"]
    assert summary["requests"] > 10 and summary["faults"]
    assert summary["wrong_answers"] == 0 and summary["errors"] == 0, result["rows"]
    assert summary["spliced"] > 0 and summary["computed"] > 0
    assert summary["leaked_transfers"] == 0
    assert summary["leaked_threads"] <= 0 and summary["leaked_descriptors"] <= 4
