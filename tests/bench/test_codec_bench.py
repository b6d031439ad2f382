"""The codec benchmark: its arithmetic on made-up rows, and a small run of everything on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachegen_rag.bench import codec as bench
from cachegen_rag.bench import texts
from cachegen_rag.codec.calibrate import calibrate
from cachegen_rag.errors import ConfigError

SUMMARY = {
    "bits_at_kl_0.01",
    "bits_at_kl_0.03",
    "bits_at_kl_0.09",
    "peers",
    "short_doc_ratio_200",
    "decode_msym_per_s_core",
    "decode_over_prefill",
    "encode_over_prefill",
    "decode_extra_memory_ratio",
}


class TestBitsAt:
    CURVE = ((0.5, 0.1), (1.0, 0.01), (2.0, 0.001))

    def test_points_and_between_them_linear_in_log_kl(self) -> None:
        assert bench.bits_at(self.CURVE, 0.01) == pytest.approx(1.0)
        assert bench.bits_at(self.CURVE, 10**-1.5) == pytest.approx(0.75)
        assert bench.bits_at(reversed(self.CURVE), 10**-2.5) == pytest.approx(1.5)

    def test_not_reached_is_none_and_nothing_is_extrapolated(self) -> None:
        assert bench.bits_at(self.CURVE, 0.0005) is None
        assert bench.bits_at(self.CURVE, 5.0) == 0.5
        assert bench.bits_at([], 0.1) is None
        assert bench.bits_at([(8.5, 0.00007)], 0.03) == 8.5
        assert bench.bits_at([(4.5, 0.04)], 0.03) is None

    def test_a_curve_that_is_not_monotone_takes_the_cheapest_way(self) -> None:
        assert bench.bits_at([(0.5, 0.02), (1.0, 0.05), (2.0, 0.001)], 0.03) == 0.5

    def test_kl_of_zero(self) -> None:
        assert 8 < bench.bits_at([(8, 0.001), (16, 0.0)], 0.0001) < 16  # type: ignore[operator]


def rows() -> list[dict[str, Any]]:
    def row(codec: str, setting: str, tokens: int, size: float, bits: float, kl: float) -> dict[str, Any]:
        found = {"codec": codec, "setting": setting, "document_tokens": tokens, "bytes": size, "kl": kl, "documents": 2}
        return found | {
            "kind": "rate_distortion",
            "bits_per_element": bits,
            "kl_low": kl / 2,
            "kl_high": kl * 2,
        }

    return [
        row("ours", "level 0", 1000, 2000.0, 1.5, 0.005),
        row("ours", "level 1", 1000, 1000.0, 0.5, 0.05),
        row("ours", "level 1", 200, 230.0, 0.6, 0.06),
        row("q4_0", "default", 1000, 9000.0, 4.5, 0.029),
        row("q4_0", "default", 200, 9000.0, 4.5, 0.001),
    ]


def test_summary_of_rows() -> None:
    summary = bench.summarize_rows(rows(), 1000, 200, default_level=1)
    assert summary["short_doc_ratio_200"] == pytest.approx(1.15)
    assert summary["bits_at_kl_0.09"] == 0.5
    assert 0.5 < summary["bits_at_kl_0.03"] < summary["bits_at_kl_0.01"] < 1.5
    assert summary["peers"] == {"q4_0": {"bits_at_kl_0.01": None, "bits_at_kl_0.03": 4.5, "bits_at_kl_0.09": 4.5}}


def test_plot_of_the_longest_documents(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot({"rows": [*rows(), {"kind": "speed"}]}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def profile(tiny_model: Any) -> Any:
    return calibrate(tiny_model, [text[:6000] for text in texts.load().tuned])


@pytest.mark.parametrize("placement", bench.PLACEMENTS)
def test_a_small_run(tiny_model: Any, profile: Any, placement: str) -> None:
    said: list[str] = []
    result = bench.run(
        model=tiny_model,
        profile=profile,
        documents=2,
        tokens=96,
        short_tokens=40,
        continuation=8,
        chunk_tokens=48,
        calibration=2,
        repeats=1,
        threads=1,
        placement=placement,
        with_speed=placement == "document",
        progress=said.append,
    )
    assert json.loads(json.dumps(result)) == result
    assert result["benchmark"] == "codec" and result["environment"]["cores"] >= 1
    if placement == "document":
        assert result["summary"].keys() == SUMMARY
        assert all(result["summary"][key] > 0 for key in SUMMARY if key.startswith(("decode", "encode", "short")))
    measured = [row for row in result["rows"] if row["kind"] == "rate_distortion"]
    families = {row["codec"] for row in measured}
    assert {"ours", "fp16", "q8_0", "q4_0", "int8_per_token", "cachegen_paper"} <= families
    assert any(family.startswith("lmcache") for family in families)
    for row in measured:
        assert row["documents"] == 2 and row["tokens"] == 16 and row["placement"] == placement
        assert row["kl_low"] <= row["kl"] <= row["kl_high"]
        assert row["bits_per_element"] > 0
    of = {(row["codec"], row["document_tokens"]): row for row in measured}
    assert of["fp16", 96]["bits_per_element"] == 16 and abs(of["fp16", 96]["kl"]) < 1e-4
    assert of["q4_0", 96]["bits_per_element"] == 4.5
    ours = sorted(
        (r for r in measured if r["codec"] == "ours" and r["document_tokens"] == 96), key=lambda r: r["setting"]
    )
    assert len(ours) >= 4
    assert ours[0]["bits_per_element"] > ours[-1]["bits_per_element"]
    assert said


def test_wrong_options_are_one_clear_error(tiny_model: Any, profile: Any) -> None:
    with pytest.raises(ConfigError, match="placement='middle' must be one of document, start"):
        bench.run(model=tiny_model, profile=profile, placement="middle")
    with pytest.raises(ConfigError, match="passages"):
        bench.run(model=tiny_model, profile=profile, tokens=10**6, documents=4)
