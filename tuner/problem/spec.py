"""Problem specs: YAML in, a weighted workload of `GemmProblem`s out. docs/spec.md describes the format."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from tuner.errors import SpecError
from tuner.problem.dtypes import DType
from tuner.problem.gemm import Activation, Epilogue, GemmProblem, ProblemError, ProblemType, Transpose
from tuner.problem.locate import Document, Loc, line_and_column, located, read_yaml, show, suggestion

MAX_BYTES = 4 * 2**20
MAX_PROBLEMS = 100_000
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """A problem, and how often the workload calls it in proportion to the others."""

    problem: GemmProblem
    weight: float


@dataclass(frozen=True)
class Spec:
    """A named list of different problems, in the order of the file."""

    name: str
    workload: tuple[Workload, ...]

    @property
    def problems(self) -> tuple[GemmProblem, ...]:
        return tuple(item.problem for item in self.workload)


def load_spec(path: Path) -> Spec:
    """Read a spec file.

    Raises:
        SpecError: the file cannot be read, or breaks one or more rules of the format.
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(located(file, 1, 1, "file", "does not exist; check the path")) from None
    except IsADirectoryError:
        rule = "is a directory; name one of the YAML files in it"
        raise SpecError(located(file, 1, 1, "file", rule)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        rule = f"cannot be read ({reason}); check the path and its permissions"
        raise SpecError(located(file, 1, 1, "file", rule)) from None
    if len(data) > MAX_BYTES:
        rule = f"is larger than {MAX_BYTES // 2**20} MiB; write ranges, or split it into several specs"
        raise SpecError(located(file, 1, 1, "file", rule))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line, column = line_and_column(data[: error.start].decode())
        rule = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise SpecError(located(file, line, column, "file", rule)) from None
    return loads_spec(text, file)


def loads_spec(text: str, name: str) -> Spec:
    """Read a spec from its text; `name` stands for the file in errors, and names an unnamed spec.

    Raises:
        SpecError: the text breaks one or more rules of the format.
    """
    document = read_yaml(text.removeprefix("\ufeff"), name)
    if document.value is None and not document.errors:
        document.error((), "is empty; start with `gemms:` and a list of GEMMs")
    if document.value is None:
        document.check()
    return _Loader(document).spec()


def spec_schema() -> dict[str, Any]:
    """The JSON schema of the format, for editors and other tools."""
    schema = SpecFile.model_json_schema(schema_generator=_Schema)
    return {"$schema": SCHEMA_DIALECT, **schema, "title": "wavetune problem spec"}


class _Schema(GenerateJsonSchema):
    """Writes an optional key as one that may be left out, since no key of the format may be null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        if result.get("default", 0) in (None, ""):
            del result["default"]
        return result


# The format. Docstrings below fields are the descriptions in the published schema.


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


def _kind(value: object) -> str:
    """The tag of the union member that a YAML value is meant for."""
    return "<str>" if isinstance(value, str) else f"<{type(value).__name__}>"


_TAGS = {"<bool>", "<int>", "<str>", "<list>", "<dict>"}  # pydantic puts them into its locations

Size = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Stride = Annotated[int, Field(ge=0, le=2**62)]
Scalar = Annotated[float, Field(allow_inf_nan=False)]
NamedDType = Annotated[DType, Field(strict=False)]
Label = Annotated[str, Field(min_length=1, max_length=200)]


class Range(_Model):
    """Sizes from start up to and including stop, a step or a factor apart."""

    start: Size
    """The first size."""
    stop: Size
    """No size is larger; it is one of the sizes where the steps meet it."""
    step: Size | None = None
    """The difference of neighbouring sizes. Give this or factor."""
    factor: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """The ratio of neighbouring sizes. Give this or step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.step is None) == (self.factor is None):
            given = "neither" if self.step is None else "both"
            raise PydanticCustomError("range", f"must have either step or factor, but has {given}; give one")
        if self.stop < self.start:
            rule = f"must have stop at or above start, {self.start}, but stop is {self.stop}; swap them"
            raise PydanticCustomError("range", rule)
        return self

    def values(self) -> Sequence[int]:
        if self.step is not None:
            return range(self.start, self.stop + 1, self.step)
        assert self.factor is not None
        sizes = [self.start]
        while sizes[-1] * self.factor <= self.stop:
            sizes.append(sizes[-1] * self.factor)
        return sizes


