"""What a build yields: a binary, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.generate import KernelSource, Target


@dataclass(frozen=True)
class Binary:
    """A compiled kernel in the build cache.

    `resources` holds what the compiler reports: registers, spills, LDS or code bytes. `seconds` is
    what the build took when it was done, 0.0 for one that was found in the cache.
    """

    path: Path
    sha256: str
    symbol: str
    source_id: str
    toolchain: str
    seconds: float
    resources: dict[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class BuildFailure:
    """Why a source did not build; `message` is the compiler's, shortened."""

    source_id: str
    toolchain: str
    message: str
    seconds: float


class Unfinished(Exception):
    """A compiler that was stopped from outside: by a deadline, the system, or a full disk.

    It says nothing about the source, so the build cache does not remember it as a failure.
    """


class Toolchain(Protocol):
    """A compiler for one kind of target.

    **Identity.** `id` names the compiler and its exact version; it is part of the build cache's key
    and of the device fingerprint, so another compiler never inherits a measurement.
    **Thread safety.** `compile` is called from several threads at once, each with its own folder.
    """

    @property
    def id(self) -> str: ...

    def flags(self, target: Target) -> tuple[str, ...]:
        """The options `compile` passes for `target`; part of the cache's key."""
        ...

    def compile(self, source: KernelSource, target: Target, folder: Path) -> str | None:
        """Write `kernel.bin` into `folder`; return None, or the compiler's message on failure.

        Raises:
            Unfinished: the compiler did not come to a verdict.
        """
        ...
