"""Problem specs: what each rule says and where, and what loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tuner.errors import SpecError
from tuner.measure.operands import Operands, matrices, reference
from tuner.problem import (
    Activation,
    DType,
    Epilogue,
    GemmProblem,
    Spec,
    Transpose,
    load_spec,
    loads_spec,
    locate,
    spec_schema,
)

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "problem_specs").glob("*.yaml"))

KEYS = "dtype, trans, alpha, beta, batch_count, epilogue, layout, name, sizes"
DTYPES = "f64, f32, f16, bf16, i8, i32, fp8_e4m3, fp8_e5m2"
FORM = "write 1024, [1, 8, 64] or {start: 128, stop: 4096, factor: 2}"
AROUND = "check the indentation, colons, quotes and brackets around here"


def load(text: str) -> Spec:
    return loads_spec(text, "s.yaml")


def one(gemm: str) -> GemmProblem:
    """The only problem of a spec with one GEMM, written as the inside of a flow mapping."""
    (item,) = load(f"gemms: [{{{gemm}}}]").workload
    return item.problem


def sizes(text: str) -> list[tuple[int, int, int]]:
    return [(p.m, p.n, p.k) for p in load(f"gemms: [{{sizes: [{text}]}}]").problems]


def errors(text: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        load(text)
    return str(error.value).split("\n")


def error_in(gemm: str) -> str:
    """The only error of a spec with one GEMM, which stands on line 2 from column 3 on."""
    (line,) = errors(f"gemms:\n- {gemm}")
    return line.removeprefix("s.yaml:")


# Rules: everything that is wrong in a file, in the words that the user reads.

MANY = """\
name: ''
defaults: {dtype: fp32, layot: row}
gemms:
  - trans: nn
    alpha: .inf
    beta: yes
    sizes:
      - [0, 1, 2]
      - [1, 2]
      - {m: {start: 8, stop: 4, step: 1}, n: 1.5, k: "7"}
      - {m: true, n: [], k: 2147483648, lda: 0, weight: 0}
      - 5
  - sizes: []
  - 7
