"""Expressions of templates: what they compute, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tuner.errors import TemplateError
from tuner.generate import Expression


@pytest.mark.parametrize(
    "text",
    [
        "a.real", "a.__class__", "''.__class__.__mro__", "a[0]", "a()", "f(1)", "__import__('os')",
        "(lambda: 1)()", "lambda: 1", "[x for x in a]", "{x for x in a}", "(x for x in a)", "f'{a}'", "f'a'",
        "(1, 2)", "[1]", "{1: 2}", "{1}", "*a", "(x := 1)", "...", "None", "b'x'", "1j", "~a", "1 << 2",
        "1 & 2", "a @ a", "a is 1", "a in b", "a in 'abc'", "min(*a)", "min(a=1, b=2)", "min(1)",
        "abs(1, 2)", "ceil_div(1)", "round_up(1, 2, 3)", "print(1)", "await a", "yield", "a = 1", "import os",
        "1; 2", "1 2", "abs(1, x=2)", "", " ", "#", "1 +", "a if b", "\0", "9" * 5000, str(2**63),
        str(10**40), "(" * 999, "1" + "+1" * 500,
    ],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_all_else_is_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(TemplateError):
        Expression(text)


def test_a_refusal_quotes_what_is_not_allowed() -> None:
    with pytest.raises(TemplateError, match=r"^`1 \+ a\.b`: `a\.b` is not allowed in an expression$"):
        Expression("1 + a.b")
    with pytest.raises(TemplateError, match="has at most 1000 characters, not 1001"):
        Expression("1" * 1001)


def test_a_missing_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(TemplateError, match="`tile_m > 4` uses 'tile_m', which is none of: k, m"):
        Expression("tile_m > 4")({"m": 1, "k": 2})


@pytest.mark.parametrize("text", ["'x' + 1", "'x' < 1", "-'x'", "max(1, 'x')", "'x' * 3"])
def test_operands_that_do_not_fit_are_an_error(text: str) -> None:
    with pytest.raises(TemplateError, match="cannot be evaluated"):
        Expression(text)({"a": 1})


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "2**64", "1 / 0", "7 // 0", "7 % 0", "log2(0)", "sqrt(-1)", "1e999"]
)
def test_numbers_beyond_reach_are_values_not_errors_and_cost_nothing(text: str) -> None:
    assert not np.isnan(Expression(f"1 if ({text}) > 100 else 0")({}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ceil_div(7, 2)", 4), ("ceil_div(8, 2)", 4), ("round_up(9, 8)", 16), ("log2(8)", 3), ("sqrt(49)", 7),
        ("min(3, 1, 2)", 1), ("max(3, x)", 5), ("abs(0 - x)", 5), ("1 < 2 < 2", False), ("1 < 2 <= 2", True),
        ("word in ('m', 'n')", True), ("word not in ['m', 'n']", False), ("x in ()", False),
        ("2 ** -1", 0.5), ("2 ** 3 ** 2", 512), ("not x or word == 'n'", True), ("0x10 + 1_0", 26),
        ("(x > 1) + (x > 2) + (x > 9)", 2), ("-(x > 1)", -1), ("3 * (x == 5)", 3),
    ],
)  # fmt: skip
def test_values(text: str, expected: object) -> None:
    value = Expression(text)({"x": 5, "word": "n"})
    assert value == expected


def test_names_are_those_that_are_read() -> None:
    assert Expression("max(a, 2) if b in (c, 'd') else e").names == {"a", "b", "c", "e"}


def test_columns_are_computed_element_by_element() -> None:
    scope = {"x": np.array([1, 2, 3]), "word": np.array(["m", "n", "m"]), "one": 1}
    assert Expression("x * 10 if word == 'm' else -one")(scope).tolist() == [10, -1, 30]
    assert Expression("1 < x < 3 or word in ('n', 'k')")(scope).tolist() == [False, True, False]


# Random expressions, against Python itself: truth values stand where a truth value belongs and numbers where
# a number does, since `and` and `or` give True or False here and one of their operands in Python.

_NUMBERS = st.integers(0, 50).map(str) | st.sampled_from(["x", "y", "z"])


def _extend(numbers: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    comparison = st.tuples(numbers, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), numbers)
    truth = comparison.map(" ".join)
    truth |= st.tuples(truth, st.sampled_from(["and", "or"]), truth).map(lambda t: f"({' '.join(t)})")
    truth |= truth.map(lambda t: f"(not {t})")
    truth |= st.tuples(numbers, numbers, numbers).map(lambda n: f"{n[0]} in ({n[1]}, {n[2]})")
    truth |= st.tuples(numbers, numbers, numbers).map(" < ".join)
    return (
        st.tuples(numbers, st.sampled_from(["+", "-", "*", "//", "%"]), numbers).map(
            lambda t: f"({' '.join(t)})"
        )
        | numbers.map(lambda n: f"(-{n})")
        | st.tuples(numbers, truth, numbers).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})")
        | st.tuples(st.sampled_from(["min", "max"]), numbers, numbers).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        )
        | numbers.map(lambda n: f"abs({n})")
        | truth.map(lambda t: f"({t})")
    )


@given(st.recursive(_NUMBERS, _extend, max_leaves=12), *[st.integers(-9, 9)] * 3)
@settings(max_examples=300, deadline=None)
def test_integer_expressions_equal_those_of_python(text: str, x: int, y: int, z: int) -> None:
    assume(len(text) <= 1000)
    scope = {"x": x, "y": y, "z": z}
    try:
        expected = eval(text, {"__builtins__": {}}, {**scope, "min": min, "max": max, "abs": abs})
    except ZeroDivisionError:
        assume(False)
    assume(abs(expected) < 2**62)
    value = Expression(text)(scope)
    assert value == expected
    columns = {name: np.array([number, number + 1]) for name, number in scope.items()}
    assert np.broadcast_to(Expression(text)(columns), (2,))[0] == expected
