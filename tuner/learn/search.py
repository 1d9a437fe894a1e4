"""Which candidates to measure next: strategies over the space, and the Optuna study that records them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.learn.model import CostModel
from tuner.learn.space import Rows, SearchSpace
from tuner.learn.types import Observation, Origin, Proposal, Quality

STRATEGIES = ("model", "random", "tpe", "exhaustive")

_POOL = 6000  # rows that the model ranks at once, beside the neighbours of the best
_START = 12  # observations before the model is asked
_REFIT = 1.25  # growth of the observations from one fit to the next
_CONTROL_EVERY = 12  # one proposal in so many is drawn at random, to judge the model by
_OPTIMISM = 0.7  # standard deviations subtracted from a prediction: what is unknown may be good
_ELITE = 6  # best candidates whose neighbours are ranked, too
_TRANSFER_WEIGHT = 0.2  # of an observation on another problem
_TPE_TRIES = 20
_MIN_CONTROLS = 5


class Search:
    """Proposes rows of a space until `budget` observations were told, or none is left.

    The order of random choices depends on `seed` alone, so that `random` and `exhaustive` measure the
    same set of candidates however often a run was interrupted. `history` holds what was observed for
    other problems on the same device; the model starts from it.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        strategy: str = "model",
        budget: int,
        seed: int = 0,
        history: Sequence[tuple[SearchSpace, Sequence[Observation]]] = (),
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, but is {strategy}")
        self.space, self.strategy, self.budget = space, strategy, budget
        self._random = np.random.default_rng(seed)
        self._order = self._make_order(seed)
        self._next = 0  # the place in the order that was reached
        self._taken = np.zeros(len(space), np.bool_)  # proposed or told
        self._observations: list[Observation] = []
        self._controls: dict[int, float] = {}  # predicted time (ns) by row
        self._proposed = 0
        self._trials: list[FrozenTrial] = []
        self._parameters = _Parameters(space)
        self.study = _study(strategy, seed)
        self._model = CostModel(seed)
        self._fitted_at = 0
        self._queue: list[Proposal] = []
        self._history = [_Samples(s, o) for s, o in history if len(o)]

    def ask(self, count: int) -> list[Proposal]:
        """Return up to `count` different rows, none of them told or asked before."""
        count = min(count, self.budget - len(self._observations))
        proposals: list[Proposal] = []
        while len(proposals) < count:
            proposal = self._propose()
            if proposal is None:
                break
            self._taken[proposal.row] = True
            self._proposed += 1
            proposals.append(proposal)
        return proposals

    def tell(self, observation: Observation, trial_id: int | None = None) -> None:
        """Report what was found for a row, whether it was proposed here or measured by an earlier run."""
        self._taken[observation.row] = True
        self._observations.append(observation)
        attributes = {} if trial_id is None else {"tuner_trial_id": trial_id}
        trial = create_trial(
            state=TrialState.COMPLETE if observation.time_ns is not None else TrialState.FAIL,
            value=observation.time_ns,
            params=self._parameters.of(observation.row),
            distributions=self._parameters.distributions_of(observation.row),
            user_attrs=attributes,
        )
        self._trials.append(trial)
        self.study.add_trial(trial)

    def frozen_trials(self) -> list[FrozenTrial]:
        """All that was told, as Optuna's trials: value in ns, FAIL for a candidate that is invalid."""
        return list(self._trials)

    def quality(self) -> Quality:
        times = {o.row: o.time_ns for o in self._observations if o.time_ns is not None}
        best = min(times.values(), default=math.inf)
        pairs = [(predicted, times[row]) for row, predicted in self._controls.items() if row in times]
        correlation = error = beaten = None
        if len(pairs) >= _MIN_CONTROLS:
            predicted, measured = np.array(pairs).T
            correlation = _spearman(predicted, measured)
            error = float(np.median(np.abs(predicted / measured - 1)))
            beaten = float(np.mean(measured > best))
        measured_count = len(self._observations)
        return Quality(
            candidates=len(self.space),
            measured=measured_count,
            skipped=len(self.space) - measured_count,
            controls=len(pairs),
            rank_correlation=correlation,
            median_error=error,
            control_beaten=beaten,
        )

    def _make_order(self, seed: int) -> Rows:
        """All rows: the defaults, then in lexicographic (exhaustive) or seeded random order."""
        rows = np.arange(len(self.space))
        if self.strategy != "exhaustive":
            np.random.default_rng(seed).shuffle(rows)
        first = np.array(self.space.default_rows)
        return np.concatenate([first, rows[~np.isin(rows, first)]])

    def _propose(self) -> Proposal | None:
        match self.strategy:
            case "model":
                return self._propose_by_model()
            case "tpe":
                return self._propose_by_tpe()
            case _:
                origin = Origin.EXHAUSTIVE if self.strategy == "exhaustive" else Origin.RANDOM
                return self._from_order(origin)

    def _from_order(self, origin: Origin) -> Proposal | None:
        while self._next < len(self._order) and self._taken[self._order[self._next]]:
            self._next += 1
        if self._next == len(self._order):
            return None
        row = int(self._order[self._next])
        return Proposal(row, Origin.DEFAULT if row in self.space.default_rows else origin)

    def _propose_by_tpe(self) -> Proposal | None:
        if len(self._observations) < len(self.space.default_rows):
            return self._from_order(Origin.RANDOM)
        for _ in range(_TPE_TRIES):
            trial = self.study.ask(self._parameters.distributions)
            row = self._parameters.row_of(trial.params)
            # The measurement is added as a trial of its own, as those of earlier runs are.
            self.study.tell(trial, state=TrialState.FAIL)
            if row is not None and not self._taken[row]:
                return Proposal(row, Origin.TPE)
        return self._from_order(Origin.RANDOM)

    def _propose_by_model(self) -> Proposal | None:
        if not all(self._taken[row] for row in self.space.default_rows):
            return self._from_order(Origin.RANDOM)
        seen = len(self._observations)
        if seen >= max(self._fitted_at * _REFIT, self._fitted_at + 3) and (seen >= _START or self._history):
            self._fit()
        if not self._model.fitted:
            return self._propose_by_estimate()
        if self._proposed % _CONTROL_EVERY == _CONTROL_EVERY - 1:
            return self._control()
        while self._queue:
            proposal = self._queue.pop(0)
            if not self._taken[proposal.row]:
                return proposal
        self._rank()
        return self._queue.pop(0) if self._queue else self._from_order(Origin.RANDOM)

    def _propose_by_estimate(self) -> Proposal | None:
        """Before there is a model: the best by the analytic estimate and random ones in turn."""
        if self._proposed % 2:
            return self._from_order(Origin.RANDOM)
        rows = self._pool()
        if not len(rows):
            return None
        # The estimate cannot tell near-equals apart, so take any of its best.
        best = rows[np.argsort(self.space.estimate_ns(rows))[: max(1, len(rows) // 100)]]
        return Proposal(int(self._random.choice(best)), Origin.ESTIMATE)

    def _fit(self) -> None:
        own = _Samples(self.space, self._observations)
        parts = [(own, 1.0), *((other, _TRANSFER_WEIGHT) for other in self._history)]
        names = self.space.feature_names
        self._model.fit(
            np.concatenate([part.aligned(names) for part, _ in parts]),
            np.concatenate([part.estimate_ns for part, _ in parts]),
            np.concatenate([part.time_ns for part, _ in parts]),
            np.concatenate([np.full(len(part.time_ns), weight) for part, weight in parts]),
        )
        self._fitted_at = max(1, len(self._observations))
        self._queue.clear()

    def _rank(self) -> None:
        """Fill the queue: the best of the unmeasured rows by optimistic prediction, not all alike."""
        valid = [o for o in self._observations if o.time_ns is not None]
        elite = sorted(valid, key=lambda o: o.time_ns or 0.0)[:_ELITE]
        near = [self.space.neighbours(o.row) for o in elite]
        rows = np.unique(np.concatenate([self._pool(), *near]))
        rows = rows[~self._taken[rows]]
        if not len(rows):
            return
        mean, deviation = self._predict(rows)
        order = np.argsort(mean - _OPTIMISM * deviation, kind="stable")
        size = max(4, math.ceil(len(self._observations) * (_REFIT - 1)))
        self._queue = [
            Proposal(int(rows[i]), Origin.MODEL, float(np.exp(mean[i]))) for i in order[: 2 * size]
        ]

    def _control(self) -> Proposal | None:
        """A row drawn at random from all that are left, with what the model expects of it."""
        proposal = self._from_order(Origin.CONTROL)
        if proposal is None:
            return None
        mean, _ = self._predict(np.array([proposal.row]))
        self._controls[proposal.row] = float(np.exp(mean[0]))
        return Proposal(proposal.row, Origin.CONTROL, self._controls[proposal.row])

    def _predict(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._model.predict(self.space.features(rows), self.space.estimate_ns(rows))

    def _pool(self) -> Rows:
        """Up to `_POOL` rows drawn at random that were neither proposed nor told."""
        if len(self.space) <= _POOL:
            rows = np.arange(len(self.space))
        else:
            rows = np.unique(self._random.integers(len(self.space), size=_POOL))
        return rows[~self._taken[rows]]


class _Samples:
    """Observed rows of one problem as arrays; `time_ns` is NaN for a failure."""

    def __init__(self, space: SearchSpace, observations: Sequence[Observation]) -> None:
        rows = np.array([o.row for o in observations], np.int64)
        self.names = space.feature_names
        self.features = space.features(rows)
        self.estimate_ns = space.estimate_ns(rows)
        self.time_ns = np.array([o.time_ns if o.time_ns is not None else np.nan for o in observations])

    def aligned(self, names: Sequence[str]) -> NDArray[np.float64]:
        """The features in the order of `names`, 0 where there is none."""
        result = np.zeros((len(self.features), len(names)))
        for i, name in enumerate(names):
            if name in self.names:
                result[:, i] = self.features[:, self.names.index(name)]
        return result


class _Parameters:
    """The parameters of a space in Optuna's terms: those that vary, named by template if need be."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._several = len(space.spaces) > 1
        self._own: list[dict[str, str]] = []  # of each template: Optuna's name by parameter
        self.distributions: dict[str, Any] = {}
        if self._several:
            names = tuple(s.template.name for s in space.spaces)
            self.distributions["template"] = CategoricalDistribution(names)
        for part in space.spaces:
            own = {}
            for index, parameter in enumerate(part.template.parameters):
                if (part.codes[:, index] != part.codes[0, index]).any():
                    name = f"{part.template.name}.{parameter.name}" if self._several else parameter.name
                    own[parameter.name] = name
                    self.distributions[name] = CategoricalDistribution(parameter.values)
            self._own.append(own)

    def of(self, row: int) -> dict[str, Any]:
        index, local = self._space.locate(row)
        values = self._space.spaces[index].params(local)
        params: dict[str, Any] = {name: values[p] for p, name in self._own[index].items()}
        if self._several:
            params["template"] = self._space.spaces[index].template.name
        return params

    def distributions_of(self, row: int) -> dict[str, Any]:
        return {name: self.distributions[name] for name in self.of(row)}

    def row_of(self, params: dict[str, Any]) -> int | None:
        """The row with these values, or None if they are not valid together."""
        names = [s.template.name for s in self._space.spaces]
        index = names.index(params["template"]) if self._several else 0
        part = self._space.spaces[index]
        values = part.params(0) | {p: params[name] for p, name in self._own[index].items()}
        local = part.row(values)
        return None if local is None else local + sum(len(s) for s in self._space.spaces[:index])


def _study(strategy: str, seed: int) -> optuna.Study:
    """An in-memory study: a database costs too much per trial while kernels wait."""
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if strategy == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler, direction="minimize")
    finally:
        optuna.logging.set_verbosity(verbosity)


def _spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 where one side is constant."""
    ranks = [np.argsort(np.argsort(x)).astype(np.float64) for x in (a, b)]
    deviations = [r - r.mean() for r in ranks]
    scale = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale else 0.0
