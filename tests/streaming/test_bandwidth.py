from __future__ import annotations

import math

import numpy as np
import pytest

from cachegen_rag.streaming.bandwidth import DEFAULT_RATE, Ewma, Experts, HarmonicMean, LastValue, Meter, RoundTrip

ALL = [LastValue, HarmonicMean, Ewma, Experts]


@pytest.mark.parametrize("make", ALL)
class TestEveryEstimator:
    def test_starts_at_the_prior(self, make):
        assert make().rate() == pytest.approx(DEFAULT_RATE)
        assert make(1e6).rate() == pytest.approx(1e6)

    def test_one_transfer_says_more_than_the_prior(self, make):
        estimator = make(1e9)
        estimator.observe(100_000, 1.0)
        assert estimator.rate() == pytest.approx(100_000)

    def test_a_steady_link(self, make):
        estimator = make()
        for size in (10_000, 500_000, 20_000):
            estimator.observe(size, size / 2e6)
        assert estimator.rate() == pytest.approx(2e6)

    @pytest.mark.parametrize(("size", "seconds"), [(0, 1), (100, 1e-9), (1 << 20, 0), (1 << 20, -1)])
    def test_what_says_nothing_is_not_counted(self, make, size, seconds):
        estimator = make(1e6)
        estimator.observe(size, seconds)
        assert estimator.rate() == pytest.approx(1e6)

    def test_never_zero_or_infinite(self, make):
        estimator = make()
        rng = np.random.default_rng(0)
        for _ in range(200):
            estimator.observe(float(rng.integers(1, 1 << 24)), float(10 ** rng.uniform(-6, 4)))
            assert 0 < estimator.rate() < math.inf


def test_the_harmonic_mean_is_bytes_over_time():
    estimator = HarmonicMean(window=None)
    for rate in (1e6, 4e6):
        estimator.observe(1e6, 1e6 / rate)
    assert estimator.rate() == pytest.approx(2e6 / 1.25)
    windowed = HarmonicMean(window=1)
    windowed.observe(1e6, 1.0)
    windowed.observe(1e6, 0.25)
    assert windowed.rate() == pytest.approx(4e6)


def prediction_error(make, rates):
    estimator, errors = make(rates[0]), []
    for rate in rates:
        errors.append(abs(math.log(estimator.rate() / rate)))
        estimator.observe(1e6, 1e6 / rate)
    return float(np.mean(errors[1:]))


def families():
    rng = np.random.default_rng(4)
    for _ in range(12):
        yield "flicker", rng.uniform(0.1, 10, 20) * 1e6
        yield "steps", np.repeat(rng.uniform(0.5, 10, 5), 6) * 1e6
        yield "walk", np.exp(np.cumsum(rng.normal(0, 0.25, 30))) * 1e6


def test_the_experts_are_near_the_best_estimator_on_every_kind_of_link():
    errors = {}
    for kind, rates in families():
        for make in ALL:
            errors.setdefault(kind, {}).setdefault(make.__name__, []).append(prediction_error(make, rates))
    for kind, by_name in errors.items():
        means = {name: np.mean(values) for name, values in by_name.items()}
        rest = [value for name, value in means.items() if name != "Experts"]
        assert means["Experts"] <= 1.35 * min(rest), (kind, means)
        assert means["Experts"] < sorted(rest)[1], (kind, means)


def test_the_error_grows_with_surprises_and_shrinks_on_a_steady_link():
    estimator = Experts()
    assert estimator.error() == pytest.approx(0.5)
    for _ in range(16):
        estimator.observe(1e6, 1.0)
    steady = estimator.error()
    for rate in (1e5, 1e7, 1e5, 1e7):
        estimator.observe(1e6, 1e6 / rate)
    assert steady < 0.2 < 0.5 < estimator.error()


def test_round_trips_are_a_slowly_rising_minimum():
    trip = RoundTrip(0.5)
    trip.observe(0.1)
    trip.observe(0.02)
    assert trip.seconds() == 0.02
    trip.observe(1.0)
    assert 0.02 < trip.seconds() < 0.2


class TestMeter:
    def test_measures_bytes_over_time_of_all_transfers_together(self):
        meter = Meter(Experts(1e9))
        meter.began(0.0, 0.03)
        meter.began(0.0)
        for step in range(1, 101):
            meter.arrived(step * 0.01, 5_000)
            meter.arrived(step * 0.01, 5_000)
        assert meter.rate(1.0) == pytest.approx(1e6, rel=0.15)
        assert meter.round_trip.seconds() == 0.03

    def test_idle_time_does_not_count(self):
        meter = Meter(Experts(1e9))
        for start in (0.0, 100.0, 200.0):
            meter.began(start)
            meter.arrived(start + 0.1, 100_000)
            meter.ended(start + 0.1)
        assert meter.rate(300.0) == pytest.approx(1e6, rel=0.01)

    def test_a_stalled_transfer_lowers_the_rate_while_it_lasts(self):
        meter = Meter(Experts(1e6))
        meter.began(0.0)
        meter.arrived(0.1, 100_000)
        assert meter.rate(0.11) == pytest.approx(1e6, rel=0.1)
        assert meter.rate(2.0) < 5e4 and meter.rate(20.0) < 5e3
        meter.ended(20.0)
        assert meter.rate(20.0) == pytest.approx(1e6, rel=0.1)

    def test_more_ends_than_begins_are_harmless(self):
        meter = Meter(Experts(1e6))
        meter.ended(0.0)
        meter.began(1.0)
        meter.arrived(2.0, 1_000_000)
        assert meter.rate(2.0) == pytest.approx(1e6)
