"""Spaces: the candidates of a template, against plain loops over all combinations."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import TemplateError
from tuner.generate import Constraint, Expression, Parameter, Space, Target, Template
from tuner.problem import DType, GemmProblem, ProblemType

TARGET = Target("cpu", "x86_64-v3", (("simd_bytes", 32),))
PROBLEM = GemmProblem.create(ProblemType(), 7, 5, 3)


def template(
    parameters: dict[str, tuple[Any, ...]],
    *,
    derived: dict[str, str] | None = None,
    legal: tuple[str, ...] = (),
    prune: tuple[str, ...] = (),
    supports: str = "1",
    features: dict[str, str] | None = None,
    estimate_ns: str = "1",
    defaults: tuple[dict[str, Any], ...] = (),
) -> Template:
    rules = [*(("legal", text) for text in legal), *(("prune", text) for text in prune)]
    return Template(
        folder=Path("plain"),
        name="plain",
        kinds=("cpu",),
        language="c",
        kernel="kernel.c.j2",
        summary="",
        parameters=tuple(Parameter(name, values, name, "") for name, values in parameters.items()),
        derived=tuple((name, Expression(text)) for name, text in (derived or {}).items()),
        supports=(Constraint("supports", Expression(supports), "it is for others"),),
        constraints=tuple(Constraint(kind, Expression(text), text) for kind, text in rules),  # type: ignore[arg-type]
        features=tuple((name, Expression(text)) for name, text in (features or {}).items()),
        estimate_ns=Expression(estimate_ns),
        defaults=defaults,
        hash="5eed",
    )


def enumerate_space(template: Template) -> Space:
    return Space.enumerate(template, PROBLEM, TARGET)


def brute_force(template: Template) -> list[dict[str, Any]]:
    """The valid combinations in order, checked one by one in Python's own arithmetic."""
    found = []
    for values in itertools.product(*(p.values for p in template.parameters)):
        scope: dict[str, Any] = {**TARGET.scope(), **PROBLEM.scope(), "max": max}
        scope |= zip((p.name for p in template.parameters), values, strict=True)
        for name, expression in template.derived:
            scope[name] = eval(expression.text, {}, scope)
        if all(eval(c.rule.text, {}, scope) for c in template.constraints):
            found.append({p.name: scope[p.name] for p in template.parameters})
    return found


_AXES = {"a": st.integers(1, 9), "b": st.integers(1, 9), "word": st.sampled_from(["m", "n", "k"]),
         "flag": st.booleans()}  # fmt: skip
_RULES = [
    "a * b <= 20", "a <= b", "word != 'k'", "flag or a > 2", "d < 12", "e % 2 == 0", "m >= a", "m < 0", "1",
    "b < 4 if word == 'n' else b > 2", "word in ('m', 'n') and not flag", "simd_bytes // b > 4",
]  # fmt: skip


@st.composite
def _templates(draw: st.DrawFn) -> Template:
    order = draw(st.permutations(list(_AXES)))
    parameters = {
        name: tuple(draw(st.lists(_AXES[name], min_size=1, max_size=4, unique=True))) for name in order
    }
    rules = draw(st.lists(st.sampled_from(_RULES), max_size=4))
    split = draw(st.integers(0, len(rules)))
    return template(
        parameters,
        derived={"d": "a + b", "e": "max(d, 5) + simd_bytes"},
        legal=tuple(rules[:split]),
        prune=tuple(rules[split:]),
    )


@given(_templates())
@settings(max_examples=150, deadline=None)
def test_a_space_is_what_plain_loops_find(template: Template) -> None:
    space = enumerate_space(template)
    expected = brute_force(template)
    rows = range(len(space))
    assert [space.params(row) for row in rows] == expected
    assert [space.row(params) for params in expected] == list(rows)
    assert space.raw_size - sum(r.count for r in space.rejections) == len(space)
    assert all(r.count > 0 for r in space.rejections)
    for row in list(rows)[:5]:
        neighbours = [i for i in rows if (space.codes[i] != space.codes[row]).sum() == 1]
        assert sorted(space.neighbours(row)) == neighbours


def test_a_combination_counts_for_the_first_rule_that_it_breaks() -> None:
    space = enumerate_space(
        template({"a": (1, 2, 3), "b": (1, 2, 3)}, legal=("a + b < 5",), prune=("b < 3", "a > 0"))
    )
    counts = Counter({(r.kind, r.rule): r.count for r in space.rejections})
    # (2,3) (3,2) (3,3) break the first rule; of the others only (1,3) breaks the second.
    assert counts == {("legal", "a + b < 5"): 3, ("prune", "b < 3"): 1}


def test_a_row_that_is_not_in_the_space_is_none() -> None:
    space = enumerate_space(template({"a": (1, 2), "word": ("m", "n")}, legal=("a == 1 or word == 'n'",)))
    assert space.row({"a": 2, "word": "m"}) is None
    assert space.row({"a": 3, "word": "m"}) is None
    assert space.row({"a": 1}) is None
    assert space.row({"a": 2, "word": "n"}) == 2


