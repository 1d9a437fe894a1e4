"""The build cache: each kernel is compiled once per source, flags, compiler and target."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tuner.build.types import Binary, BuildFailure, Toolchain, Unfinished
from tuner.errors import ToolchainError
from tuner.generate import KernelSource, Target
from tuner.identity import content_hash, file_sha256

_BINARY = "kernel.bin"
_RECORD = "build.json"


def cache_root() -> Path:
    """$TUNER_CACHE, or `wavetune` in the user's cache folder."""
    if chosen := os.environ.get("TUNER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "wavetune"


class BuildCache:
    """A content-addressed folder of binaries, shared by any number of processes.

    An entry is written to a temporary folder and renamed into place, so it is there whole or not at
    all; where two processes race, the loser discards its own copy. Failures are entries too: what
    a compiler rejected once it is not asked again.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or cache_root()) / "build"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolchainError(
                f"the build cache must be writable, but {error.filename} is not "
                f"({error.strerror}); set TUNER_CACHE to another folder"
            ) from None

    def build(self, source: KernelSource, target: Target, toolchain: Toolchain) -> Binary | BuildFailure:
        """Return the binary of `source`, compiling it if it is not in the cache."""
        key = content_hash([source.id, target.arch, toolchain.id, toolchain.flags(target)])
        entry = self.root / key[:2] / key
        if (found := self._read(entry, source, toolchain, seconds=0.0)) is not None:
            return found
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=entry.parent))
            try:
                start = time.perf_counter()
                message = toolchain.compile(source, target, scratch)
                seconds = time.perf_counter() - start
                record: dict[str, object] = {"symbol": source.symbol, "seconds": seconds}
                if message is None:
                    record["sha256"] = file_sha256(scratch / _BINARY)
                    record["bytes"] = (scratch / _BINARY).stat().st_size
                else:
                    record["failure"] = message
                (scratch / _RECORD).write_text(json.dumps(record))
                # The loser of a race finds a full folder in the way; the winner's copy is as good.
                with contextlib.suppress(OSError):
                    scratch.rename(entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except Unfinished as error:
            return BuildFailure(source.id, toolchain.id, str(error), time.perf_counter() - start)
        except OSError as error:
            raise ToolchainError(
                f"cannot write to the build cache {self.root}: {error.strerror}; "
                "free some space or set TUNER_CACHE to another folder"
            ) from None
        found = self._read(entry, source, toolchain, seconds=seconds)
        if found is None:
            raise ToolchainError(f"the build cache entry {entry} is damaged; delete that folder")
        return found

    def build_many(
        self, sources: Iterable[KernelSource], target: Target, toolchain: Toolchain, jobs: int
    ) -> list[Binary | BuildFailure]:
        """Build in up to `jobs` compiler processes at once; results in the order of `sources`."""
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="build") as pool:
            return list(pool.map(lambda source: self.build(source, target, toolchain), sources))

    def _read(
        self, entry: Path, source: KernelSource, toolchain: Toolchain, seconds: float
    ) -> Binary | BuildFailure | None:
        if not entry.is_dir():
            return None
        try:
            record = json.loads((entry / _RECORD).read_text())
            if "failure" in record:
                return BuildFailure(source.id, toolchain.id, record["failure"], seconds)
            path = entry / _BINARY
            if file_sha256(path) != record["sha256"]:
                raise ValueError("the binary has changed")
            return Binary(
                path=path,
                sha256=record["sha256"],
                symbol=record["symbol"],
                source_id=source.id,
                toolchain=toolchain.id,
                seconds=seconds,
                resources={"code_bytes": record["bytes"]},
            )
        except (OSError, ValueError, LookupError, TypeError):
            shutil.rmtree(entry, ignore_errors=True)  # damaged by a crash of the machine: rebuild
            return None