"""


def test_one_pass_finds_every_error_in_the_order_of_the_file() -> None:
    size = "must be a size, a list of sizes or a range"
    assert errors(MANY) == [
        "s.yaml:1:7: name: must not be empty; write a name, or remove the key",
        f"s.yaml:2:19: defaults.dtype: must be one of {DTYPES}, but is 'fp32'; did you mean `f32`?",
        "s.yaml:2:25: defaults.layot: is not a key here; did you mean `layout`?",
        "s.yaml:4:12: gemms[0].trans: must be one of NN, NT, TN, TT, but is 'nn'; did you mean `NN`?",
        "s.yaml:5:12: gemms[0].alpha: must be finite, but is inf; write a number such as 1.5",
        "s.yaml:6:11: gemms[0].beta: must be a number, but is 'yes'; write one such as 1.5",
        "s.yaml:8:10: gemms[0].sizes[0][0]: must be at least 1, but is 0; raise it",
        "s.yaml:9:9: gemms[0].sizes[1]: must be [m, n, k], but has 2 items; write three sizes",
        "s.yaml:10:13: gemms[0].sizes[2].m: must have stop at or above start, 8, but stop is 4; swap them",
        f"s.yaml:10:46: gemms[0].sizes[2].n: {size}, but is 1.5; {FORM}",
        f"s.yaml:10:54: gemms[0].sizes[2].k: {size}, but is '7'; {FORM}",
        f"s.yaml:11:13: gemms[0].sizes[3].m: {size}, but is true; {FORM}",
        "s.yaml:11:22: gemms[0].sizes[3].n: must not be empty; add an item",
        "s.yaml:11:29: gemms[0].sizes[3].k: must be at most 2147483647, but is 2147483648; lower it",
        "s.yaml:11:46: gemms[0].sizes[3].lda: must be at least 1, but is 0; raise it",
        "s.yaml:11:57: gemms[0].sizes[3].weight: must be above 0, but is 0; raise it",
        "s.yaml:12:9: gemms[0].sizes[4]: must be [m, n, k] or a mapping with m, n and k, but is 5; "
        "write one of the two",
        "s.yaml:13:12: gemms[1].sizes: must not be empty; add an item",
        "s.yaml:14:5: gemms[2]: must be a mapping, but is 7; write `key: value` pairs",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["1:1: spec: is empty; start with `gemms:` and a list of GEMMs"]),
        ("# nothing\n", ["1:1: spec: is empty; start with `gemms:` and a list of GEMMs"]),
        ("null", ["1:1: spec: has no value; write one, or remove the key"]),
        ("[1]", ["1:1: spec: must be a mapping, but is a list; write `key: value` pairs"]),
        ("name: x", ["1:1: gemms: is required; add it"]),
        ("gemms:\n", ["2:1: gemms: has no value; write one, or remove the key"]),
        ("gemms: 5", ["1:8: gemms: must be a list, but is 5; start each item on a line with `- `"]),
        ("name: 5\ngemms: [{sizes: [[1, 2, 3]]}]", ["1:7: name: must be text, but is 5; put it in quotes"]),
        (
            f"gemms: [{{name: {'x' * 201}, sizes: [[1, 2, 3]]}}]",
            ["1:16: gemms[0].name: must have at most 200 characters; shorten it"],
        ),
        (
            "name: a\ngemms: [{sizes: [[1, 2, 3]]}]\nname: b\n",
            ["3:1: name: duplicate key, first set on line 1; keep one of the two"],
        ),
        (
            "1: 2\ngemms: [{sizes: [[1, 2, 3]]}]",
            ["1:1: '1': a key must be a word, but is '1'; write a key of the format"],
        ),
        (
            "gemms: [{sizes: [[1, 2, 3]], <<: {beta: 1}}]",
            ["1:30: gemms[0].'<<': merge keys are not part of YAML 1.2; repeat the keys, or put them in "
             "`defaults`"],
        ),
        (
            'gemms: [{sizes: [[1, 2, 3]], "new\\nline": 1}]',
            [f"1:30: gemms[0].'new\\nline': is not a key here; the keys are {KEYS}"],
        ),
        (
            'name: "\\ud800"\ngemms: [{sizes: [[1, 2, 3]]}]',
            ["1:7: name: must be text, but has half of a surrogate pair; write the character itself"],
        ),
        (
            "gemms: !!python/object/apply:os.system [ls]",
            ["1:8: gemms: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed; "
             "write a plain value"],
        ),
        ("gemms: &a [*a]", ["1:8: gemms[0]: an alias cannot contain itself; write the values out"]),
        ("gemms: *a", [f"1:8: yaml: found undefined alias 'a'; {AROUND}"]),
        (
            "gemms:\n\t- sizes: [[1, 2, 3]]\n",
            [f"2:1: yaml: while scanning for the next token: found character '\\t' that cannot start any "
             f"token; {AROUND}"],
        ),
        (
            "a: 1\n---\na: 1\n",
            [f"2:1: yaml: expected a single document in the stream: but found another document; {AROUND}"],
        ),
        ("a: b\x07", ["1:5: yaml: the character U+0007 is not allowed in YAML; remove it"]),
        (
            'gemms:\n- name: "\\U00110000"',
            ["2:10: yaml: the escape names no character; characters end at \\U0010FFFF"],
        ),
        (
            "- " * 1000,
            ["1:1: yaml: lists or mappings are nested too deeply; a spec has at most 8 levels"],
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_spec_is_refused(text: str, expected: list[str]) -> None:
    assert errors(text) == [f"s.yaml:{line}" for line in expected]


@pytest.mark.parametrize(
    ("gemm", "expected"),
    [
        # Names
        ("{sizes: [[1, 2, 3]], dtyp: f32}", "2:24: gemms[0].dtyp: is not a key here; did you mean `dtype`?"),
        ("{sizes: [[1, 2, 3]], zzz: 1}", f"2:24: gemms[0].zzz: is not a key here; the keys are {KEYS}"),
        (
            "{sizes: [{m: 1, n: 2, k: 3, wieght: 2}]}",
            "2:31: gemms[0].sizes[0].wieght: is not a key here; did you mean `weight`?",
        ),
        (
            "{sizes: [{m: {start: 1, end: 2, stop: 2, step: 1}, n: 2, k: 3}]}",
            "2:27: gemms[0].sizes[0].m.end: is not a key here; the keys are start, stop, step, factor",
        ),
        (
            "{sizes: [[1, 2, 3]], dtype: {a: f16, acc: f32}}",
            "2:40: gemms[0].dtype.acc: is not a key here; the keys are a, b, c, d, compute",
        ),
        (
            "{sizes: [[1, 2, 3]], epilogue: {activation: Relu}}",
            "2:47: gemms[0].epilogue.activation: must be one of none, relu, gelu, silu, but is 'Relu'; "
            "did you mean `relu`?",
        ),
        (
            "{sizes: [[1, 2, 3]], layout: fortran}",
            "2:32: gemms[0].layout: must be one of column, row, but is 'fortran'; choose one of them",
        ),
        # Kinds of values
        (
            "{sizes: [[1, 2, true]]}",
            "2:19: gemms[0].sizes[0][2]: must be a whole number, but is true; write one such as 1024",
        ),
        (
            "{sizes: [['1', 2, 3]]}",
            "2:13: gemms[0].sizes[0][0]: must be a whole number, but is '1'; write one such as 1024",
        ),
        (
            "{sizes: [[1e3, 2, 3]]}",
            "2:13: gemms[0].sizes[0][0]: must be a whole number, but is 1000.0; write one such as 1024",
        ),
        (
            "{sizes: [[1, 2, 3]], alpha: '2'}",
            "2:31: gemms[0].alpha: must be a number, but is '2'; write one such as 1.5",
        ),
        (
            "{sizes: [[1, 2, 3]], beta: true}",
            "2:30: gemms[0].beta: must be a number, but is true; write one such as 1.5",
        ),
        (
            "{sizes: [[1, 2, 3]], beta: .nan}",
            "2:30: gemms[0].beta: must be finite, but is nan; write a number such as 1.5",
        ),
        (
            "{sizes: [[1, 2, 3]], epilogue: {scale_a: 1}}",
            "2:44: gemms[0].epilogue.scale_a: must be true or false, but is 1; write one of the two",
        ),
        (
            "{sizes: [[1, 2, 3]], epilogue: {bias: 1}}",
            "2:41: gemms[0].epilogue.bias: must be true, false or the name of a type, but is 1; "
            "write one of them",
        ),
        (
            "{sizes: [[1, 2, 3]], dtype: [f32]}",
            "2:31: gemms[0].dtype: must be the name of a type or a mapping, but is a list; "
            "write f32 or {a: bf16, d: f32}",
        ),
        # Numbers
        (
            f"{{sizes: [[1, 2, 0x{'f' * 300}]]}}",
            "2:19: gemms[0].sizes[0][2]: must be at most 2147483647, but is about 10^361; lower it",
        ),
        (
            f"{{sizes: [[1, 2, {'9' * 5000}]]}}",
            f"2:19: gemms[0].sizes[0][2]: '{'9' * 56}... is not a valid int; correct it",
        ),
        (
            "{sizes: [{m: 1, n: 2, k: 3, stride_a: -1}]}",
            "2:41: gemms[0].sizes[0].stride_a: must be at least 0, but is -1; raise it",
        ),
        (
            "{sizes: [[1, 2, 3]], batch_count: 0}",
            "2:37: gemms[0].batch_count: must be at least 1, but is 0; raise it",
        ),
        # Ranges
        (
            "{sizes: [{m: {start: 1, stop: 2, step: 1, factor: 2}, n: 2, k: 3}]}",
            "2:16: gemms[0].sizes[0].m: must have either step or factor, but has both; give one",
        ),
        (
            "{sizes: [{m: {start: 1, stop: 2}, n: 2, k: 3}]}",
            "2:16: gemms[0].sizes[0].m: must have either step or factor, but has neither; give one",
        ),
        (
            "{sizes: [{m: {start: 1, stop: 2, factor: 1}, n: 2, k: 3}]}",
            "2:44: gemms[0].sizes[0].m.factor: must be at least 2, but is 1; raise it",
        ),
        (
            "{sizes: [{m: {start: 1, stop: 2147483647, step: 1}, n: 1, k: 1}]}",
            "2:12: gemms[0].sizes[0]: brings the spec to 2,147,483,647 problems, and 100,000 is the most; "
            "use fewer sizes, or split the spec",
        ),
        # Types and shapes that do not go together
        (
            "{sizes: [[1, 2, 3]], dtype: {a: f16, b: bf16}}",
            "2:43: gemms[0].dtype.b: cannot be bf16 where the other operand is f16; "
            "use one type, since only the fp8 types mix",
        ),
        (
            "{sizes: [[1, 2, 3]], dtype: i8, alpha: 0.5}",
            "2:42: gemms[0].alpha: must be a whole number for i8 operands, but is 0.5; scale after the GEMM",
        ),
        (
            "{sizes: [[1, 2, 3]], dtype: i8, epilogue: {activation: gelu}}",
            "2:58: gemms[0].epilogue.activation: must be none or relu for i8 operands, but is gelu; "
            "apply it after dequantizing",
        ),
        (
            "{sizes: [{m: [1, 9], n: 5, k: 6, lda: 8}]}",
            "2:41: gemms[0].sizes[0].lda: must be at least 9, the tight leading dimension, but is 8 at "
            "9x5x6; raise it to 9, or leave it out",
        ),
        (
            "{sizes: [{m: 4, n: 5, k: 6, batch_count: 2, stride_a: 3}]}",
            "2:57: gemms[0].sizes[0].stride_a: must be at least 24, the elements a matrix spans, but is 3 at "
            "4x5x6; raise it, set 0 to share one matrix, or leave it out",
        ),
        (
            "{sizes: [{m: 4, n: 5, k: 6, batch_count: 2, stride_d: 0}]}",
            "2:57: gemms[0].sizes[0].stride_d: must be at least 20, the elements a matrix spans, but is 0 at "
            "4x5x6; raise it, or leave it out",
        ),
    ],
)  # fmt: skip
def test_a_rule_is_stated_with_its_place_its_value_and_a_way_out(gemm: str, expected: str) -> None:
    assert error_in(gemm) == expected


def test_an_error_of_the_defaults_is_found_where_it_stands() -> None:
    (line,) = errors("defaults: {dtype: i8, beta: 0.5}\ngemms:\n- sizes: [[1, 2, 3]]\n- sizes: [[4, 5, 6]]\n")
    assert line.startswith("s.yaml:1:29: defaults.beta: must be a whole number for i8 operands, but is 0.5;")


def test_row_major_errors_name_what_the_user_wrote() -> None:
    # The row-major A [4, 6] has rows of 6 elements, and becomes the column-major operand B.
    assert error_in("{layout: row, sizes: [{m: 4, n: 5, k: 6, lda: 5}]}") == (
        "2:49: gemms[0].sizes[0].lda: must be at least 6, the tight leading dimension, but is 5 at 4x5x6; "
        "raise it to 6, or leave it out"
    )
    assert error_in("{layout: row, sizes: [[1, 2, 3]], dtype: {a: f16, b: i32}}").startswith(
        "2:56: gemms[0].dtype.b: cannot be i32, which is for results alone;"
    )


# Files


def test_a_file_that_cannot_be_read_is_an_error_of_the_file(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(SpecError) as error:
            load_spec(path)
        return str(error.value).removeprefix(str(path))

    assert error(tmp_path / "none.yaml") == ":1:1: file: does not exist; check the path"
    assert error(tmp_path) == ":1:1: file: is a directory; name one of the YAML files in it"
    path = tmp_path / "latin1.yaml"
    path.write_bytes("name: x\n# größe\n".encode("latin-1"))
    assert error(path) == ":2:5: file: the byte 0xf6 is not UTF-8; save the file as UTF-8"
    path.write_bytes(b"#" * (4 * 2**20 + 1))
    assert error(path) == ":1:1: file: is larger than 4 MiB; write ranges, or split it into several specs"


def test_a_spec_is_named_by_itself_or_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "decoding.yaml"
    path.write_text("\ufeffgemms: [{sizes: [[1, 2, 3]]}]\r\n", "utf-8")
    assert load_spec(path).name == "decoding"
    path.write_text("name: größe\ngemms: [{sizes: [[1, 2, 3]]}]\n", "utf-8")
    assert load_spec(path).name == "größe"


def test_aliases_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "MAX_VALUES", 1000)  # the true limit takes seconds to reach
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1]"]
    for last, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{last}'] * 8)}]")
    assert errors("\n".join(lines)) == [
        "s.yaml:4:4: d: brings the file to more than 1,000 values, aliases written out; use fewer"
    ]


# What loads


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("7", [7]),
        ("[3, 1, 2]", [3, 1, 2]),
        ("{start: 2, stop: 9, step: 3}", [2, 5, 8]),
        ("{start: 2, stop: 8, step: 3}", [2, 5, 8]),
        ("{start: 4, stop: 4, step: 1}", [4]),
        ("{start: 3, stop: 24, factor: 2}", [3, 6, 12, 24]),
        ("{start: 3, stop: 23, factor: 2}", [3, 6, 12]),
        ("{start: 1, stop: 2147483647, factor: 2147483647}", [1, 2147483647]),
    ],
)
def test_an_axis_is_a_size_a_list_or_a_range(axis: str, expected: list[int]) -> None:
    assert sizes(f"{{m: {axis}, n: 5, k: 6}}") == [(m, 5, 6) for m in expected]


def test_a_grid_is_every_combination_in_order() -> None:
    assert sizes("{m: [1, 2], n: {start: 3, stop: 4, step: 1}, k: [5, 6]}") == [
        (m, n, k) for m in (1, 2) for n in (3, 4) for k in (5, 6)
    ]


def test_a_size_written_twice_is_one_problem_with_both_weights() -> None:
    spec = load("""
