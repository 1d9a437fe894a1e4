"""The cost model: how long candidates will take, learned from those that were measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

_TREES = 48
_FAILURE = np.log(4.0)  # a candidate that failed counts as four times the slowest valid one

Matrix = NDArray[np.float64]


class CostModel:
    """Extremely randomised trees on the logarithm of time over the analytic estimate.

    Trees need no scaling of features and model their interactions from a few dozen samples; the spread
    of their predictions says how little is known (Geurts, Ernst and Wehenkel, Extremely randomized
    trees, 2006; Hutter et al., Algorithm runtime prediction, 2014).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._forest: ExtraTreesRegressor | None = None

    @property
    def fitted(self) -> bool:
        return self._forest is not None

    def fit(self, features: Matrix, estimate_ns: Matrix, time_ns: Matrix, weight: Matrix) -> None:
        """Learn from samples; `time_ns` is NaN for a candidate that failed. All of shape (samples,)."""
        residual = np.log(time_ns) - np.log(estimate_ns)
        valid = np.isfinite(residual)
        if not valid.any():
            return
        residual = np.where(valid, residual, np.max(residual[valid]) + _FAILURE)
        forest = ExtraTreesRegressor(_TREES, max_features=0.5, random_state=self._seed, n_jobs=1)
        self._forest = forest.fit(features.astype(np.float32), residual, sample_weight=weight)

    def predict(self, features: Matrix, estimate_ns: Matrix) -> tuple[Matrix, Matrix]:
        """Return the expected log(time in ns) and its standard deviation over the trees."""
        assert self._forest is not None
        rows = features.astype(np.float32)
        each = np.stack([tree.predict(rows, check_input=False) for tree in self._forest.estimators_])
        return each.mean(axis=0) + np.log(estimate_ns), each.std(axis=0)