Sizes = Annotated[
    Annotated[Size, Tag("<int>")]
    | Annotated[list[Size], Field(min_length=1), Tag("<list>")]
    | Annotated[Range, Tag("<dict>")],
    Discriminator(_kind, custom_error_type="sizes_kind", custom_error_message="sizes"),
]


class Grid(_Model):
    """Every combination of the given m, n, k and batch_count."""

    m: Sizes
    """Rows of D: a size, a list of sizes or a range."""
    n: Sizes
    """Columns of D: a size, a list of sizes or a range."""
    k: Sizes
    """Length of the sums: a size, a list of sizes or a range."""
    batch_count: Sizes | None = None
    """Matrices in a batch: a number, a list or a range. By default that of the GEMM."""
    weight: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] = 1.0
    """How often the workload calls each of these problems, in proportion to the others."""
    lda: Size | None = None
    """Leading dimension of A in elements. Tight by default, as are the others."""
    ldb: Size | None = None
    """Leading dimension of B in elements."""
    ldc: Size | None = None
    """Leading dimension of C in elements."""
    ldd: Size | None = None
    """Leading dimension of D in elements."""
    stride_a: Stride | None = None
    """Elements from one A of a batch to the next; 0 shares one A."""
    stride_b: Stride | None = None
    """Elements from one B of a batch to the next; 0 shares one B."""
    stride_c: Stride | None = None
    """Elements from one C of a batch to the next; 0 shares one C."""
    stride_d: Stride | None = None
    """Elements from one D of a batch to the next."""


Entry = Annotated[
    Annotated[list[Size], Field(min_length=3, max_length=3), Tag("<list>")] | Annotated[Grid, Tag("<dict>")],
    Discriminator(_kind, custom_error_type="entry_kind", custom_error_message="entry"),
]


class Dtypes(_Model):
    """The element type of each operand; those left out follow from `a`."""

    a: NamedDType
    """Elements of A."""
    b: NamedDType | None = None
    """Elements of B: by default those of A."""
    c: NamedDType | None = None
    """Elements of C: by default those of D."""
    d: NamedDType | None = None
    """Elements of D: by default those of A, but i32 for i8 and bf16 for fp8."""
    compute: NamedDType | None = None
    """What products are accumulated in: by default f32, but f64 for f64 and i32 for i8."""


class EpilogueSettings(_Model):
    """What is fused behind the product."""

    bias: Annotated[
        Annotated[bool, Tag("<bool>")] | Annotated[NamedDType, Tag("<str>")],
        Discriminator(_kind, custom_error_type="bias_kind", custom_error_message="bias"),
    ] = False
    """Add a vector of this type, one element per row of D (per column in row layout); true means the type of
    D, or bf16 where that is fp8."""
    activation: Annotated[Activation, Field(strict=False)] = Activation.NONE
    """The function applied last: none, relu, gelu (tanh form) or silu."""
    scale_a: bool = False
    """Multiply by a scalar read from memory that belongs to A."""
    scale_b: bool = False
    """Multiply by a scalar read from memory that belongs to B."""
    scale_alpha_vec: bool = False
    """Multiply by a vector, one element per row of D (per column in row layout)."""


class Settings(_Model):
    """What the sizes of a GEMM have in common."""

    dtype: Annotated[
        Annotated[NamedDType, Tag("<str>")] | Annotated[Dtypes, Tag("<dict>")],
        Discriminator(_kind, custom_error_type="dtype_kind", custom_error_message="dtype"),
    ] = DType.F32
    """Element types: one name for the usual set, or a mapping."""
    trans: Literal["NN", "NT", "TN", "TT"] = "NN"
    """op(A) and op(B): N as stored, T transposed."""
    alpha: Scalar = 1.0
    """The factor of the product."""
    beta: Scalar = 0.0
    """The factor of C; 0 means that C is not read."""
    batch_count: Size = 1
    """Matrices in a batch."""
    epilogue: EpilogueSettings = Field(default_factory=EpilogueSettings)
    """What is fused behind the product. Replaces that of the defaults as a whole."""
    layout: Literal["column", "row"] = "column"
    """How the caller stores matrices: column-major (BLAS) or row-major (NumPy, PyTorch)."""


