"""Exporting: winners become a folder with one shared library that other programs load."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import tuner
from tuner.build import Binary, BuildCache, BuildFailure, HostToolchain, Unfinished
from tuner.errors import LibraryError
from tuner.export import manifest as manifests
from tuner.export.table import Entry, Table, type_code
from tuner.generate import KernelSource, Target
from tuner.generate.template import builtin_root
from tuner.identity import content_hash, file_sha256

if TYPE_CHECKING:
    from tuner.store import Winner

RUNTIME = Path(__file__).parent / "runtime"
_DEVICE = Path(__file__).parents[1] / "device"
_SOURCES = {
    "include/wavetune.h": RUNTIME / "wavetune.h",
    **{
        f"src/{name}": RUNTIME / name
        for name in ("wavetune.c", "processor.c", "processor.h", "required.c", "table.h", "exports.map")
    },
    "src/host_team.h": _DEVICE / "host_team.h",
}


@dataclass(frozen=True)
class Export:
    """A library that was written: where, how many kernels for how many problems, and its size."""

    path: Path
    kernels: int
    problems: int
    bytes: int


def export_library(
    winners: Sequence[Winner],
    folder: Path,
    toolchain: HostToolchain,
    target: Target,
    *,
    name: str = "wavetune",
    cache: BuildCache,
    overwrite: bool = False,
) -> Export:
    """Write the kernels of `winners` as a library into `folder`, which appears whole or not at all.

    `overwrite` replaces an earlier export, and nothing else, in one step.

    Raises:
        LibraryError: there are no winners, they are not of one device of kind cpu or not made with this
            compiler, the folder is in the way, or a kernel does not build.
    """
    folder = Path(folder).resolve()
    _check_winners(winners, toolchain, target)
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        rule = "must be a small letter followed by up to 39 small letters, digits or _"
        raise LibraryError(f"the name of a library {rule}, but is {name!r}; choose another")
    _check_folder(folder, overwrite)
    sources = _distinct([winner.source for winner in winners])
    entries = [Entry(w.problem, sources[w.source.id].symbol, w.time_ns) for w in winners]
    table = Table(entries)
    used = {entry.symbol for sizes in table.types.values() for entry in sizes.values()}
    kernels = sorted((s for s in sources.values() if s.symbol in used), key=lambda s: s.symbol)
    binaries = _build(kernels, target, toolchain.for_objects, cache)
    scratch = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        scratch.mkdir(parents=True)
        writer = _Writer(scratch, name, winners[0], toolchain, target)
        writer.write(kernels, binaries, table)
        _put_in_place(scratch, folder)
    except OSError as error:
        reason = f"cannot write {folder}: {error.strerror or error}"
        raise LibraryError(f"{reason}; free some space or choose another") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Export(folder, len(kernels), len(table), total)


class _Writer:
    """Fills a folder with the files of a library."""

    def __init__(
        self, folder: Path, name: str, winner: Winner, toolchain: HostToolchain, target: Target
    ) -> None:
        self.folder, self.name, self.fingerprint = folder, name, winner.fingerprint
        self.toolchain, self.target = toolchain, target
        self.library = f"lib/lib{name}.so"

    def write(self, kernels: Sequence[KernelSource], binaries: Sequence[Binary], table: Table) -> None:
        for path, original in _SOURCES.items():
            self._put(path, original.read_text())
        self._put("src/gemm_abi.h", (builtin_root() / "common" / "gemm_abi.h").read_text())
        records = [self._kernel(source) for source in kernels]
        rows = [entry for sizes in table.types.values() for entry in sizes.values()]
        build = manifests.Build(
            compiler=self.toolchain.id,
            kernel_flags=list(self.toolchain.for_objects.flags(self.target)),
            runtime_flags=list(self.toolchain.portable_flags),
        )
        id = content_hash(
            [
                [file_sha256(path) for path in sorted(self.folder.rglob("*")) if path.is_file()],
                [[entry.problem.id, entry.symbol, entry.time_ns] for entry in rows],
                [build.model_dump(), asdict(self.fingerprint), self.name, tuner.__version__],
            ]
        )
        self._describe(records, table, build, id)
        try:
            self._link(binaries)
        except Unfinished as error:
            raise LibraryError(f"{error}; export again") from None
        files = {
            path.relative_to(self.folder).as_posix(): manifests.FileRecord(
                bytes=path.stat().st_size, sha256=file_sha256(path)
            )
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        manifest = manifests.Manifest(
            format=manifests.FORMAT,
            schema_version=manifests.SCHEMA_VERSION,
            wavetune=tuner.__version__,
            name=self.name,
            id=id,
            fingerprint=self.fingerprint,
            build=build,
            library=self.library,
            fallback="nearest",
            kernels=records,
            table=[
                manifests.TableRow(problem=entry.problem, kernel=entry.symbol, time_ns=entry.time_ns)
                for entry in rows
            ],
            files=files,
        )
        self._put(manifests.FILE, manifest.model_dump_json(indent=1) + "\n")

    def _put(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def _kernel(self, source: KernelSource) -> manifests.KernelRecord:
        file = f"kernels/{source.symbol}.c"
        return manifests.KernelRecord(
            symbol=source.symbol,
            file=file,
            sha256=file_sha256(self._put(file, source.text)),
            type=source.type,
            candidate=manifests.CandidateRecord(**source.candidate.to_dict()),
        )

    def _describe(
        self, records: Sequence[manifests.KernelRecord], table: Table, build: manifests.Build, id: str
    ) -> None:
        """Write what is made from templates: the table in C, the README and what build systems read."""
        numbers = {record.symbol: number for number, record in enumerate(records)}
        types: list[dict[str, Any]] = []
        sizes: list[tuple[tuple[int, ...], int]] = []
        for type, entries in table.types.items():
            types.append(
                {"name": type.name, "code": type_code(type), "first": len(sizes), "count": len(entries)}
            )
            sizes += [(size, numbers[entry.symbol]) for size, entry in entries.items()]
        values = {
            "name": self.name,
            "version": tuner.__version__,
            "id": id,
            "arch": self.target.arch,
            "threads": self.fingerprint.compute_units,
            "fingerprint": self.fingerprint,
            "kernels": records,
            "types": types,
            "sizes": sizes,
            "kernel_flags": " ".join(flag for flag in build.kernel_flags if flag != "-c"),
            "runtime_flags": " ".join(build.runtime_flags),
        }
        for template, path in (
            ("table.c.j2", "src/table.c"),
            ("README.md.j2", "README.md"),
            ("Config.cmake.j2", f"lib/cmake/{self.name}/{self.name}Config.cmake"),
            ("ConfigVersion.cmake.j2", f"lib/cmake/{self.name}/{self.name}ConfigVersion.cmake"),
            ("package.pc.j2", f"lib/pkgconfig/{self.name}.pc"),
        ):
            self._put(path, _templates().get_template(template).render(values))

    def _link(self, binaries: Sequence[Binary]) -> None:
        """Link the kernels with the runtime, which is compiled for any processor so that it can check."""
        source = self.folder / "src"
        with tempfile.TemporaryDirectory() as scratch:
            required = Path(scratch) / "required.o"
            flags = self.toolchain.for_objects.flags(self.target)
            message = self.toolchain.compile_file(source / "required.c", required, flags)
            objects = [required]
            for number, binary in enumerate(binaries):  # named as linkers expect it
                objects.append(Path(scratch) / f"{number}.o")
                objects[-1].symlink_to(binary.path.resolve())
            if message is None:
                library = self.folder / self.library
                library.parent.mkdir(exist_ok=True)
                flags = (
                    *self.toolchain.portable_flags,
                    "-shared",
                    f"-Wl,-soname,lib{self.name}.so",
                    f"-Wl,--version-script={source / 'exports.map'}",
                    f"-I{self.folder / 'include'}",
                    "-pthread",
                )
                files = [source / "wavetune.c", source / "processor.c", source / "table.c", *objects]
                message = self.toolchain.link(files, library, flags)
        if message is not None:
            raise LibraryError(f"{self.toolchain.id} cannot link the library: {' '.join(message.split())}")


def _check_winners(winners: Sequence[Winner], toolchain: HostToolchain, target: Target) -> None:
    if not winners:
        raise LibraryError("an export needs at least one winner, but there is none; run `tuner tune` first")
    for winner in winners:
        found = winner.fingerprint
        if found.kind != target.kind or winner.source.language != "c":
            rule = f"only winners of the {target.kind} device can be exported, but one is of {found.kind}"
            raise LibraryError(f"{rule}; choose the device with --device")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", winner.source.symbol):
            rule = f"the symbol of a kernel must be a C identifier, but is {winner.source.symbol[:80]!r}"
            raise LibraryError(f"{rule}; the results database is damaged, tune again")
        if found != winners[0].fingerprint:
            rule = "a library is for one device, but the winners are of several"
            raise LibraryError(f"{rule}; choose the winners of one")
        if (found.arch, found.toolchain) != (target.arch, toolchain.id):
            raise LibraryError(
                f"a library holds what was measured, with {found.toolchain} for {found.arch}, but the "
                f"compiler here is {toolchain.id} for {target.arch}; set TUNER_CC, or tune again"
            )


def _distinct(sources: Iterable[KernelSource]) -> dict[str, KernelSource]:
    """The sources by id, each with a symbol of its own.

    Two versions of a template give kernels of one name and different text; all but the first are
    renamed by the preprocessor, so that the text stays what was measured.
    """
    result: dict[str, KernelSource] = {}
    owners: dict[str, str] = {}
    for source in sorted(sources, key=lambda source: source.id):
        if owners.setdefault(source.symbol, source.id) == source.id:
            result[source.id] = source
            continue
        symbol = f"{source.symbol}_{source.id[:8]}"
        lines = [f"#define {source.symbol}{part} {symbol}{part}\n" for part in ("", "_workspace")]
        result[source.id] = replace(source, symbol=symbol, text="".join(lines) + source.text)
    return result


def _build(
    kernels: Sequence[KernelSource], target: Target, toolchain: HostToolchain, cache: BuildCache
) -> list[Binary]:
    binaries = []
    for source, built in zip(
        kernels, cache.build_many(kernels, target, toolchain, os.cpu_count() or 1), strict=True
    ):
        if isinstance(built, BuildFailure):
            message = " ".join(built.message.split())
            raise LibraryError(f"the kernel {source.symbol} does not build: {message}; tune again")
        binaries.append(built)
    return binaries


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is in the way: anything but an empty one, or an earlier export to replace."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    strangers = _strangers(folder)
    if strangers is None:
        rule = f"{folder} must be a new folder or an earlier export, but it is neither"
        raise LibraryError(f"{rule}; choose another")
    if not overwrite:
        raise LibraryError(f"{folder} is an earlier export; pass --overwrite to replace it")
    if strangers:
        rule = f"{folder} must hold nothing but an earlier export, but has {strangers[0]}"
        raise LibraryError(f"{rule}; move it away")


def _strangers(folder: Path) -> list[str] | None:
    """The files in a folder that its manifest does not list; None if it is not an export.

    Of the manifest, which may be of another version, only the list of files is looked at.
    """
    try:
        data = json.loads((folder / manifests.FILE).read_bytes())
        if data["format"] != manifests.FORMAT:
            return None
        listed = {manifests.FILE, *data["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [name for path in found if (name := path.relative_to(folder).as_posix()) not in listed]


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Make `scratch` the folder. What was there before ends up at `scratch`, if anywhere."""
    if not folder.exists() or not any(folder.iterdir()):
        scratch.rename(folder)
    elif not _exchange(scratch, folder):
        # No exchange on this system: for a moment there is no folder, and the old one comes back on failure.
        aside = scratch.with_suffix(".old")
        folder.rename(aside)
        try:
            scratch.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h, linux/fs.h
    if function(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(b))


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(RUNTIME),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
