"""Medians, and the intervals that are quoted with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.measure import median_interval, paired_ratio_interval

TIMES = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=60)


def coverage(count: int) -> float:
    """The probability that the interval of `count` samples holds the true median, whatever they are of."""
    _, low, high = median_interval(np.arange(count))
    # The k-th smallest of n samples lies below the median if at least k of them do: a fair coin, n times.
    tails = sum(math.comb(count, i) for i in range(count + 1) if i <= low or i > high)
    return 1 - tails / 2**count


@pytest.mark.parametrize("count", range(6, 200))
def test_intervals_cover_the_median_in_95_of_100_cases(count: int) -> None:
    assert coverage(count) >= 0.95


@pytest.mark.parametrize("count", [50, 100, 199])
def test_intervals_are_not_much_wider_than_that_takes(count: int) -> None:
    _, low, high = median_interval(np.arange(count))
    inner = sum(math.comb(count, i) for i in range(count + 1) if low + 1 < i <= high - 1) / 2**count
    assert inner < 0.95


@pytest.mark.parametrize("count", range(1, 6))
def test_few_samples_give_their_range(count: int) -> None:
    samples = [3.0, 1.0, 2.0, 5.0, 4.0][:count]
    assert median_interval(samples) == (float(np.median(samples)), min(samples), max(samples))


@given(TIMES)
def test_an_interval_lies_around_the_median_and_between_samples(samples: list[float]) -> None:
    median, low, high = median_interval(samples)
    assert low <= median <= high
    assert {low, high} <= set(samples)
    assert median_interval(samples[::-1]) == (median, low, high)


@given(st.lists(st.floats(1e-3, 1e12), min_size=2, max_size=60), st.floats(1e15, 1e18))
def test_one_outlier_leaves_the_median_among_the_others(samples: list[float], outlier: float) -> None:
    median, _, _ = median_interval([*samples, outlier])
    assert min(samples) <= median <= max(samples)


def test_what_drifts_alike_cancels_in_pairs() -> None:
    drift = np.linspace(1.0, 3.0, 41)
    noise = np.where(np.arange(41) % 2, 1.01, 0.99)
    median, low, high = paired_ratio_interval(2 * drift * noise, drift)
    assert low == pytest.approx(1.98)
    assert high == pytest.approx(2.02)
    assert 1.98 <= median <= 2.02
    assert paired_ratio_interval([4.0, 9.0], [2.0, 3.0]) == (2.5, 2.0, 3.0)
