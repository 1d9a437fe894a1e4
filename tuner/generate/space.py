"""The valid space of a template for a problem on a target, as columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.errors import TemplateError
from tuner.generate.template import Constraint, Template
from tuner.generate.types import Candidate, ParamValue, Target
from tuner.problem import GemmProblem

_MAX_ROWS = 20_000_000


@dataclass(frozen=True)
class Rejection:
    """How many raw combinations a rule removed; each combination counts for the first it breaks."""

    kind: Literal["legal", "prune"]
    rule: str
    reason: str
    count: int


@dataclass(frozen=True, eq=False)
class Space:
    """All valid candidates of one template for one problem on one target.

    `codes` has shape (candidates, parameters): the index of each value in its parameter's list.
    Row i is candidate i; rows are in lexicographic order.
    """

    template: Template
    problem: GemmProblem
    target: Target
    codes: NDArray[np.int16]
    raw_size: int
    rejections: tuple[Rejection, ...]
    _columns: Mapping[str, Any] = field(repr=False)

    @classmethod
    def enumerate(cls, template: Template, problem: GemmProblem, target: Target) -> Space:
        """Enumerate the space, one parameter at a time.

        Each rule is applied as soon as all it mentions is known, so that what it forbids is never
        expanded further.

        Raises:
            TemplateError: the template cannot serve the problem, or a rule cannot be evaluated.
        """
        if reason := template.unsupported(problem.type, target):
            raise TemplateError(f"{template.name} cannot serve {problem.type.name}: {reason}")
        columns: dict[str, Any] = {**target.scope(), **problem.scope()}
        codes = np.zeros((1, 0), np.int16)
        derived = list(template.derived)
        pending = list(template.constraints)
        removed: dict[int, int] = {}
        raw_size = math.prod(len(p.values) for p in template.parameters)
        if raw_size >= 2**63:
            raise TemplateError(
                f"{template.name}: more than 2^63 combinations; use fewer parameters or values"
            )
        remaining = raw_size
        names: list[str] = []  # the entries of `columns` that are arrays of one value per row

        def settle() -> None:
            """Compute each derived value and apply each rule that has become possible."""
            nonlocal codes
            for name, expression in list(derived):
                if expression.names <= columns.keys():
                    columns[name] = np.broadcast_to(expression(columns), (len(codes),))
                    names.append(name)
                    derived.remove((name, expression))
            for constraint in [c for c in pending if c.rule.names <= columns.keys()]:
                keep = np.broadcast_to(np.asarray(constraint.rule(columns), np.bool_), (len(codes),))
                pending.remove(constraint)
                lost = int(len(keep) - np.count_nonzero(keep)) * remaining
                removed[template.constraints.index(constraint)] = lost
                if lost:
                    codes = codes[keep]
                    for name in names:
                        columns[name] = columns[name][keep]

        settle()
        for parameter in template.parameters:
            values = np.asarray(parameter.values)
            remaining //= len(values)
            rows = len(codes)
            if rows * len(values) > _MAX_ROWS:
                raise TemplateError(
                    f"{template.name}: {rows * len(values):,} combinations after {parameter.name} are "
                    f"more than {_MAX_ROWS:,}; add constraints or move it behind them"
                )
            code = np.tile(np.arange(len(values), dtype=np.int16), rows)
            for name in names:
                columns[name] = np.repeat(columns[name], len(values))
            codes = np.column_stack([np.repeat(codes, len(values), axis=0), code])
            columns[parameter.name] = values[code]
            names.append(parameter.name)
            settle()
        for _, expression in derived:
            expression(columns)  # what is still missing is an unknown name; this says which
        for constraint in pending:
            constraint.rule(columns)
        return cls(
            template=template,
            problem=problem,
            target=target,
            codes=codes,
            raw_size=raw_size,
            rejections=tuple(
                _rejection(c, removed[i]) for i, c in enumerate(template.constraints) if removed[i]
            ),
            _columns=columns,
        )

    def __len__(self) -> int:
        return len(self.codes)

    def params(self, row: int) -> dict[str, ParamValue]:
        """Return the parameter values of candidate `row`."""
        pairs = zip(self.template.parameters, self.codes[row], strict=True)
        return {p.name: p.values[int(code)] for p, code in pairs}

    def candidate(self, row: int) -> Candidate:
        return self.template.candidate(self.params(row))

    def row(self, params: Mapping[str, ParamValue]) -> int | None:
        """Return the row of the candidate with these values, or None if it is not in the space."""
        try:
            wanted = [p.values.index(params[p.name]) for p in self.template.parameters]
        except (KeyError, ValueError):
            return None
        found = self._find(np.asarray(wanted, np.int64)[np.newaxis])
        return int(found[0]) if len(found) else None

    def neighbours(self, row: int) -> NDArray[np.int64]:
        """The rows of the valid candidates that differ from `row` in the value of one parameter."""
        code = self.codes[row].astype(np.int64)
        changed = []
        for index, parameter in enumerate(self.template.parameters):
            others = [v for v in range(len(parameter.values)) if v != code[index]]
            block = np.tile(code, (len(others), 1))
            block[:, index] = others
            changed.append(block)
        return self._find(np.concatenate(changed))

    def take(self, rows: ArrayLike) -> Space:
        """The part of the space that has these rows, in this order: features cost what is asked for."""
        chosen = np.asarray(rows, np.int64)
        count = len(self)
        columns = {
            name: column[chosen] if np.shape(column) == (count,) else column
            for name, column in self._columns.items()
        }
        return replace(self, codes=self.codes[chosen], _columns=columns)

    @cached_property
    def default_row(self) -> int:
        """The row of the template's default: the first of its `defaults` that is valid here.

        Raises:
            TemplateError: none of them is.
        """
        for params in self.template.defaults:
            if (row := self.row(params)) is not None:
                return row
        raise TemplateError(f"{self.template.name}: none of its defaults is valid on {self.target.arch}")

    @cached_property
    def features(self) -> dict[str, NDArray[np.float64]]:
        """Numbers for a cost model, each of shape (candidates,): parameters, derived, features."""
        wanted = [p.name for p in self.template.parameters] + [name for name, _ in self.template.derived]
        scope = dict(self._columns)
        for name, expression in self.template.features:
            scope[name] = np.broadcast_to(expression(scope), (len(self),))
            wanted.append(name)
        features = {}
        for index, name in enumerate(wanted):
            column = scope[name]
            if column.dtype.kind in "US":
                if index >= len(self.template.parameters):
                    continue
                column = self.codes[:, index]
            features[name] = self._numbers(name, column)
        return features

    @cached_property
    def estimate_ns(self) -> NDArray[np.float64]:
        """The template's analytic time estimate in nanoseconds, shape (candidates,)."""
        estimate = self._numbers(
            "estimate_ns", self.template.estimate_ns({**self.features, **self._columns}), above=0.0
        )
        return np.broadcast_to(estimate, (len(self),))

    def _numbers(self, name: str, values: Any, above: float = -np.inf) -> NDArray[np.float64]:
        """The values as numbers that a cost model can take.

        Raises:
            TemplateError: one of them is a word, is not finite, or is not above the limit.
        """
        column = np.asarray(values)
        fits = column > above if column.dtype.kind in "biuf" else np.zeros(column.shape, np.bool_)
        if not (fits := fits & (column != np.inf)).all():
            wrong = column[~fits].flat[0]
            rule = "a finite number" if above < 0 else "a number above 0"
            raise TemplateError(
                f"{self.template.name}: {name} must be {rule}, but is {wrong} for a candidate"
            )
        return column.astype(np.float64)

    def _find(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that have these codes, without those that no row has."""
        if not len(self):
            return np.zeros(0, np.int64)
        keys = codes @ self._radix
        places = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.asarray(places[self._keys[places] == keys], np.int64)

    @cached_property
    def _radix(self) -> NDArray[np.int64]:
        """What one step of each parameter is worth in a row's number among all raw combinations."""
        sizes = [len(p.values) for p in self.template.parameters]
        return np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))], np.int64)

    @cached_property
    def _keys(self) -> NDArray[np.int64]:
        """The number of each row among all raw combinations: ascending, as rows are in that order."""
        return self.codes.astype(np.int64) @ self._radix


def _rejection(constraint: Constraint, count: int) -> Rejection:
    assert constraint.kind != "supports"
    return Rejection(constraint.kind, constraint.rule.text, constraint.reason, count)
