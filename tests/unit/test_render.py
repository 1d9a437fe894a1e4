"""Rendering: sources are a function of the candidate, and templates stay in their sandbox."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.errors import TemplateError
from tuner.generate import KernelSource, Space, Target, find_templates, load_template, render
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType

FACTS = {"simd_bytes": 32, "simd_registers": 16, "fma": 1, "compute_units": 2}
CACHES = {"l1_bytes": 2**15, "l2_bytes": 2**20, "l3_bytes": 2**25}
CPU = Target("cpu", "x86_64-v3", tuple({**FACTS, **CACHES}.items()))
DESCRIPTION = """\
name: plain
kind: cpu
language: c
kernel: kernel.c.j2
summary: A plain GEMM.
parameters:
  tile: {values: [1, 2, 4], doc: Rows.}
derived: {half: tile / 2, wide: tile > 1}
estimate_ns: 1
defaults: [tile: 2]
"""
Rendered = Callable[[str], KernelSource]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    path.mkdir()
    (path / "template.yaml").write_text(DESCRIPTION)
    return path


@pytest.fixture
def rendered(folder: Path) -> Rendered:
    """Render a template text."""

    def rendered(text: str) -> KernelSource:
        (folder / "kernel.c.j2").write_text(text)
        template = load_template(folder)
        return render(template, template.candidate({"tile": 2}), ProblemType(), CPU)

    return rendered


def test_a_template_sees_parameters_problem_and_target(rendered: Rendered) -> None:
    text = "{{ tile }} {{ half }} {{ wide }} {{ problem.dtype_a }} {{ target.arch }} {{ symbol }}\n"
    source = rendered(text)
    assert source.text == "2 1.0 True f32 x86_64-v3 plain_tile2_f32_nn\n"
    assert source.symbol == "plain_tile2_f32_nn"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ symbol.__class__.__base__.__subclasses__() }}",
        "{{ problem.__init__.__globals__ }}",
        "{{ problem.name.__func__ }}",
        "{{ candidate.__dict__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(problem) }}",
        "{{ ['x'].append('y') }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ 'x' + 1 }}",
        "{{ candidate.from_dict({}) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'plain/kernel.c.j2' %}",
        "{{ undefined_name }}",
        "{{ problem.undefined_name }}",
        "{% if undefined_name %}{% endif %}",
        "{% nonsense %}",
        "{{ tile",
        "{% include '../secret.txt' %}",
        "{% include 'plain/../../secret.txt' %}",
        "{% include 'secret.txt' %}",
        "{% include 'other/secret.txt' %}",
        "{% include '/etc/passwd' %}",
        "{% include 'common/../../secret.txt' %}",
    ],
)
def test_what_leaves_the_sandbox_or_fails_is_a_template_error(
    rendered: Rendered, folder: Path, text: str
) -> None:
    (folder.parent / "secret.txt").write_text("secret")
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "secret.txt").write_text("secret")
    with pytest.raises(TemplateError) as error:
        rendered(text)
    assert "kernel.c.j2:1: cannot render plain_tile2: " in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_is_located_in_the_file_that_has_it(rendered: Rendered, folder: Path) -> None:
    (folder / "part.j2").write_text("\n\n{{ nothing }}")
    with pytest.raises(TemplateError, match=r"part\.j2:3: cannot render plain_tile2: 'nothing' is undefined"):
        rendered("\n{% include 'plain/part.j2' %}")
    (folder / "part.j2").write_text("\n{% if %}")
    with pytest.raises(TemplateError, match=r"part\.j2:2: cannot render"):
        rendered("\n{% include 'plain/part.j2' %}")


def test_an_endless_source_is_cut_off(rendered: Rendered) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="plain: the source exceeds 4,194,304 characters"):
        rendered(loop)


def test_common_files_come_from_beside_the_template_or_from_wavetune(
    rendered: Rendered, folder: Path
) -> None:
    (folder.parent / "common").mkdir()
    (folder.parent / "common" / "types.j2").write_text("mine")
    assert rendered("{% include 'common/types.j2' %} ").text == "mine "
    assert "tuner_gemm_args" in rendered("{% include 'common/gemm_abi.h' %}").text


TYPES = [
    ProblemType(),
    ProblemType(dtype_a=DType.BF16, dtype_b=DType.BF16, dtype_c=DType.BF16, dtype_d=DType.BF16,
                epilogue=Epilogue(bias=DType.F32, activation=Activation.GELU, scale_a=True)),
]  # fmt: skip


def _sources() -> list[KernelSource]:
    sources = []
    for template in find_templates("cpu"):
        for type in TYPES:
            space = Space.enumerate(template, GemmProblem.create(type, 40, 96, 64), CPU)
            for row in range(0, len(space), 1 + len(space) // 3):
                sources.append(render(template, space.candidate(row), type, CPU))
    return sources


def test_sources_are_the_same_in_every_process() -> None:
    code = "import runpy; [print(s.id) for s in runpy.run_path('tests/unit/test_render.py')['_sources']()]"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    sources = _sources()
    assert len(sources) > 8
    assert result.stdout.split() == [source.id for source in sources]


def test_symbols_are_c_identifiers_and_differ() -> None:
    sources = _sources()
    assert all(re.fullmatch(r"[A-Za-z_]\w*", source.symbol, re.ASCII) for source in sources)
    assert len({source.symbol for source in sources}) == len(sources)
    assert all(f"{source.symbol}_workspace" in source.text for source in sources)
