"""manifest.json of an exported library. It may come from a stranger, so nothing in it is taken on trust."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tuner.device import Fingerprint
from tuner.errors import LibraryError
from tuner.export.table import Entry, Table
from tuner.generate.types import ParamValue
from tuner.identity import file_sha256
from tuner.problem import GemmProblem, ProblemType

FILE = "manifest.json"
FORMAT: Literal["wavetune library"] = "wavetune library"
SCHEMA_VERSION: Literal[1] = 1
_MAX_BYTES = 64 << 20
_REBUILD = "export it again with `tuner export`"

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Symbol = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,400}$")]
# Relative, and every part a plain name that does not begin with a dot.
_RelativePath = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$", max_length=1000
    ),
]
_Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(_Strict):
    bytes: Annotated[int, Field(ge=0, le=1 << 30)]
    sha256: _Sha256


class CandidateRecord(_Strict):
    template: str
    template_hash: str
    name: str
    params: dict[str, ParamValue]


class KernelRecord(_Strict):
    symbol: _Symbol
    file: _RelativePath
    sha256: _Sha256
    type: ProblemType
    candidate: CandidateRecord


class TableRow(_Strict):
    problem: GemmProblem
    kernel: _Symbol
    time_ns: _Time


class Build(_Strict):
    """How the library was compiled: the options for the kernels, and for the rest."""

    compiler: str
    kernel_flags: list[str]
    runtime_flags: list[str]


class Manifest(_Strict):
    """`table` has the kernel of every size that was tuned; `fallback` names the rule for the others.

    `nearest` is the rule of `tuner.export.Table.find`. `files` lists every other file of the folder.
    """

    format: Literal["wavetune library"]
    schema_version: Literal[1]
    wavetune: str
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    fingerprint: Fingerprint
    build: Build
    library: _RelativePath
    fallback: Literal["nearest"]
    kernels: list[KernelRecord]
    table: list[TableRow]
    files: dict[_RelativePath, FileRecord]

    def lookup(self) -> Table:
        return Table(Entry(row.problem, row.kernel, row.time_ns) for row in self.table)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a library.

    Raises:
        LibraryError: it is missing, malformed, of an unknown version, or contradicts itself.
    """
    path = folder / FILE
    data = _read_json(path)
    if data.get("format") != FORMAT:
        raise LibraryError(f"{path} is not the manifest of a wavetune library; check the path")
    if data.get("schema_version") != SCHEMA_VERSION:
        found = repr(data.get("schema_version"))[:40]
        raise LibraryError(
            f"{path} must have schema version {SCHEMA_VERSION}, but has {found}; "
            "use the version of wavetune that wrote it, or export the library again"
        )
    try:
        manifest = Manifest.model_validate_json(json.dumps(data))
        _check(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])).encode("unicode_escape").decode()[:200]
        raise LibraryError(f"{path}: {where}: {first['msg']}; {_REBUILD}") from None
    except ValueError as error:
        raise LibraryError(f"{path}: {error}; {_REBUILD}") from None
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every file of a library against its manifest, loading none of them.

    Raises:
        LibraryError: the manifest is bad, or a file is missing, a link, or not as it was written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        check_file(folder, name, record)
    return manifest


def check_file(folder: Path, name: str, record: FileRecord) -> Path:
    """Return the path of a listed file that is as it was written. Raises `LibraryError`."""
    path = folder
    for part in name.split("/"):
        path = path / part
        try:
            info = path.lstat()
        except OSError as error:
            raise LibraryError(f"{path} cannot be read ({error.strerror}); {_REBUILD}") from None
        if stat.S_ISLNK(info.st_mode):
            raise LibraryError(f"{path} must be part of the library, but is a link; {_REBUILD}")
    if not stat.S_ISREG(info.st_mode):
        raise LibraryError(f"{path} must be a plain file; {_REBUILD}")
    if info.st_size != record.bytes:
        raise LibraryError(f"{path} must have {record.bytes:,} bytes, but has {info.st_size:,}; {_REBUILD}")
    try:
        actual = file_sha256(path)
    except OSError as error:
        raise LibraryError(f"{path} cannot be read ({error.strerror}); {_REBUILD}") from None
    if actual != record.sha256:
        raise LibraryError(f"{path} has changed since it was exported (SHA-256 {actual[:12]}...); {_REBUILD}")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise LibraryError(f"{path} must be a plain file; {_REBUILD}")
        if info.st_size > _MAX_BYTES:
            raise LibraryError(f"{path} must have at most {_MAX_BYTES >> 20} MiB; {_REBUILD}")
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        rule = f"{path.parent} is not an exported library, since it has no {FILE}"
        raise LibraryError(f"{rule}; check the path, or export one with `tuner export`") from None
    except OSError as error:
        raise LibraryError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError):
        raise LibraryError(f"{path} is not JSON, or cut short; {_REBUILD}") from None
    if not isinstance(data, dict):
        raise LibraryError(f"{path} must hold a JSON object; {_REBUILD}")
    return data


def _check(manifest: Manifest) -> None:
    """Raise ValueError where parts of the manifest contradict each other or the rules of a problem."""
    kernels = {kernel.symbol: kernel for kernel in manifest.kernels}
    for kernel in manifest.kernels:
        record = manifest.files.get(kernel.file)
        if record is None or record.sha256 != kernel.sha256:
            raise ValueError(f"files: {kernel.file} must be listed with the SHA-256 of its kernel")
    if manifest.library not in manifest.files:
        raise ValueError(f"files: {manifest.library} must be listed")
    if not manifest.table:
        raise ValueError("table: must have at least one row")
    for row in manifest.table:
        p = row.problem
        if row.kernel not in kernels:
            raise ValueError(f"table: there is no kernel {row.kernel[:80]}")
        if kernels[row.kernel].type != p.type:
            raise ValueError(f"table: {row.kernel[:80]} is not for {p.type.name}")
        layout = {name: getattr(p, name) for name in ("lda", "ldb", "ldc", "ldd")}
        layout |= {f"stride_{x}": getattr(p, f"stride_{x}") for x in "abcd"}
        GemmProblem.create(
            p.type, p.m, p.n, p.k, batch_count=p.batch_count, alpha=p.alpha, beta=p.beta, **layout
        )
