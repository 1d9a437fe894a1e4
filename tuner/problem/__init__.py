"""Problems: what to tune. YAML specs in, frozen `GemmProblem`s out."""

from tuner.problem.dtypes import DType
from tuner.problem.gemm import Activation, Epilogue, GemmProblem, ProblemType, Transpose

__all__ = ["Activation", "DType", "Epilogue", "GemmProblem", "ProblemType", "Transpose"]
