from __future__ import annotations

import json
import os
import stat
import threading

import numpy as np
import pytest

from cachegen_rag.streaming.costs import MAX_FILE_BYTES, SAMPLES, Costs, TextCost


def test_fits_call_token_and_attention_costs():
    cost, rng = TextCost(), np.random.default_rng(0)
    for _ in range(40):
        tokens, position = int(rng.integers(64, 600)), int(rng.integers(0, 4000))
        true = 0.01 + tokens * (0.005 + 1e-6 * (position + tokens / 2))
        cost.record(tokens, position, true * rng.uniform(0.95, 1.05))
    for tokens, position in ((64, 0), (256, 1000), (512, 3500)):
        true = 0.01 + tokens * (0.005 + 1e-6 * (position + tokens / 2))
        assert cost.seconds(tokens, position) == pytest.approx(true, rel=0.08)


def test_one_sample_is_enough_to_go_by_and_none_is_a_guess():
    cost = TextCost(guess=100)
    assert cost.seconds(50, 0) == 0.5 and not cost.known
    cost.record(100, 0, 0.2)
    assert cost.known and cost.seconds(200, 0) == pytest.approx(0.4)
    assert cost.seconds(0, 9) == 0


@pytest.mark.parametrize("sample", [(0, 0, 1.0), (10, 0, 0.0), (10, 0, -1.0), (10, 0, float("nan")), (10, 0, 1e9)])
def test_nonsense_is_not_recorded(sample):
    cost = TextCost()
    cost.record(*sample)
    assert not cost.known


def test_a_call_that_an_engine_put_off_is_no_measurement():
    cost = TextCost()
    cost.record(8, 0, 1e-6)
    assert not cost.known
    cost.record(256, 0, 0.5)
    cost.record(8, 256, 1e-6)
    assert cost.seconds(256, 0) == pytest.approx(0.5)
    cost.record(32, 256, 0.07)
    assert len(cost.samples) == 2


def test_short_calls_do_not_crowd_out_long_ones():
    """A store that is always hit leaves the engine only prefixes and questions to compute."""
    cost = TextCost()
    for position in (0, 256, 512, 768):
        cost.record(256, position, 0.4 + position * 1e-4)
    for _ in range(100):
        cost.record(25, 0, 0.05)
        cost.record(20, 1050, 0.09)
    assert sum(sample[0] == 256 for sample in cost.samples) == 4 and len(cost.samples) <= SAMPLES


@pytest.mark.parametrize("seed", range(8))
def test_never_negative_whatever_was_measured(seed):
    cost, rng = TextCost(), np.random.default_rng(seed)
    for _ in range(60):
        cost.record(int(rng.integers(64, 2000)), int(rng.integers(0, 8000)), float(10 ** rng.uniform(-4, 2)))
    assert len(cost.samples) == SAMPLES
    assert all(cost.seconds(n, p) > 0 for n in (1, 64, 4000) for p in (0, 1000, 100_000))


def test_are_remembered(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    costs = Costs(path)
    costs.text("model").record(128, 0, 1.0)
    for value in (9.0, 2.0, 2.0):  # the first of a process warms up
        costs.record("decode/x", value)
    costs.record_link("https://host", 1e6, 0.05)
    costs.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Costs(path)
    assert again.text("model").seconds(256, 0) == pytest.approx(2.0)
    assert again.mean("decode/x", 7.0) == 2.0 and again.mean("other", 7.0) == 7.0
    assert again.link("https://host") == (1e6, 0.05)
    assert not again.text("another").known


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "[]", "null", '{"version": 2}', '{"version": 1}', '{"version": 1, "text": 3}',
        '{"version": 1, "text": {"m": [["a", 0, 1]]}, "means": {}, "links": {}}',
        '{"version": 1, "text": {"m": [[1, 2]]}, "means": {}, "links": {}}',
        '{"version": 1, "text": {}, "means": {"x": -1}, "links": {}}',
        '{"version": 1, "text": {}, "means": {"x": NaN}, "links": {}}',
        '{"version": 1, "text": {}, "means": {}, "links": {"u": [1e6]}}',
        "[" * 100_000, "1" * (MAX_FILE_BYTES + 2), b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_replaced(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    costs = Costs(path)
    assert not costs.text("m").known and costs.mean("x", 3.0) == 3.0
    costs.save()
    assert json.loads(path.read_text())["version"] == 1


def test_a_place_that_cannot_be_written_does_not_matter(tmp_path):
    (tmp_path / "file").write_text("")
    costs = Costs(tmp_path / "file" / "costs.json")
    costs.record("x", 1.0)
    costs.save()
    Costs(None).save()


def test_the_file_stays_small(tmp_path):
    costs = Costs(tmp_path / "costs.json")
    for i in range(1000):
        for _ in range(2):
            costs.record(f"decode/{i}", 1.0)
        costs.record_link(f"https://host{i}", 1e6, 0.1)
        for _ in range(60):
            costs.text(f"model{i}").record(100, 12345, 1.2345678901234)
    costs.save()
    assert os.path.getsize(tmp_path / "costs.json") < MAX_FILE_BYTES
    assert Costs(tmp_path / "costs.json").text("model0").known


def test_threads_share_them(tmp_path):
    costs = Costs(tmp_path / "costs.json")

    def work(n):
        for i in range(50):
            costs.text(f"m{n}").record(100, i, 0.5)
            costs.record("x", 1.0)
            costs.save()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Costs(tmp_path / "costs.json").mean("x", 0.0) == 1.0
    assert list(tmp_path.iterdir()) == [tmp_path / "costs.json"]
