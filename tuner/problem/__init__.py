"""Problems: what to tune. YAML specs in, frozen `GemmProblem`s out."""

from tuner.problem.dtypes import DType
from tuner.problem.gemm import (
    Activation,
    Epilogue,
    GemmProblem,
    ProblemError,
    ProblemType,
    Transpose,
    Violation,
)
from tuner.problem.spec import Spec, Workload, load_spec, loads_spec, spec_schema

__all__ = [
    "Activation",
    "DType",
    "Epilogue",
    "GemmProblem",
    "ProblemError",
    "ProblemType",
    "Spec",
    "Transpose",
    "Violation",
    "Workload",
    "load_spec",
    "loads_spec",
    "spec_schema",
]
