"""Robust statistics of timings: medians with distribution-free confidence intervals."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Z95 = 1.959964


def median_interval(samples: ArrayLike) -> tuple[float, float, float]:
    """Return the median and its 95 % confidence interval (low, high).

    The interval lies between two order statistics and assumes nothing about the distribution (David
    and Nagaraja, Order Statistics, section 7.1). Below six samples no such interval reaches 95 %: the
    range is returned.
    """
    ordered: NDArray[np.float64] = np.sort(np.asarray(samples, np.float64))
    count = len(ordered)
    reach = _Z95 * math.sqrt(count) / 2
    low = max(0, math.floor((count - 1) / 2 - reach))
    high = count - 1 - low
    return float(np.median(ordered)), float(ordered[low]), float(ordered[high])


def paired_ratio_interval(a: ArrayLike, b: ArrayLike) -> tuple[float, float, float]:
    """Return the median of a[i] / b[i] with its 95 % interval, for samples taken in turn.

    Drift of the clock that is slower than one turn cancels in each pair.
    """
    return median_interval(np.asarray(a, np.float64) / np.asarray(b, np.float64))
