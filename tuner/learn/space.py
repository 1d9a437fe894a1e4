"""The search space: the candidates of all templates for one problem, numbered through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tuner.generate import Candidate, Space

Rows = NDArray[np.int64]


class SearchSpace:
    """The union of the valid spaces of one or more templates, for one problem on one target.

    Features are computed for the rows that are asked for, since a space may have a million.
    """

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces = tuple(spaces)
        self.problem = self.spaces[0].problem
        self._starts = np.cumsum([0, *(len(s) for s in self.spaces)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, row: int) -> tuple[int, int]:
        """Return the index of the space that has `row`, and its row there."""
        index = int(np.searchsorted(self._starts, row, side="right")) - 1
        return index, row - int(self._starts[index])

    def candidate(self, row: int) -> Candidate:
        index, local = self.locate(row)
        return self.spaces[index].candidate(local)

    def row_of(self, candidate: Candidate) -> int | None:
        """Return the row of a candidate; None if it is not valid here or its template has changed."""
        for start, space in zip(self._starts, self.spaces, strict=False):
            if space.template.hash == candidate.template_hash and space.template.name == candidate.template:
                row = space.row(candidate.values)
                return None if row is None else int(start) + row
        return None

    @cached_property
    def default_rows(self) -> tuple[int, ...]:
        """The default candidate of each template."""
        starts = zip(self._starts, self.spaces, strict=False)
        return tuple(int(start) + space.default_row for start, space in starts)

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The columns of `features`: those of all templates, of the problem, and the estimate."""
        own = [name for space in self.spaces for name in space.take([0]).features]
        return (*dict.fromkeys(own), *_PROBLEM, "log_estimate", "template")

    def features(self, rows: Rows) -> NDArray[np.float64]:
        """Numbers for a cost model, shape (rows, features); 0 where a template lacks a feature."""
        columns = {name: i for i, name in enumerate(self.feature_names)}
        result = np.zeros((len(rows), len(columns)))
        p = self.problem
        result[:, columns["log_m"] : columns["log_m"] + len(_PROBLEM)] = np.log2(
            [p.m, p.n, p.k, p.batch_count, p.flops, p.min_bytes]
        )
        for index, (members, space) in self._parts(rows):
            for name, values in space.features.items():
                result[members, columns[name]] = values
            result[members, columns["log_estimate"]] = np.log(space.estimate_ns)
            result[members, columns["template"]] = index
        return result

    def estimate_ns(self, rows: Rows) -> NDArray[np.float64]:
        """The templates' analytic time estimates in nanoseconds, shape (rows,)."""
        result = np.empty(len(rows))
        for _, (members, space) in self._parts(rows):
            result[members] = space.estimate_ns
        return result

    def neighbours(self, row: int) -> Rows:
        """The valid candidates that differ from `row` in one parameter."""
        index, local = self.locate(row)
        return np.asarray(self.spaces[index].neighbours(local) + self._starts[index], np.int64)

    def _parts(self, rows: Rows) -> list[tuple[int, tuple[NDArray[np.bool_], Space]]]:
        indices = np.searchsorted(self._starts, rows, side="right") - 1
        parts = []
        for index in np.unique(indices):
            members = indices == index
            part = self.spaces[index].take(rows[members] - self._starts[index])
            parts.append((int(index), (members, part)))
        return parts


_PROBLEM = ("log_m", "log_n", "log_k", "log_batch_count", "log_flops", "log_bytes")
