"""Kernel template folders: what they declare, checked on loading."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tuner.errors import TemplateError
from tuner.generate.expr import Expression
from tuner.generate.types import Candidate, ParamValue, Target
from tuner.problem import GemmProblem, ProblemType

DESCRIPTION = "template.yaml"
_Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
_PROBLEM = GemmProblem.create(ProblemType(), 1, 1, 1)
_RESERVED = {*_PROBLEM.scope(), "kind", "arch", "problem", "target", "candidate", "symbol"}
_FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Rule(_Strict):
    rule: str
    reason: str


class _Parameter(_Strict):
    values: Annotated[list[bool | int | str], Field(min_length=1)]
    short: _Identifier | None = None
    doc: str


class _Constraints(_Strict):
    legal: list[_Rule] = []
    prune: list[_Rule] = []


class _Description(_Strict):
    name: _Identifier
    kind: Literal["cpu", "hip", "cuda"] | list[Literal["cpu", "hip", "cuda"]]
    language: Literal["c", "hip", "cuda"]
    kernel: _FileName
    summary: str
    supports: list[_Rule] = []
    parameters: Annotated[dict[_Identifier, _Parameter], Field(min_length=1)]
    derived: dict[_Identifier, str | int] = {}
    constraints: _Constraints = _Constraints()
    features: dict[_Identifier, str | int] = {}
    estimate_ns: str | int
    defaults: Annotated[list[dict[_Identifier, bool | int | str]], Field(min_length=1)]


@dataclass(frozen=True)
class Parameter:
    """A free knob of a template, with its values in order and its short name in kernel names."""

    name: str
    values: tuple[ParamValue, ...]
    short: str
    doc: str


@dataclass(frozen=True)
class Constraint:
    """A rule that candidates obey: `legal` for correctness, `prune` because breaking it never pays."""

    kind: Literal["supports", "legal", "prune"]
    rule: Expression
    reason: str


@dataclass(frozen=True, eq=False)
class Template:
    """A loaded template folder. `hash` covers every file that rendering may read."""

    folder: Path
    name: str
    kinds: tuple[str, ...]
    language: str
    kernel: str
    summary: str
    parameters: tuple[Parameter, ...]
    derived: tuple[tuple[str, Expression], ...]
    supports: tuple[Constraint, ...]
    constraints: tuple[Constraint, ...]
    features: tuple[tuple[str, Expression], ...]
    estimate_ns: Expression
    defaults: tuple[dict[str, ParamValue], ...]
    hash: str

    def unsupported(self, type: ProblemType, target: Target) -> str | None:
        """Return why this template cannot serve `type` on `target`, or None if it can."""
        if target.kind not in self.kinds:
            return f"it is for {' and '.join(self.kinds)}, not for {target.kind}"
        scope = {**target.scope(), **type.scope()}
        return next((c.reason for c in self.supports if not c.rule(scope)), None)

    def candidate(self, params: dict[str, ParamValue]) -> Candidate:
        """Return the candidate with these values.

        Raises:
            TemplateError: a parameter is missing, unknown or has a value that is not listed.
        """
        if unknown := sorted(set(params) - {p.name for p in self.parameters}):
            names = ", ".join(p.name for p in self.parameters)
            raise TemplateError(f"{self.name} has no parameter {unknown[0]}; it has: {names}")
        chosen: list[tuple[str, ParamValue]] = []
        for parameter in self.parameters:
            if parameter.name not in params:
                raise TemplateError(f"{self.name}: a value for {parameter.name} is missing")
            value = params[parameter.name]
            if value not in parameter.values:
                listed = ", ".join(map(str, parameter.values))
                raise TemplateError(f"{self.name}: {parameter.name} is one of {listed}, not {value}")
            # The listed value, since True equals 1 but does not render as it does.
            chosen.append((parameter.name, parameter.values[parameter.values.index(value)]))
        codes = [f"{p.short}{int(v) if isinstance(v, bool) else v}"
                 for p, (_, v) in zip(self.parameters, chosen, strict=True)]  # fmt: skip
        return Candidate(self.name, self.hash, tuple(chosen), "_".join([self.name, *codes]))

    def derive(self, params: dict[str, ParamValue], type: ProblemType, target: Target) -> dict[str, Any]:
        """Return the derived values of one candidate as plain Python numbers and strings."""
        scope: dict[str, Any] = {**target.scope(), **type.scope(), **params}
        values: dict[str, Any] = {}
        for name, expression in self.derived:
            values[name] = scope[name] = _plain(expression(scope))
        return values


def builtin_root() -> Path:
    """The folder of the templates that come with wavetune: inside the wheel, or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "kernel_templates"
    return packaged if packaged.is_dir() else package.parent / "kernel_templates"


