"""Kernel generation: template folders in, candidates and kernel sources out."""

from tuner.generate.expr import Expression
from tuner.generate.render import render, symbol_of
from tuner.generate.space import Rejection, Space
from tuner.generate.template import Constraint, Parameter, Template, find_templates, load_template
from tuner.generate.types import Candidate, KernelSource, ParamValue, Target

__all__ = [
    "Candidate",
    "Constraint",
    "Expression",
    "KernelSource",
    "ParamValue",
    "Parameter",
    "Rejection",
    "Space",
    "Target",
    "Template",
    "find_templates",
    "load_template",
    "render",
    "symbol_of",
]
