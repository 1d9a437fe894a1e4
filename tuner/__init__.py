"""Autotune GEMM kernels, from YAML problem specs to a tuned library."""

__version__ = "0.1.0"
