"""Kernel generation: template folders in, candidates and kernel sources out."""

from tuner.generate.types import Candidate, KernelSource, ParamValue, Target

__all__ = ["Candidate", "KernelSource", "ParamValue", "Target"]