def test_a_space_may_be_empty() -> None:
    space = enumerate_space(
        template({"a": (1, 2), "b": (1, 2)}, legal=("a > m",), defaults=({"a": 1, "b": 1},))
    )
    assert (len(space), space.rejections[0].count) == (0, 4)
    assert space.row({"a": 1, "b": 1}) is None
    assert space.estimate_ns.shape == (0,)
    with pytest.raises(TemplateError, match="plain: none of its defaults is valid on x86_64-v3"):
        _ = space.default_row


def test_the_default_is_the_first_that_is_valid_here() -> None:
    space = enumerate_space(
        template({"a": (1, 8, 2)}, legal=("a <= n",), defaults=({"a": 8}, {"a": 2}, {"a": 1}))
    )
    assert space.params(space.default_row) == {"a": 2}


def test_features_are_numbers_and_estimates_see_words() -> None:
    space = enumerate_space(
        template(
            {"word": ("m", "n"), "a": (2, 4), "flag": (False, True)},
            derived={"side": "m if word == 'm' else n", "other": "'n' if word == 'm' else 'm'"},
            features={"waste": "side / a"},
            estimate_ns="waste * (10 if word == 'm' else 1) + flag",
        )
    )
    assert list(space.features) == ["word", "a", "flag", "side", "waste"]
    assert space.features["word"].tolist() == [0.0] * 4 + [1.0] * 4
    assert all(column.dtype == np.float64 for column in space.features.values())
    row = space.row({"word": "m", "a": 4, "flag": True})
    assert row is not None
    assert space.features["waste"][row] == 7 / 4
    assert space.estimate_ns[row] == 7 / 4 * 10 + 1


@pytest.mark.parametrize(
    ("estimate_ns", "value"),
    [("a - 1", "0"), ("1 / (a - 1)", "inf"), ("log2(0 - a)", "nan"), ("dtype_a", "f32")],
)
def test_an_estimate_is_a_time(estimate_ns: str, value: str) -> None:
    space = enumerate_space(template({"a": (1, 2)}, estimate_ns=estimate_ns))
    with pytest.raises(
        TemplateError, match=rf"^plain: estimate_ns must be a number above 0, but is {value} "
    ):
        _ = space.estimate_ns


def test_a_feature_is_finite() -> None:
    space = enumerate_space(template({"a": (1, 2)}, features={"f": "log2(a - 1)"}))
    with pytest.raises(TemplateError, match=r"^plain: f must be a finite number, but is -inf for"):
        _ = space.features


def test_a_part_of_a_space_keeps_its_values() -> None:
    space = enumerate_space(template({"a": (1, 2, 3), "b": (4, 5)}, derived={"d": "a * b"}, estimate_ns="d"))
    part = space.take([4, 1])
    assert [part.params(row) for row in range(2)] == [space.params(4), space.params(1)]
    assert part.estimate_ns.tolist() == [12, 5]


def test_unknown_names_and_unsupported_problems_are_template_errors() -> None:
    with pytest.raises(TemplateError, match="`zzz > 1` uses 'zzz', which is none of: a, "):
        enumerate_space(template({"a": (1, 2)}, legal=("zzz > 1",)))
    with pytest.raises(TemplateError, match="`zzz` uses 'zzz'"):
        enumerate_space(template({"a": (1, 2)}, derived={"d": "zzz"}, legal=("d > 1",)))
    with pytest.raises(TemplateError, match="plain cannot serve f32_nn: it is for others"):
        enumerate_space(template({"a": (1,)}, supports="dtype_a == 'i8'"))
    with pytest.raises(TemplateError, match="it is for cpu, not for hip"):
        Space.enumerate(template({"a": (1,)}), PROBLEM, Target("hip", "gfx942"))


def test_a_space_that_would_fill_the_memory_is_refused() -> None:
    wide = {name: tuple(range(1000)) for name in "abc"}
    with pytest.raises(TemplateError, match="1,000,000,000 combinations after c are more than 20,000,000"):
        enumerate_space(template(wide))


def test_combinations_can_be_numbered() -> None:
    with pytest.raises(TemplateError, match=r"^plain: more than 2\^63 combinations; use fewer"):
        enumerate_space(template({f"p{i}": tuple(range(8)) for i in range(21)}))
    largest = {f"p{i}": tuple(range(8)) for i in range(20)}
    space = enumerate_space(template(largest, legal=tuple(f"p{i} == 7" for i in range(20))))
    assert space.row(dict.fromkeys(largest, 7)) == 0


def test_what_a_rule_forbids_is_not_expanded() -> None:
    wide = {name: tuple(range(1000)) for name in "abc"}
    space = enumerate_space(template(wide, legal=("a == 1", "b == a", "c == b + m")))
    assert [space.params(row) for row in range(len(space))] == [{"a": 1, "b": 1, "c": 8}]
    assert space.raw_size == 10**9


def test_a_problem_decides_its_own_space() -> None:
    plain = template({"a": (1, 2, 4)}, legal=("a <= m and (a < 4 or dtype_a == 'f64')",))
    small = GemmProblem.create(ProblemType(), 1, 1, 1)
    double = GemmProblem.create(ProblemType(*[small.type.trans_a] * 2, *[DType.F64] * 5), 9, 9, 9)
    assert len(Space.enumerate(plain, small, TARGET)) == 1
    assert len(Space.enumerate(plain, double, TARGET)) == 3
