"""Builds: kernel sources in, binaries in a content-addressed cache out."""

from tuner.build.cache import BuildCache, cache_root
from tuner.build.host import HostToolchain, host_toolchain
from tuner.build.types import Binary, BuildFailure, Toolchain, Unfinished

__all__ = [
    "Binary",
    "BuildCache",
    "BuildFailure",
    "HostToolchain",
    "Toolchain",
    "Unfinished",
    "cache_root",
    "host_toolchain",
]
