"""Builds: kernel sources in, binaries in a content-addressed cache out."""

from tuner.build.types import Binary, BuildFailure, Toolchain

__all__ = ["Binary", "BuildFailure", "Toolchain"]