gemms:
  - sizes: [[1, 2, 3], {m: [1, 4], n: 2, k: 3, weight: 2.5}]
  - sizes: [{m: 1, n: 2, k: 3, lda: 1}, {m: 1, n: 2, k: 3, lda: 9}]
""")
    assert [(w.problem.m, w.problem.lda, w.weight) for w in spec.workload] == [
        (1, 1, 4.5),  # a leading dimension that is written but tight makes no difference
        (4, 4, 2.5),
        (1, 9, 1.0),
    ]


def test_a_gemm_overrides_the_defaults_key_by_key() -> None:
    first, second = load("""
defaults: {dtype: bf16, trans: TN, beta: 0.5, epilogue: {bias: f32, activation: relu}}
gemms:
  - sizes: [[1, 2, 3]]
  - {trans: NN, epilogue: {activation: gelu}, sizes: [[1, 2, 3]]}
""").problems
    assert (first.type.trans_a, first.beta, first.type.dtype_d) == (Transpose.T, 0.5, DType.BF16)
    assert first.type.epilogue == Epilogue(bias=DType.F32, activation=Activation.RELU)
    assert (second.type.trans_a, second.beta, second.type.dtype_d) == (Transpose.N, 0.5, DType.BF16)
    assert second.type.epilogue == Epilogue(activation=Activation.GELU)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("f32", "f32 f32 f32 f32 f32"),
        ("f64", "f64 f64 f64 f64 f64"),
        ("bf16", "bf16 bf16 bf16 bf16 f32"),
        ("i8", "i8 i8 i32 i32 i32"),
        ("fp8_e4m3", "fp8_e4m3 fp8_e4m3 bf16 bf16 f32"),
        ("{a: f16, d: f32}", "f16 f16 f32 f32 f32"),
        ("{a: fp8_e5m2, b: fp8_e4m3, d: f16, c: f32}", "fp8_e5m2 fp8_e4m3 f32 f16 f32"),
        ("{a: f32, compute: f64}", "f32 f32 f32 f32 f64"),
    ],
)
def test_element_types_that_are_left_out_are_the_usual_ones(dtype: str, expected: str) -> None:
    type = one(f"sizes: [[1, 2, 3]], dtype: {dtype}").type
    assert f"{type.dtype_a} {type.dtype_b} {type.dtype_c} {type.dtype_d} {type.compute}" == expected


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"),
    [
        ("f32", "true", DType.F32),
        ("f32", "false", None),
        ("bf16", "f32", DType.F32),
        ("{a: fp8_e4m3, d: fp8_e4m3}", "true", DType.BF16),
        ("i8", "true", DType.I32),
    ],
)
def test_bias_is_a_switch_or_a_type(dtype: str, bias: str, expected: DType | None) -> None:
    assert (
        one(f"sizes: [[1, 2, 3]], dtype: {dtype}, epilogue: {{bias: {bias}}}").type.epilogue.bias is expected
    )


def test_a_row_major_product_is_the_column_major_one_with_operands_swapped() -> None:
    # y = x W with x [8, 512] and W [512, 1024] becomes y^T = W^T x^T, whose operands need no transpose.
    problem = one("layout: row, sizes: [[8, 1024, 512]]")
    assert (problem.m, problem.n, problem.k) == (1024, 8, 512)
    assert (problem.type.trans_a, problem.type.trans_b) == (Transpose.N, Transpose.N)
    assert (problem.lda, problem.ldb, problem.ldd) == (1024, 512, 1024)


@given(
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    *[st.integers(1, 5)] * 4,
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_row_major_spec_is_what_numpy_computes(
    trans: str, m: int, n: int, k: int, batch: int, pad: list[int], bias: bool
) -> None:
    """Row-major arrays, laid out and multiplied by NumPy, against the problem that the spec makes of them."""
    rng = np.random.default_rng(1)

    def array(rows: int, columns: int, padding: int) -> np.ndarray:
        whole = rng.integers(-8, 9, (batch, rows, columns + padding)).astype(np.float32)
        return whole[:, :, :columns]

    a = array(*((m, k) if trans[0] == "N" else (k, m)), pad[0])
    b = array(*((k, n) if trans[1] == "N" else (n, k)), pad[1])
    c, d = array(m, n, pad[2]), array(m, n, pad[3])
    x, w = (a if trans[0] == "N" else a.swapaxes(1, 2)), (b if trans[1] == "N" else b.swapaxes(1, 2))
    vector = rng.integers(-8, 9, n).astype(np.float32)
    d[...] = np.maximum(2 * (x @ w) + 3 * c + (vector if bias else 0), 0)

    lds = ", ".join(f"ld{name}: {v.strides[1] // 4}" for name, v in zip("abcd", (a, b, c, d), strict=True))
    problem = one(
        f"layout: row, trans: {trans}, alpha: 2, beta: 3, epilogue: {{bias: {json.dumps(bias)}, activation: "
        f"relu}}, sizes: [{{m: {m}, n: {n}, k: {k}, batch_count: {batch}, {lds}}}]"
    )
    # The row-major A is the operand B of the column-major problem, and the other way round.
    memory = {"a": b.base.reshape(-1), "b": a.base.reshape(-1), "c": c.base.reshape(-1)}
    result = reference(Operands(problem, memory | ({"bias": vector} if bias else {}), exact=True)).values
    assert np.array_equal(result, matrices(problem, "d", d.base.reshape(-1)))


def test_everything_of_a_row_major_operand_moves_with_it() -> None:
    problem = one(
        "layout: row, trans: NT, dtype: {a: fp8_e4m3, b: fp8_e5m2, d: f16}, batch_count: 2, "
        "epilogue: {scale_a: true}, "
        "sizes: [{m: 8, n: 16, k: 32, lda: 40, ldb: 50, ldc: 60, ldd: 70, stride_a: 0, stride_b: 900}]"
    )
    assert (problem.m, problem.n, problem.k, problem.batch_count) == (16, 8, 32, 2)
    type = problem.type
    assert (type.trans_a, type.trans_b) == (Transpose.T, Transpose.N)
    assert (type.dtype_a, type.dtype_b) == (DType.FP8_E5M2, DType.FP8_E4M3)
    assert (type.epilogue.scale_a, type.epilogue.scale_b) == (False, True)
    assert (problem.lda, problem.ldb, problem.ldc, problem.ldd) == (50, 40, 60, 70)
    assert (problem.stride_a, problem.stride_b) == (900, 0)


def test_anchors_are_copied() -> None:
    assert sizes("{m: &s [1, 2], n: *s, k: 5}") == [(1, 1, 5), (1, 2, 5), (2, 1, 5), (2, 2, 5)]


def test_the_largest_spec_loads() -> None:
    axis = "{start: 1, stop: 100, step: 1}"
    assert len(load(f"gemms: [{{sizes: [{{m: {axis}, n: 1, k: [1, 2]}}]}}]").problems) == 200
    (line,) = errors(f"gemms: [{{sizes: [{{m: {axis}, n: {axis}, k: 1}}, {{m: {axis}, n: {axis}, k: "
                     "{start: 1, stop: 10, step: 1}}]}]")  # fmt: skip
    assert "brings the spec to 110,000 problems" in line


# Any text at all

_WORDS = [
    "name", "defaults", "gemms", "sizes", "dtype", "epilogue", "bias", "layout", "row", "trans", "m", "n",
    "k", "start", "stop", "step", "factor", "batch_count", "alpha", "weight", "lda", "f32", "i8", "true",
    "null", "~", "1", "0", "-1", "1.5", ".inf", ".nan", "1e400", "0x10", "9" * 20, "2020-01-01", "''",
    '"\\ud800"', '"\\U00110000"', "<<", "=", "&a", "*a", "!!int", "!!float", "!!bool", "!!str", "!x",
    "%YAML 1.1", "---", "...", "[", "]", "{", "}", ": ", ", ", "- ", "? ", "|", ">", "#", "\n", "\n  ",
    "\t", "\r", "\x85", "\u2028", "\x00",
]  # fmt: skip
_GOOD = (ROOT / "problem_specs" / "quickstart.yaml").read_text()


@st.composite
def _damaged(draw: st.DrawFn) -> str:
    text = _GOOD
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + draw(st.sampled_from(["", *_WORDS])) + text[stop:]
    return text


@given(st.text(max_size=80) | st.lists(st.sampled_from(_WORDS), max_size=40).map("".join) | _damaged())
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_spec_or_has_located_errors(text: str) -> None:
    try:
        spec = loads_spec(text, "s.yaml")
    except SpecError as error:
        for line in str(error).split("\n"):
            assert re.fullmatch(r"s\.yaml:[1-9]\d*:[1-9]\d*: .+: .+", line), line
    else:
        assert spec.problems


# The schema and the specs that come with wavetune


def test_the_published_schema_is_the_format() -> None:
    assert json.loads((ROOT / "problem_specs" / "schema.json").read_text()) == spec_schema()


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_specs_of_the_repository_load_and_match_the_schema(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(YAML(typ="safe", pure=True).load(path.read_text()), spec_schema())
    assert load_spec(path).problems


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"gemms": []},
        {"gemms": [{"sizes": [[1, 2]]}]},
        {"gemms": [{"sizes": [[1, 2, True]]}]},
        {"gemms": [{"sizes": [[1, 2, 3]], "dtyp": "f32"}]},
        {"gemms": [{"sizes": [[1, 2, 3]], "dtype": None}]},
        {"gemms": [{"sizes": [[1, 2, 3]], "epilogue": {"bias": "f8"}}]},
        {"gemms": [{"sizes": [{"m": 0, "n": 2, "k": 3}]}]},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(document: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, spec_schema())
    with pytest.raises(SpecError):
        load(json.dumps(document))


# The documentation

GUIDE = (ROOT / "docs" / "spec.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def test_the_examples_of_the_guide_load() -> None:
    decoder, row, column, _ = BLOCKS
    assert [len(load(text).problems) for text in (decoder, row, column)] == [11, 1, 1]
    assert load(row).problems == load(column).problems


def test_the_errors_of_the_guide_are_the_true_ones() -> None:
    (shown,) = re.findall(r"```console\n(.*?)\n```", GUIDE, re.DOTALL)
    with pytest.raises(SpecError) as error:
        loads_spec(BLOCKS[-1], "mlp.yaml")
    told = [f"tuner: {line}" for line in str(error.value).split("\n")]
    assert shown.split("\n") == ["$ tuner tune mlp.yaml", *told]


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("The file", ""),
        ("A GEMM", "Gemm"),
        ("A grid of sizes", "Grid"),
        ("A range", "Range"),
        ("Element types", "Dtypes"),
        ("An epilogue", "EpilogueSettings"),
    ],
)
def test_the_guide_has_every_key_with_its_default(section: str, model: str) -> None:
    schema = spec_schema()["$defs"][model] if model else spec_schema()
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    documented = {}
    for keys, default in re.findall(r"^\| (`.*?) \| .* \| (.*)\|$", text, re.MULTILINE):
        documented |= dict.fromkeys(re.findall(r"`(\w+)`", keys), default.strip())
    assert documented.keys() == schema["properties"].keys()
    for key, default in documented.items():
        assert (default == "required") == (key in schema.get("required", [])), key
        if "default" in schema["properties"][key]:
            value = schema["properties"][key]["default"]
            assert default == f"`{value if isinstance(value, str) else json.dumps(value)}`", key
