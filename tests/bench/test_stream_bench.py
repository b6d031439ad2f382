from __future__ import annotations

import json

import numpy as np
import pytest

from cachegen_rag.bench import stream
from cachegen_rag.errors import ConfigError


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    traces = [{"bw": list(np.random.default_rng(i).uniform(0.1, 10, 10))} for i in range(2)]
    (data / "bandwidth_traces_gbps.jsonl").write_text("\n".join(map(json.dumps, traces)))
    sets = stream.trace_sets(data)
    assert set(sets) == {"recorded", "steps", "outages", "ramps"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "FACTORS", (1.0, 5.0))
        rows = stream.simulation({kind: traces[:1] for kind, traces in sets.items()})
    return rows, stream.summarize_simulation(rows)


def test_rows_are_what_they_say(simulated):
    rows, _ = simulated
    json.dumps(rows)
    for row in rows:
        if row["target_s"] is None and row["policy"] in ("ours", "text"):
            assert row["ttft_s"] >= row["optimum_s"] * (1 - 1e-9)
        elif row["target_s"] is not None:
            assert row["missed"] == (row["ttft_s"] > row["target_s"] * 1.0001)
    assert {r["policy"] for r in rows} > {"text", "ours", "CacheGen's rule"}


def test_the_summary_meets_the_promises(simulated):
    _, summary = simulated
    assert summary["regret_mean"] < 0.10
    assert summary["target_miss_excess"] <= summary["target_miss_cachegen_rule"]
    assert summary["target_miss_excess"] < summary["all_traces"]["published_rule_misses"]
    assert summary["kl_vs_cachegen_rule"] < 1
    assert all(one["kl_vs_rule"] < 1 for one in summary["by_traces"].values())
    assert all(one["misses"] <= 0.05 for one in summary["by_traces"].values())


def test_the_rule_is_compared_at_equal_misses():
    """Of the rule's reserves, the first that misses no more than ours counts, or else the first that misses least."""

    def row(policy, reserve, missed, kl, target=1.0):
        one = {"policy": policy, "reserve": reserve, "missed": missed, "kl": kl, "traces": "t", "target_s": target}
        return one | {"optimum_missed": False, "ttft_s": 1.0, "optimum_s": 1.0}

    def compare(ours, rule):
        rows = [row("ours", None, False, 0.0, target=None)]
        rows += [row("ours", None, i < ours, 0.1) for i in range(10)]
        for reserve in stream.RESERVES:
            misses = rule(reserve)
            rows += [row("CacheGen's rule", reserve, i < misses, 0.2 + reserve) for i in range(10)]
        return stream.summarize_simulation(rows)["all_traces"]

    met = compare(2, lambda reserve: 6 - 20 * reserve)
    assert met["rule_reserve"] == 0.2 and met["kl_vs_rule"] == pytest.approx(0.1 / 0.4)
    never = compare(0, lambda reserve: 3 if reserve >= 0.3 else 5)
    assert never["rule_reserve"] == 0.3 and never["rule_misses"] == pytest.approx(0.3)
    assert never["kl_vs_published_rule"] == pytest.approx(0.5)


def test_traces_without_data():
    assert "flicker" in stream.trace_sets(None)
    assert all(abs(t.mean() - 1) < 1e-9 for traces in stream.trace_sets(None).values() for t in traces)


def test_real_requests_over_shaped_links(tiny_model, tmp_path, monkeypatch, capsys):
    """The tiny model answers over every kind of link; its figures mean nothing, its rows are complete."""
    import synthetic

    from cachegen_rag.bench import stream_real

    profile = synthetic.profile(tiny_model.shape)
    monkeypatch.setattr(stream_real, "LEAST_RATE", 20.0)
    monkeypatch.setattr(stream_real, "HOPELESS", float("inf"))
    monkeypatch.setattr(stream_real, "RETRIES", 1)
    found = stream_real.measure_links(
        tiny_model, rates=[50, None], tokens=100, repeats=2, threads=1, tc=False, profile=profile
    )
    modes = [row["mode"] for row in found["rows"]]
    assert modes.count("ours") == 6 and modes.count("text") == 6 and modes.count("overlap") == 6
    assert modes.count("soonest") == 4 and {row["level"] for row in found["rows"] if row["mode"] == "level"} >= {1, 2}
    assert set(found["summary"]) >= {"ttft_vs_best_p95", "overlap_ratio", "both_ends_speedup"}
    assert all(np.isfinite(value) for value in found["summary"].values())
    for row in found["rows"]:
        if row["mode"] == "level":
            assert row["spliced"] == row["tokens"] and row["bytes"] > 0
    assert "ours at 50 Mbit/s" in capsys.readouterr().err.replace("  ", " ")  # progress is told
    pytest.importorskip("matplotlib")
    result = {"rows": found["rows"], "timeline": found["timeline"]}
    stream.plot(result, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    "wrong", [{"rates": [5, 0]}, {"rates": -1}, {"tokens": 0}, {"repeats": 0}, {"shaping": "tcp"}], ids=repr
)
def test_a_wrong_option_is_named_before_any_work(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"--{name}"):
        stream.run(**wrong)


def test_a_namespace_that_cannot_be_made_is_one_clear_error(monkeypatch):
    def refused(command, **options):
        raise stream.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(stream.shutil, "which", lambda program: program)
    monkeypatch.setattr(stream.subprocess, "run", refused)
    with pytest.raises(ConfigError, match=r"ip netns add .* ended with 1; it needs root"):
        stream.run(shaping="tc", simulated=False)


def test_a_request_that_others_disturbed_is_asked_again(monkeypatch, capsys):
    from cachegen_rag.bench import stream_real

    taken = iter([0.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(stream_real, "_others_cpu", lambda: next(taken))
    monkeypatch.setattr(stream_real.time, "sleep", lambda seconds: None)
    asked = []
    bench = object.__new__(stream_real._Bench)
    monkeypatch.setattr(bench, "_ask", lambda *request: asked.append(request) or {"ttft_ms": 1.0}, raising=False)
    assert bench.ask("text", 5)["others_cpu"] == 0.0
    assert len(asked) == 2 and "once more" in capsys.readouterr().err