class Gemm(Settings):
    """One kind of GEMM and its sizes."""

    name: Label = ""
    """What it is in the workload, for the reader."""
    sizes: Annotated[list[Entry], Field(min_length=1)]
    """Exact sizes [m, n, k], and grids of sizes."""


class SpecFile(_Model):
    """A problem spec: the GEMMs to tune."""

    name: Label = ""
    """The name of the spec; by default that of the file."""
    defaults: Settings = Field(default_factory=Settings)
    """What holds for every GEMM that does not say otherwise."""
    gemms: Annotated[list[Gemm], Field(min_length=1)]
    """The GEMMs of the workload."""


class _GemmOutline(Gemm):
    """A `Gemm` whose sizes are not looked at, so that each is checked, and found wrong, by itself."""

    sizes: Annotated[list[Any], Field(min_length=1)]


class _Outline(SpecFile):
    """A `SpecFile` whose GEMMs are not looked at."""

    gemms: Annotated[list[Any], Field(min_length=1)]


_OUTLINE: TypeAdapter[_Outline] = TypeAdapter(_Outline)
_GEMM: TypeAdapter[_GemmOutline] = TypeAdapter(_GemmOutline)
_ENTRY: TypeAdapter[list[int] | Grid] = TypeAdapter(Entry)

# What is said for each error of pydantic: the rule with the value that broke it, and the next action.
_RULES = {
    "missing": "is required; add it",
    "int_type": "must be a whole number, but is {value}; write one such as 1024",
    "float_type": "must be a number, but is {value}; write one such as 1.5",
    "finite_number": "must be finite, but is {value}; write a number such as 1.5",
    "bool_type": "must be true or false, but is {value}; write one of the two",
    "string_type": "must be text, but is {value}; put it in quotes",
    "string_unicode": "must be text, but has half of a surrogate pair; write the character itself",
    "string_too_short": "must not be empty; write a name, or remove the key",
    "string_too_long": "must have at most {max_length} characters; shorten it",
    "list_type": "must be a list, but is {value}; start each item on a line with `- `",
    "too_short": "must not be empty; add an item",
    "greater_than": "must be above {gt:g}, but is {value}; raise it",
    "greater_than_equal": "must be at least {ge}, but is {value}; raise it",
    "less_than_equal": "must be at most {le}, but is {value}; lower it",
    "model_type": "must be a mapping, but is {value}; write `key: value` pairs",
    "sizes_kind": "must be a size, a list of sizes or a range, but is {value}; "
    "write 1024, [1, 8, 64] or {{start: 128, stop: 4096, factor: 2}}",
    "entry_kind": "must be [m, n, k] or a mapping with m, n and k, but is {value}; write one of the two",
    "dtype_kind": "must be the name of a type or a mapping, but is {value}; write f32 or {{a: bf16, d: f32}}",
    "bias_kind": "must be true, false or the name of a type, but is {value}; write one of them",
}

# The model behind the mapping at the last key of a path, to name its keys.
_MODELS: dict[str, type[_Model]] = {
    "defaults": Settings,
    "gemms": Gemm,
    "dtype": Dtypes,
    "epilogue": EpilogueSettings,
    "sizes": Grid,
    "m": Range,
    "n": Range,
    "k": Range,
    "batch_count": Range,
}

_LAYOUT = ("lda", "ldb", "ldc", "ldd", "stride_a", "stride_b", "stride_c", "stride_d")


def _mirror(name: str) -> str:
    """The column-major name of what a row-major caller names, and the reverse.

    A row-major matrix is the transpose of the column-major matrix in the same memory. The caller's
    D = op(A) op(B) is therefore computed as D^T = op(B)^T op(A)^T: A and B change places, and so do m
    and n, while op, leading dimension and stride stay with their operand.
    """
    swapped = {"m": "n", "n": "m", "lda": "ldb", "ldb": "lda"}
    stem, _, operand = name.rpartition("_")
    if operand in ("a", "b"):
        return f"{stem}_{'b' if operand == 'a' else 'a'}"
    return swapped.get(name, name)


