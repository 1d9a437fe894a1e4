"""`tuner templates`, `render` and `schema`: what kernels are made from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.cli.common import device_options, json_option, print_json, print_table
from tuner.errors import SpecError, TemplateError

if TYPE_CHECKING:
    from tuner.generate import Candidate, ParamValue, Target, Template
    from tuner.problem import GemmProblem

F = TypeVar("F", bound=Callable[..., Any])


def problem_options(function: F) -> F:
    """A problem on the command line, for commands that need just one."""
    function = click.option("--trans", type=click.Choice(["NN", "NT", "TN", "TT"]), default="NN",
                            show_default=True, help="transA and transB.")(function)  # fmt: skip
    function = click.option("--dtype", default="f32", show_default=True, help="f64, f32, f16, bf16 or i8.")(
        function
    )
    return click.option("--size", default="512x512x512", show_default=True, metavar="MxNxK",
                        help="m, n and k in column-major terms.")(function)  # fmt: skip


def problem_of(size: str, dtype: str, trans: str) -> GemmProblem:
    """The problem that `problem_options` describe, through the same checks as a spec."""
    from tuner.problem import loads_spec

    numbers = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", size)
    if not numbers:
        raise SpecError(f"--size must be MxNxK, such as 512x512x512, but is `{size}`")
    if not re.fullmatch(r"\w+", dtype):
        raise SpecError(f"--dtype must be the name of an element type, but is `{dtype}`")
    sizes = ", ".join(numbers.groups())
    text = f"gemms: [{{dtype: {dtype}, trans: {trans}, sizes: [[{sizes}]]}}]"
    return loads_spec(text, "command line").problems[0]


def template_named(name: str) -> Template:
    from tuner.generate import find_templates

    templates = {t.name: t for t in find_templates()}
    if name not in templates:
        raise TemplateError(f"there is no template `{name}`; there are: {', '.join(templates)}")
    return templates[name]


def candidate_for(
    name: str, values: tuple[str, ...], problem: GemmProblem, target: Target
) -> tuple[Template, Candidate]:
    """The default candidate of a template for a problem, with some parameters set."""
    from tuner.generate import Space

    template = template_named(name)
    space = Space.enumerate(template, problem, target)
    params = space.params(space.default_row)
    for value in values:
        key, separator, text = value.partition("=")
        if not separator:
            raise TemplateError(f"--set takes NAME=VALUE, but is `{value}`")
        params[key] = _value(template, key, text)
    candidate = template.candidate(params)
    if space.row(params) is None:
        raise TemplateError(_why_not(template, params, problem, target))
    return template, candidate


def _value(template: Template, name: str, text: str) -> ParamValue:
    """The listed value that is written like this; the text itself, which is then refused, if none is."""
    for parameter in template.parameters:
        for value in parameter.values if parameter.name == name else ():
            if str(value).lower() == text.lower():
                return value
    return text


def _why_not(template: Template, params: dict[str, ParamValue], problem: GemmProblem, target: Target) -> str:
    scope = {**target.scope(), **problem.scope(), **params}
    for name, expression in template.derived:
        scope[name] = expression(scope)
    broken = next((c for c in template.constraints if not c.rule(scope)), None)
    reason = f"{broken.reason} ({broken.rule.text})" if broken else "it is not in the space"
    return f"{template.name}: these values are not valid for {problem.name}: {reason}"


@click.command()
@click.argument("name", required=False)
@problem_options
@device_options
@json_option
def templates(
    name: str | None, size: str, dtype: str, trans: str, device: str, threads: int | None, as_json: bool
) -> None:
    """List the kernel templates, or the parameters and rules of one, with its space for a problem."""
    from tuner.device import open_device
    from tuner.generate import Space, find_templates

    problem = problem_of(size, dtype, trans)
    target = open_device(device, threads).target
    if name is not None:
        _describe(template_named(name), problem, target, as_json)
        return
    rows = []
    for template in find_templates():
        reason = template.unsupported(problem.type, target)
        count = 0 if reason else len(Space.enumerate(template, problem, target))
        rows.append((template, count, reason))
    if as_json:
        print_json([
            {
                "name": t.name,
                "hash": t.hash,
                "kinds": t.kinds,
                "summary": t.summary,
                "valid": n,
                "unsupported": r,
            }
            for t, n, r in rows
        ])  # fmt: skip
        return
    headers = ["template", "for", f"valid for {problem.name}", "summary"]
    print_table(
        headers,
        [[t.name, ", ".join(t.kinds), r or f"{n:,}", t.summary] for t, n, r in rows],
        right=headers[2:3],
    )


def _describe(template: Template, problem: GemmProblem, target: Target, as_json: bool) -> None:
    from tuner.generate import Space

    reason = template.unsupported(problem.type, target)
    space = None if reason else Space.enumerate(template, problem, target)
    if as_json:
        print_json(
            {
                "name": template.name,
                "hash": template.hash,
                "summary": template.summary,
                "parameters": {p.name: {"values": p.values, "doc": p.doc} for p in template.parameters},
                "problem": problem.name,
                "unsupported": reason,
                "raw_size": space.raw_size if space else None,
                "valid": len(space) if space else 0,
                "rejections": [
                    {"kind": r.kind, "rule": r.rule, "reason": r.reason, "count": r.count}
                    for r in (space.rejections if space else ())
                ],
            }
        )
        return
    click.echo(f"{template.name}: {template.summary}\n")
    rows = [[p.name, " ".join(str(v).lower() for v in p.values), p.doc] for p in template.parameters]
    print_table(["parameter", "values", ""], rows)
    if space is None:
        click.echo(f"\nIt cannot serve {problem.name}: {reason}.")
        return
    click.echo(
        f"\nFor {problem.name}: {len(space):,} of {space.raw_size:,} combinations are valid. Ruled out:"
    )
    rules = [[f"{r.count:,}", r.kind, r.reason, r.rule] for r in space.rejections]
    print_table(["", "kind", "reason", "kept are those with"], rules, right=[""])


@click.command()
@click.argument("template")
@click.option(
    "--set", "values", multiple=True, metavar="NAME=VALUE", help="A parameter; others keep the default."
)
@problem_options
@device_options
@json_option
def render(
    template: str,
    values: tuple[str, ...],
    size: str,
    dtype: str,
    trans: str,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Print the kernel that TEMPLATE renders for a problem."""
    from tuner.device import open_device
    from tuner.generate import render as render_source

    problem = problem_of(size, dtype, trans)
    target = open_device(device, threads).target
    family, candidate = candidate_for(template, values, problem, target)
    source = render_source(family, candidate, problem.type, target)
    if as_json:
        print_json({"candidate": candidate.to_dict(), "symbol": source.symbol, "source": source.text})
    else:
        click.echo(source.text, nl=False)


@click.command()
def schema() -> None:
    """Print the JSON schema of problem specs, for editors."""
    from tuner.problem import spec_schema

    print_json(spec_schema())
