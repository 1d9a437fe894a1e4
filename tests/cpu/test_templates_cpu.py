"""The CPU templates: right for every type, layout and epilogue, with defaults and a space everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.build import Binary, BuildCache, host_toolchain
from tuner.device import open_device
from tuner.generate import Candidate, Space, Target, Template, find_templates, render
from tuner.measure import Outcome, Protocol, Supervisor
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType, Transpose

THREADS = 2
TEMPLATES = {t.name: t for t in find_templates("cpu") if t.name.startswith("gemm_cpu")}


def kind(
    trans: str, operand: DType, result: DType, compute: DType, epilogue: Epilogue | None = None
) -> ProblemType:
    trans_a, trans_b = map(Transpose, trans)
    return ProblemType(trans_a, trans_b, operand, operand, result, result, compute, epilogue or Epilogue())


F64, F32, F16, BF16, I8, I32 = DType.F64, DType.F32, DType.F16, DType.BF16, DType.I8, DType.I32
# Each kind of conversion, over all transposes and all parts of the epilogue.
TYPES = [
    kind("NN", F32, F32, F32),
    kind("TN", F32, F32, F32, Epilogue(bias=F32, activation=Activation.GELU)),
    kind("NT", F32, F32, F32, Epilogue(scale_a=True, scale_alpha_vec=True)),
    kind("TT", F64, F64, F64, Epilogue(activation=Activation.SILU)),
    kind("NN", F16, F16, F32, Epilogue(bias=F16, scale_b=True)),
    kind("TN", BF16, BF16, F32, Epilogue(activation=Activation.RELU)),
    kind("NT", BF16, F32, F32),
    kind("NN", I8, I32, I32),
    kind("TT", I8, I32, I32, Epilogue(bias=I32, activation=Activation.RELU, scale_alpha_vec=True)),
]
# gemm_cpu_skinny serves each of them; the battery of the validator adds twelve small problems to each.
SIZES = [(200, 40, 300), (40, 300, 150)]
PER_TYPE = 2


def target(arch: str, simd_bytes: int, simd_registers: int, fma: int = 1, compute_units: int = 2) -> Target:
    facts = {
        "simd_bytes": simd_bytes,
        "simd_registers": simd_registers,
        "fma": fma,
        "l1_bytes": 32 << 10,
        "l2_bytes": 1 << 20,
        "l3_bytes": 32 << 20,
        "compute_units": compute_units,
    }
    return Target("cpu", arch, tuple(facts.items()))


TARGETS = {
    "v4": target("x86_64-v4", 64, 32),
    "v3": target("x86_64-v3", 32, 16, compute_units=1),
    "v2": target("x86_64-v2", 16, 16, fma=0),
    "aarch64": target("aarch64", 16, 32, compute_units=8),
}


def sample() -> Iterator[tuple[Template, GemmProblem, Candidate]]:
    """Random candidates, the same in every run, of each template for each type."""
    device = open_device("cpu", THREADS).target
    rng = random.Random(7)
    for template in TEMPLATES.values():
        for index, type in enumerate(TYPES):
            shared = {"stride_b": 0} if index % 2 else {}
            problem = GemmProblem.create(
                type, *SIZES[index % 2], batch_count=1 + index % 3, beta=float(index % 2), **shared
            )
            space = Space.enumerate(template, problem, device)
            for row in [space.default_row, *rng.sample(range(len(space)), PER_TYPE - 1)]:
                yield template, problem, space.candidate(row)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """(what was measured, what was wrong with it) of each of the sample."""
    chosen = list(sample())
    device = open_device("cpu", THREADS).target
    cache = BuildCache(Path(tmp_path_factory.mktemp("cache")))
    sources = [render(template, candidate, problem.type, device) for template, problem, candidate in chosen]
    binaries = cache.build_many(sources, device, host_toolchain(), jobs=2)
    results = []
    protocol = Protocol(cold=False, min_samples=1, max_samples=1, max_seconds=0.001)
    with Supervisor("cpu", THREADS, protocol) as supervisor:
        for (_, problem, candidate), binary in zip(chosen, binaries, strict=True):
            what = f"{problem.name} {candidate.name}"
            if not isinstance(binary, Binary):
                results.append((what, binary.message))
                continue
            supervisor.prepare(problem)
            measurement = supervisor.measure(binary)
            wrong = (
                "" if measurement.outcome is Outcome.OK else f"{measurement.outcome}: {measurement.message}"
            )
            results.append((what, wrong))
    return results


def test_random_candidates_are_right(outcomes: list[tuple[str, str]]) -> None:
    assert len(outcomes) == PER_TYPE * len(TYPES) * len(TEMPLATES) >= 30
    assert [pair for pair in outcomes if pair[1]] == []


@pytest.mark.parametrize(
    "size", [(1, 1, 1), (3, 4, 5), (1, 4096, 4096), (64, 50257, 768), (2048, 2048, 2048)]
)
@pytest.mark.parametrize("arch", TARGETS)
def test_there_is_a_default_on_every_target(arch: str, size: tuple[int, int, int]) -> None:
    for type in TYPES:
        for template in TEMPLATES.values():
            space = Space.enumerate(template, GemmProblem.create(type, *size), TARGETS[arch])
            if template.name == "gemm_cpu" or min(size[:2]) <= 64:
                params = space.params(space.default_row)
                assert params in template.defaults
            else:
                assert len(space) == 0  # not skinny: nothing to stream past


def test_the_space_is_large_and_says_what_it_leaves_out() -> None:
    problem = GemmProblem.create(ProblemType(), 512, 512, 512)
    space = Space.enumerate(TEMPLATES["gemm_cpu"], problem, TARGETS["v4"])
    assert len(space) >= 10_000
    assert {r.kind for r in space.rejections} == {"legal", "prune"}
    assert all(r.reason for r in space.rejections)
    assert len(space) + sum(r.count for r in space.rejections) == space.raw_size


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rendered_kernel_stands_alone(name: str) -> None:
    problem = GemmProblem.create(ProblemType(), 512, 32, 512)
    space = Space.enumerate(TEMPLATES[name], problem, TARGETS["v4"])
    candidate = space.candidate(space.default_row)
    text = render(TEMPLATES[name], candidate, problem.type, TARGETS["v4"]).text
    includes = {line.split()[1] for line in text.splitlines() if line.startswith("#include")}
    assert includes <= {"<stdint.h>", "<string.h>", "<math.h>", "<immintrin.h>"}
    assert text.startswith(f"/* {candidate.name}\n")