def _problem_type(settings: Settings) -> ProblemType:
    """The column-major type, with the types left out filled in."""
    given = settings.dtype if isinstance(settings.dtype, Dtypes) else Dtypes(a=settings.dtype)
    usual = {DType.I8: DType.I32, DType.FP8_E4M3: DType.BF16, DType.FP8_E5M2: DType.BF16}
    accumulators = {DType.I8: DType.I32, DType.F64: DType.F64}
    d = given.d or usual.get(given.a, given.a)
    fused = settings.epilogue
    if isinstance(fused.bias, bool):
        bias = (DType.BF16 if d.is_fp8 else d) if fused.bias else None
    else:
        bias = fused.bias
    operands: dict[str, Any] = {
        "trans_a": Transpose(settings.trans[0]),
        "trans_b": Transpose(settings.trans[1]),
        "dtype_a": given.a,
        "dtype_b": given.b or given.a,
    }
    scales = {"scale_a": fused.scale_a, "scale_b": fused.scale_b}
    if settings.layout == "row":
        operands = {_mirror(name): value for name, value in operands.items()}
        scales = {_mirror(name): value for name, value in scales.items()}
    epilogue = Epilogue(
        bias=bias, activation=fused.activation, scale_alpha_vec=fused.scale_alpha_vec, **scales
    )
    return ProblemType(
        dtype_c=given.c or d,
        dtype_d=d,
        compute=given.compute or accumulators.get(given.a, DType.F32),
        epilogue=epilogue,
        **operands,
    )


