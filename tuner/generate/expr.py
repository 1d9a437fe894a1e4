"""Expressions in template.yaml: a small, safe subset of Python, evaluated over whole columns at once.

Templates may come from strangers, so an expression is parsed into a tree of allowed operations and
never handed to `eval`. Operands are NumPy scalars or arrays, which is what makes checking a rule on a
million combinations one pass over an array.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tuner.errors import TemplateError

Scope = Mapping[str, Any]
_Node = Callable[[Scope], Any]

_MAX_LENGTH = 1000  # keeps the parser's recursion, and the work of one evaluation, bounded


def _ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def _round_up(a: Any, b: Any) -> Any:
    return _ceil_div(a, b) * b


def _power(a: Any, b: Any) -> Any:
    # Through floats: integer powers would raise for negative exponents and wrap for large ones.
    return np.power(np.asarray(a, np.float64), b)


def _on_numbers(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with True as 1 and False as 0, as in Python; NumPy's + would be a logical or."""

    def apply(*values: Any) -> Any:
        arrays = [np.asarray(value) for value in values]
        return operation(*(a.astype(np.int64) if a.dtype == np.bool_ else a for a in arrays))

    return apply


def _reduce(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(first: Any, *rest: Any) -> Any:
        for value in rest:
            first = operation(first, value)
        return first

    return apply


_FUNCTIONS: dict[str, tuple[Callable[..., Any], range]] = {
    "min": (_reduce(np.minimum), range(2, 9)),
    "max": (_reduce(np.maximum), range(2, 9)),
    "abs": (np.abs, range(1, 2)),
    "ceil_div": (_ceil_div, range(2, 3)),
    "round_up": (_round_up, range(2, 3)),
    "log2": (np.log2, range(1, 2)),
    "sqrt": (np.sqrt, range(1, 2)),
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _on_numbers(np.add),
    ast.Sub: _on_numbers(np.subtract),
    ast.Mult: _on_numbers(np.multiply),
    ast.Div: _on_numbers(np.true_divide),
    ast.FloorDiv: _on_numbers(np.floor_divide),
    ast.Mod: _on_numbers(np.mod),
    ast.Pow: _power,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: np.logical_not,
    ast.USub: _on_numbers(np.negative),
    ast.UAdd: _on_numbers(np.positive),
}


class Expression:
    """A parsed expression.

    Allowed: numbers, strings, True, False, names, `+ - * / // % **`, comparisons (chained too),
    `in` a tuple, `and or not`, `x if c else y`, and min, max, abs, ceil_div, round_up, log2, sqrt.

    Raises:
        TemplateError: the text is not such an expression; the message quotes it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        names: set[str] = set()
        if len(text) > _MAX_LENGTH:
            raise TemplateError(f"an expression has at most {_MAX_LENGTH} characters, not {len(text)}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise TemplateError(f"`{text}` is not an expression") from None
        self._node = self._compile(tree.body, names)
        self.names = frozenset(names)

    def __call__(self, scope: Scope) -> Any:
        """Evaluate with the values of `scope`, scalars or arrays of one shape; returns NumPy values.

        Raises:
            TemplateError: a name is missing from `scope`, or the operand types do not fit.
        """
        try:
            # Both branches of a conditional are evaluated, so a division by zero in the one that
            # is not taken is normal.
            with np.errstate(all="ignore"):
                return self._node(scope)
        except KeyError as error:
            known = ", ".join(sorted(scope))
            raise TemplateError(f"`{self.text}` uses {error}, which is none of: {known}") from None
        except (TypeError, ValueError) as error:
            raise TemplateError(f"`{self.text}` cannot be evaluated: {error}") from None

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def _compile(self, node: ast.expr, names: set[str]) -> _Node:
        compile = self._compile
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                if type(value) is int and value >= 2**63:
                    raise TemplateError(f"`{self.text}`: {value} does not fit in 64 bits")
                constant: Any = np.asarray(value)[()]
                return lambda scope: constant
            case ast.Name(id=name):
                names.add(name)
                return lambda scope: scope[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                binary, a, b = _BINARY[type(op)], compile(left, names), compile(right, names)
                return lambda scope: binary(a(scope), b(scope))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                unary, a = _UNARY[type(op)], compile(operand, names)
                return lambda scope: unary(a(scope))
            case ast.BoolOp(op=op, values=values):
                logical = _reduce(np.logical_and if isinstance(op, ast.And) else np.logical_or)
                parts = [compile(value, names) for value in values]
                return lambda scope: logical(*(part(scope) for part in parts))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                c, a, b = compile(test, names), compile(body, names), compile(orelse, names)
                return lambda scope: np.where(c(scope), a(scope), b(scope))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare(left, ops, comparators, names)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                function, arity = _FUNCTIONS[name]
                if len(args) not in arity:
                    raise TemplateError(f"`{self.text}`: {name} does not take {len(args)} arguments")
                arguments = [compile(argument, names) for argument in args]
                return lambda scope: function(*(argument(scope) for argument in arguments))
        raise TemplateError(f"`{self.text}`: `{ast.unparse(node)}` is not allowed in an expression")

    def _compare(
        self, left: ast.expr, ops: list[ast.cmpop], comparators: list[ast.expr], names: set[str]
    ) -> _Node:
        links: list[_Node] = []
        for op, right in zip(ops, comparators, strict=True):
            a = self._compile(left, names)
            if isinstance(op, ast.In | ast.NotIn):
                if not isinstance(right, ast.Tuple | ast.List):
                    raise TemplateError(f"`{self.text}`: `in` takes a tuple of values on its right")
                links.append(_membership(a, [self._compile(item, names) for item in right.elts], op))
            elif type(op) in _COMPARE:
                links.append(_comparison(_COMPARE[type(op)], a, self._compile(right, names)))
            else:
                raise TemplateError(f"`{self.text}`: `is` is not allowed in an expression")
            left = right
        conjunction = _reduce(np.logical_and)
        return lambda scope: conjunction(*(link(scope) for link in links))


def _comparison(operation: Callable[[Any, Any], Any], a: _Node, b: _Node) -> _Node:
    return lambda scope: operation(a(scope), b(scope))


def _membership(a: _Node, items: list[_Node], op: ast.cmpop) -> _Node:
    def test(scope: Scope) -> Any:
        value = a(scope)
        found = np.zeros(np.shape(value), np.bool_)
        for item in items:
            found = found | np.equal(value, item(scope))
        return ~found if isinstance(op, ast.NotIn) else found

    return test
