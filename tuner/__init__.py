"""Autotune GEMM kernels, from YAML problem specs to a tuned library."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.export import Library

__version__ = "0.1.0"


def load(folder: str | os.PathLike[str], *, threads: int = 0) -> Library:
    """Open a library that `tuner export` wrote. See `tuner.export.load`, and docs/library.md."""
    from tuner.export import load  # not before it is needed, so that importing tuner costs nothing

    return load(folder, threads=threads)
