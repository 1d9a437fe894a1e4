"""Host C compilers: the system's, or the clang that comes in the `ziglang` wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tuner.build.cache import cache_root
from tuner.build.types import Unfinished
from tuner.errors import ToolchainError
from tuner.generate import KernelSource, Target
from tuner.generate.template import builtin_root
from tuner.identity import content_hash, file_sha256

_TIMEOUT_SECONDS = 60
_STOPPED = re.compile(r"\bkilled\b|no space left|out of memory|cannot allocate memory", re.IGNORECASE)
_COMMON_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
)


@dataclass(frozen=True)
class HostToolchain:
    """A C compiler for the machine it runs on; satisfies `tuner.build.Toolchain`."""

    command: tuple[str, ...]
    version: str
    extra_flags: tuple[str, ...] = ()
    product: str = "-shared"

    @property
    def id(self) -> str:
        return self.version

    @property
    def is_zig(self) -> bool:
        return self.version.startswith("zig ")

    @property
    def for_objects(self) -> HostToolchain:
        """The same compiler, making object files instead, for `link`."""
        return replace(self, product="-c")

    @property
    def portable_flags(self) -> tuple[str, ...]:
        """Options for code that runs on every processor of this machine's kind."""
        # nocona is the oldest x86-64 processor that gcc, clang and zig call by one name.
        baseline = "-march=nocona" if os.uname().machine == "x86_64" else "-mcpu=generic"
        return (*_COMMON_FLAGS, baseline, *self.extra_flags)

    def flags(self, target: Target) -> tuple[str, ...]:
        return (*_COMMON_FLAGS, self.product, *self._arch_flags(target.arch), *self.extra_flags)

    def _arch_flags(self, arch: str) -> tuple[str, ...]:
        """`x86_64-v4+avx512vnni` names a psABI level and features beyond it, as the compilers do."""
        machine, _, features = arch.partition("+")
        extra = tuple(f"-m{feature}" for feature in features.split("+") if feature)
        if not machine.startswith("x86_64-v"):
            return ("-mcpu=native",)
        if self.is_zig:
            # zig spells levels its own way, and lets -mtune=native override them.
            return (f"-march={machine.replace('-', '_')}", *extra)
        return (f"-march={machine.replace('_', '-')}", "-mtune=native", *extra)

    def compile(self, source: KernelSource, target: Target, folder: Path) -> str | None:
        """Write `kernel.bin`, a shared library or object, into `folder`; return None or the first errors."""
        path = folder / "kernel.c"
        path.write_text(source.text)
        return self.compile_file(path, folder / "kernel.bin", self.flags(target))

    def support_library(self, path: Path) -> Path:
        """Return the shared library of one of wavetune's own C files, building it on first use.

        Headers are looked up beside the file and among the common headers of the templates.

        Raises:
            ToolchainError: it does not compile, or the cache cannot be written.
        """
        headers = [*sorted(path.parent.glob("*.h")), *sorted((builtin_root() / "common").glob("*.h"))]
        key = content_hash([self.id, *(file_sha256(p) for p in (path, *headers))])
        folder = cache_root() / "support" / key
        library = folder / f"lib{path.stem}.so"
        try:
            if not library.exists():
                folder.mkdir(parents=True, exist_ok=True)
                scratch = folder / f"{os.getpid()}.tmp"
                includes = [f"-I{path.parent}", f"-I{builtin_root() / 'common'}"]
                flags = (*_COMMON_FLAGS, "-shared", *includes, *self.extra_flags, "-pthread")
                try:
                    message = self.compile_file(path, scratch, flags)
                except Unfinished as error:
                    message = str(error)
                if message:
                    raise ToolchainError(f"{self.id} cannot compile {path.name}: {message}")
                scratch.rename(library)
        except OSError as error:
            raise ToolchainError(
                f"cannot write to {folder}: {error.strerror}; set TUNER_CACHE to another folder"
            ) from None
        return library

    def compile_file(self, path: Path, output: Path, flags: tuple[str, ...]) -> str | None:
        """Compile one C file with the given flags; return None or the first errors."""
        return self.link([path], output, flags)

    def link(self, inputs: Sequence[Path], output: Path, flags: tuple[str, ...]) -> str | None:
        """Compile and link C files and objects into one output; return None or the first errors.

        Raises:
            Unfinished: the compiler was stopped before it could judge them.
        """
        command = [*self.command, *flags, "-o", str(output), *map(str, inputs), "-lm"]
        environment = {
            **os.environ,
            "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(cache_root() / "zig"),
            "LC_ALL": "C",
        }
        try:
            # In a session of its own, for a Ctrl-C meant for the sweep would pass for a failed build.
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ToolchainError(f"cannot run {command[0]}: {error.strerror}") from None
        with process:
            try:
                _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise Unfinished(f"the compiler did not end within {_TIMEOUT_SECONDS} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the driver
        if process.returncode == 0:
            return None
        lines = [line for line in errors.splitlines() if "error" in line]
        message = "\n".join((lines or errors.splitlines())[:5])
        message = message.replace(f"{inputs[0].parent}{os.sep}", "") or f"exit code {process.returncode}"
        if process.returncode < 0 or _STOPPED.search(errors):
            raise Unfinished(f"the compiler was stopped: {message}")
        return message


@lru_cache(maxsize=1)
def host_toolchain() -> HostToolchain:
    """Return the first usable C compiler: $TUNER_CC, $CC, clang, gcc, cc, then the ziglang wheel.

    TUNER_CC=zig asks for the wheel even where the system has a compiler.

    Raises:
        ToolchainError: there is none.
    """
    chosen = os.environ.get("TUNER_CC") or os.environ.get("CC")
    if chosen and chosen != "zig":
        return _probe(tuple(chosen.split()))
    for name in () if chosen else ("clang", "gcc", "cc"):
        if path := shutil.which(name):
            with contextlib.suppress(ToolchainError):  # the next one may work
                return _probe((path,))
    if (zig := _ziglang()) is not None:
        return _probe((str(zig), "cc"))
    raise ToolchainError(
        "a C compiler is needed for the cpu device, but there is none; "
        "install one by pip: pip install 'wavetune[toolchain]'"
    )


def _ziglang() -> Path | None:
    """The executable of the ziglang wheel, called directly to spare a Python start per kernel."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    executable = Path(spec.origin).with_name("zig")
    return executable if executable.exists() else None


def _probe(command: tuple[str, ...]) -> HostToolchain:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        first = result.stdout.splitlines()[0] if result.returncode == 0 else ""
    except (OSError, IndexError, subprocess.TimeoutExpired):
        first = ""
    if not first:
        raise ToolchainError(
            f"`{' '.join(command)} --version` does not work; set CC to a working C compiler, or "
            "unset it and pip install 'wavetune[toolchain]'"
        )
    if command[-1] == "cc" and any("zig" in Path(part).name for part in command):
        # zig links its undefined-behaviour sanitizer unless told not to; the version is zig's own,
        # since two releases may carry the same clang with different defaults.
        zig = subprocess.run([*command[:-1], "version"], capture_output=True, text=True).stdout.strip()
        extra = ("-fno-sanitize=undefined", "-mprefer-vector-width=512")
        return HostToolchain(command, f"zig {zig} ({first})", extra)
    wide = ("-mprefer-vector-width=512",) if os.uname().machine == "x86_64" else ()
    return HostToolchain(command, first, wide)
