"""Rendering: a candidate becomes source text."""

from __future__ import annotations

import re
import traceback
from functools import lru_cache
from pathlib import Path

from jinja2 import FileSystemLoader, PrefixLoader, StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuner.errors import TemplateError
from tuner.generate.template import Template, builtin_root
from tuner.generate.types import Candidate, KernelSource, Target
from tuner.problem import ProblemType

_MAX_SOURCE = 4 << 20  # characters; a template that writes more is broken or hostile


def render(template: Template, candidate: Candidate, type: ProblemType, target: Target) -> KernelSource:
    """Render a candidate for a problem type.

    The template sees all parameters and derived values by name, and `problem` (the ProblemType),
    `target`, `candidate` and `symbol`.

    Raises:
        TemplateError: the template uses an undefined name or fails to render.
    """
    symbol = symbol_of(candidate, type)
    values = candidate.values
    context = {
        **values,
        **template.derive(values, type, target),
        "problem": type,
        "target": target,
        "candidate": candidate,
        "symbol": symbol,
    }
    pieces: list[str] = []
    size = 0
    try:
        jinja = _environment(template.folder).get_template(f"{template.folder.name}/{template.kernel}")
        for piece in jinja.generate(context):
            size += len(piece)
            if size > _MAX_SOURCE:
                raise TemplateError(f"{template.name}: the source exceeds {_MAX_SOURCE:,} characters")
            pieces.append(piece)
    except TemplateError:
        raise
    except Exception as error:  # a template may call, and so raise, anything
        raise TemplateError(f"{_where(error, template)}: cannot render {candidate.name}: {error}") from None
    return KernelSource(candidate, type, template.language, symbol, "".join(pieces))


def symbol_of(candidate: Candidate, type: ProblemType) -> str:
    """Return the C identifier of a kernel; a pure function of the candidate and the problem type."""
    return re.sub(r"\W", "_", f"{candidate.name}_{type.name}")


def _where(error: Exception, template: Template) -> str:
    """`file:line` of the innermost template line that an error came from."""
    if isinstance(error, TemplateSyntaxError):
        return f"{error.filename or template.kernel}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.endswith(".py")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(template.folder / template.kernel)


@lru_cache(maxsize=64)
def _environment(folder: Path) -> ImmutableSandboxedEnvironment:
    """The sandbox of one template, which reads the files that its hash covers and no others."""
    common = [folder.parent / "common", builtin_root() / "common"]
    return ImmutableSandboxedEnvironment(
        loader=PrefixLoader({folder.name: FileSystemLoader(folder), "common": FileSystemLoader(common)}),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