def template_roots() -> list[Path]:
    """Folders that hold template folders: those in $TUNER_TEMPLATES first, then the built-in one."""
    extra = os.environ.get("TUNER_TEMPLATES", "")
    return [*(Path(p).resolve() for p in extra.split(os.pathsep) if p), builtin_root()]


def find_templates(kind: str | None = None) -> list[Template]:
    """Load all templates for a kind of device (or all), in order of their names.

    Raises:
        TemplateError: one of the folders is malformed, or a name is used twice.
    """
    found: dict[str, Template] = {}
    for root in template_roots():
        if not root.is_dir():
            raise TemplateError(f"{root}: no such template folder; correct $TUNER_TEMPLATES")
        for description in sorted(root.glob(f"*/{DESCRIPTION}")):
            template = load_template(description.parent)
            if template.name in found:
                first = found[template.name].folder
                raise TemplateError(f"{description}: the name {template.name} is taken by {first}")
            found[template.name] = template
    return [t for _, t in sorted(found.items()) if kind is None or kind in t.kinds]


def load_template(folder: Path) -> Template:
    """Load one template folder.

    Raises:
        TemplateError: with a line for each rule that `template.yaml` breaks.
    """
    return _load(folder.resolve(), files_hash(folder.resolve()))


def files_hash(folder: Path) -> str:
    """Return a hash of the files of a template folder and of the common headers.

    All of `common/` counts, whether included or not: a needless new measurement is cheap, a stale
    one is not.
    """
    digest = hashlib.sha256()
    for root in dict.fromkeys([folder, folder.parent / "common", builtin_root() / "common"]):
        for path in sorted(p for p in root.glob("**/*") if p.is_file()):
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def _load(folder: Path, hash: str) -> Template:
    path = folder / DESCRIPTION
    try:
        data = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
        description = _Description.model_validate(data)
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: cannot be read: {error}") from None
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise TemplateError("\n".join(lines)) from None
    except (YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise TemplateError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not (folder / description.kernel).is_file():
        raise TemplateError(f"{path}: kernel: there is no file {description.kernel} in {folder}")

    def parse(where: str, text: str | int) -> Expression:
        try:
            return Expression(str(text))
        except TemplateError as error:
            raise TemplateError(f"{path}: {where}: {error}") from None

    def rules(kind: Literal["supports", "legal", "prune"], given: list[_Rule]) -> tuple[Constraint, ...]:
        return tuple(
            Constraint(kind, parse(f"{kind}[{i}].rule", r.rule), r.reason) for i, r in enumerate(given)
        )

    template = Template(
        folder=folder,
        name=description.name,
        kinds=(description.kind,) if isinstance(description.kind, str) else tuple(description.kind),
        language=description.language,
        kernel=description.kernel,
        summary=description.summary,
        parameters=tuple(
            Parameter(name, tuple(p.values), p.short or name, p.doc)
            for name, p in description.parameters.items()
        ),
        derived=tuple((n, parse(f"derived.{n}", e)) for n, e in description.derived.items()),
        supports=rules("supports", description.supports),
        constraints=rules("legal", description.constraints.legal)
        + rules("prune", description.constraints.prune),
        features=tuple((n, parse(f"features.{n}", e)) for n, e in description.features.items()),
        estimate_ns=parse("estimate_ns", description.estimate_ns),
        defaults=tuple(description.defaults),
        hash=hash,
    )
    names = [*description.parameters, *description.derived, *description.features]
    taken = [name for i, name in enumerate(names) if name in _RESERVED or name in names[:i]]
    if taken:
        raise TemplateError(f"{path}: the name {taken[0]} is taken; choose another")
    for group in (template.derived, template.features):
        for i, (name, expression) in enumerate(group):
            if later := sorted(expression.names & {n for n, _ in group[i:]}):
                raise TemplateError(f"{path}: {name} uses {later[0]}, which must come before it; move it up")
    for parameter in template.parameters:
        if len(set(parameter.values)) < len(parameter.values):
            raise TemplateError(f"{path}: parameters.{parameter.name}: a value is listed twice")
        strings = [v for v in parameter.values if isinstance(v, str)]
        bad = [v for v in strings if not re.fullmatch(r"[A-Za-z0-9_]+", v)]
        if bad:
            raise TemplateError(f"{path}: parameters.{parameter.name}: `{bad[0]}` must be a plain word")
        if strings and len(strings) < len(parameter.values):
            raise TemplateError(f"{path}: parameters.{parameter.name}: values mix words and numbers")
    for params in template.defaults:
        try:
            template.candidate(params)
        except TemplateError as error:
            raise TemplateError(f"{path}: defaults: {error}") from None
    return template


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