class _Loader:
    """Checks a document against the format, part by part, so that one pass finds every error."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.weights: dict[GemmProblem, float] = {}
        self.count = 0

    def spec(self) -> Spec:
        raw = self.document.value
        outline = self.validate(_OUTLINE, raw, ())
        for index, gemm in enumerate(_items(raw, "gemms")):
            self.gemm(gemm, ("gemms", index), outline.defaults if outline else None)
        self.document.check()
        assert outline is not None
        workload = tuple(Workload(problem, weight) for problem, weight in self.weights.items())
        return Spec(outline.name or Path(self.document.file).stem, workload)

    def gemm(self, raw: Any, loc: Loc, defaults: Settings | None) -> None:
        gemm = self.validate(_GEMM, raw, loc)
        entries = [
            self.validate(_ENTRY, entry, (*loc, "sizes", i)) for i, entry in enumerate(_items(raw, "sizes"))
        ]
        if gemm is None or defaults is None:
            return
        own = {name: getattr(gemm, name) for name in gemm.model_fields_set & Settings.model_fields.keys()}
        settings = defaults.model_copy(update=own)
        expansion = _Expansion(self.document, settings, loc)
        if not expansion.allowed(loc, m=1, n=1, k=1, batch_count=1):
            return
        for i, entry in enumerate(entries):
            if entry is not None:
                self.entry(expansion, entry, (*loc, "sizes", i))

    def entry(self, expansion: _Expansion, entry: list[int] | Grid, loc: Loc) -> None:
        """Add the problems of an entry.

        Every rule on sizes is monotone in them, so the largest combination speaks for all.
        """
        if isinstance(entry, list):
            entry = Grid(m=entry[0], n=entry[1], k=entry[2])
        batch_count = entry.batch_count or expansion.settings.batch_count
        axes = {"m": entry.m, "n": entry.n, "k": entry.k, "batch_count": batch_count}
        sizes = {name: _values(axis) for name, axis in axes.items()}
        count = math.prod(map(len, sizes.values()))
        if self.count + count > MAX_PROBLEMS:
            rule = f"brings the spec to {self.count + count:,} problems, and {MAX_PROBLEMS:,} is the most"
            self.document.error(loc, f"{rule}; use fewer sizes, or split the spec")
            return
        self.count += count
        given = {name: getattr(entry, name) for name in _LAYOUT if getattr(entry, name) is not None}
        largest = {name: max(values) for name, values in sizes.items()}
        if not expansion.allowed(loc, **largest, **given):
            return
        for combination in itertools.product(*sizes.values()):
            problem = expansion.problem(dict(zip(sizes, combination, strict=True)) | given)
            self.weights[problem] = self.weights.get(problem, 0.0) + entry.weight

    def validate(self, adapter: TypeAdapter[T], raw: Any, loc: Loc) -> T | None:
        """The value of the model, or None where it has errors, which are noted."""
        try:
            return adapter.validate_python(raw)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                inner = tuple(part for part in detail["loc"] if part not in _TAGS)
                self.explain((*loc, *inner), detail)
            return None

    def explain(self, loc: Loc, detail: Mapping[str, Any]) -> None:
        kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
        if kind == "extra_forbidden":
            parents = [part for part in loc[:-1] if isinstance(part, str)]
            model = _MODELS[parents[-1]] if parents else SpecFile
            keys = list(model.model_fields)
            action = suggestion(loc[-1], keys, f"the keys are {', '.join(keys)}")
            self.document.error(loc, f"is not a key here; {action}", on_key=True)
        elif kind in ("enum", "literal_error"):
            known = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
            rule = f"must be one of {', '.join(known)}, but is {show(value)}"
            self.document.error(loc, f"{rule}; {suggestion(value, known, 'choose one of them')}")
        elif kind in ("too_short", "too_long") and len(loc) >= 2 and loc[-2] == "sizes":
            rule = f"must be [m, n, k], but has {len(value)} items; write three sizes"
            self.document.error(loc, rule)
        else:
            rule = _RULES.get(kind, "{message}")
            values = {**context, "value": show(value), "message": detail["msg"]}
            self.document.error(loc, rule.format_map(values))


@dataclass
class _Expansion:
    """Makes the problems of one GEMM, and says what is wrong in the terms of the one who wrote it."""

    document: Document
    settings: Settings
    loc: Loc

    def __post_init__(self) -> None:
        self.type = _problem_type(self.settings)
        self.row = self.settings.layout == "row"

    def problem(self, given: Mapping[str, int]) -> GemmProblem:
        if self.row:
            given = {_mirror(name): value for name, value in given.items()}
        settings = self.settings
        return GemmProblem.create(self.type, alpha=settings.alpha, beta=settings.beta, **given)

    def allowed(self, loc: Loc, **given: int) -> bool:
        """Whether there is such a problem; what it breaks is noted at the entry `loc` otherwise."""
        try:
            self.problem(given)
        except ProblemError as error:
            for violation in error.violations:
                name = _mirror(violation.field) if self.row else violation.field
                at = self.find(name, loc)
                label = "" if at[-1] == name or name == f"dtype_{at[-1]}" else f"{name} "
                size = f" at {given['m']}x{given['n']}x{given['k']}" if name in _LAYOUT else ""
                self.document.error(at, f"{label}{violation.rule}{size}; {violation.action}")
            return False
        return True

    def find(self, name: str, loc: Loc) -> Loc:
        """The nearest place in the document that decides the named field."""
        inside: tuple[Loc, ...] = ((name,),)
        if name == "dtype_c":  # where it is left out, it is what D is
            inside = (("dtype", "c"), ("dtype", "d"), ("dtype",))
        elif name == "compute" or name.startswith("dtype_"):
            inside = (("dtype", name.removeprefix("dtype_")), ("dtype",))
        elif name in ("bias", "activation"):
            inside = (("epilogue", name),)
        places = [(*base, *path) for base in (loc, self.loc, ("defaults",)) for path in inside]
        return next((place for place in places if place in self.document.at), loc)


def _items(raw: Any, key: str) -> list[Any]:
    """The list under a key of something that may be neither a mapping nor have a list there."""
    items = raw.get(key) if isinstance(raw, dict) else None
    return items if isinstance(items, list) else []


def _values(sizes: int | list[int] | Range) -> Sequence[int]:
    if isinstance(sizes, Range):
        return sizes.values()
    return [sizes] if isinstance(sizes, int) else sizes
