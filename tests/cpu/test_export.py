"""Exported libraries: written, loaded, called from Python and C, and kept whole whatever happens."""

from __future__ import annotations

import ctypes
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tuner
from tuner.build import BuildCache, HostToolchain, host_toolchain
from tuner.device import open_device
from tuner.errors import LibraryError
from tuner.export import Export, Library, export_library, verify
from tuner.generate import Candidate, KernelSource, Target, find_templates, render
from tuner.measure import Protocol
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType, Transpose, loads_spec
from tuner.store import Winner

ROOT = Path(__file__).parents[2]
THREADS = 2
F32 = ProblemType()
SMALL = {"mv": 1, "nr": 4, "kc": 64, "mc": 48, "nc": 96, "unroll": 1}  # quick to compile


def of(dtype: DType, result: DType, compute: DType) -> ProblemType:
    return ProblemType(dtype_a=dtype, dtype_b=dtype, dtype_c=result, dtype_d=result, compute=compute)


I8 = of(DType.I8, DType.I32, DType.I32)
BIAS = replace(F32, epilogue=Epilogue(bias=DType.F32))
BIAS_GELU = replace(F32, epilogue=Epilogue(bias=DType.F32, activation=Activation.GELU))


class Workshop:
    """What exports need: a device, its compiler, and winners as a sweep would leave them."""

    def __init__(self, toolchain: HostToolchain, cache: BuildCache) -> None:
        device = open_device("cpu", THREADS)
        self.toolchain, self.cache, self.target = toolchain, cache, device.target
        self.fingerprint = replace(device.fingerprint, toolchain=toolchain.id)

    def winner(self, problem: GemmProblem, template: str = "gemm_cpu", **params: Any) -> Winner:
        chosen = next(t for t in find_templates("cpu") if t.name == template)
        base = SMALL if template == "gemm_cpu" else {}
        candidate = chosen.candidate({**chosen.defaults[0], **base, **params})
        return self.wrap(problem, render(chosen, candidate, problem.type, self.target))

    def probe(self, problem: GemmProblem, symbol: str, body: str, workspace: str = "0") -> Winner:
        """A kernel that does what `body` says on rank 0, and asks for `workspace` bytes."""
        abi = (ROOT / "kernel_templates/common/gemm_abi.h").read_text()
        text = (
            f"{abi}\n"
            f"int64_t {symbol}_workspace(const tuner_gemm_args *g, int team_size) {{ return {workspace}; }}\n"
            f"void {symbol}(const tuner_gemm_args *g, tuner_team *team, int rank) {{\n"
            f"    float *d = g->d;\n    if (rank == 0) {{ {body} }}\n}}\n"
        )
        candidate = Candidate("probe", "0", (("name", symbol),), symbol)
        return self.wrap(problem, KernelSource(candidate, problem.type, "c", symbol, text))

    def wrap(self, problem: GemmProblem, source: KernelSource) -> Winner:
        return Winner(
            problem=problem,
            fingerprint=self.fingerprint,
            protocol=Protocol(),
            candidate=source.candidate,
            source=source,
            binary_sha256="0" * 64,
            trial_id=1,
            time_ns=1000.0,
            ci_low_ns=990.0,
            ci_high_ns=1010.0,
            default_ns=None,
            decided_at=datetime(2026, 1, 2, tzinfo=UTC),
        )

    def export(self, winners: Sequence[Winner], folder: Path, **options: Any) -> Export:
        options = {"cache": self.cache, **options}
        return export_library(winners, folder, self.toolchain, self.target, **options)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(host_toolchain(), BuildCache(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def exported(shop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with kernels of the real templates for many types."""
    create = GemmProblem.create
    winners = [
        shop.winner(create(F32, 64, 64, 64)),
        shop.winner(create(F32, 8, 8, 500), split="k"),
        shop.winner(create(F32, 1, 256, 256), "gemm_cpu_skinny", axis="n"),
        shop.winner(create(replace(F32, trans_a=Transpose.T), 64, 64, 64)),
        shop.winner(create(replace(F32, trans_b=Transpose.T), 64, 64, 64)),
        shop.winner(create(BIAS, 64, 64, 64)),
        shop.winner(create(BIAS_GELU, 64, 64, 64)),
        shop.winner(create(of(DType.F64, DType.F64, DType.F64), 64, 64, 64)),
        shop.winner(create(of(DType.F16, DType.F16, DType.F32), 64, 64, 64)),
        shop.winner(create(of(DType.BF16, DType.BF16, DType.F32), 64, 64, 64)),
        shop.winner(create(I8, 64, 64, 64)),
    ]
    folder = tmp_path_factory.mktemp("exported") / "tuned"
    result = shop.export(winners, folder)
    assert (result.path, result.kernels, result.problems) == (folder, 11, 11)
    assert result.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return folder


@pytest.fixture(scope="module")
def library(exported: Path) -> Iterator[Library]:
    with tuner.load(exported, threads=THREADS) as library:
        yield library


def whole(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Small whole numbers, whose sums of products are exact in every type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(LibraryError) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# What the library computes, from Python.

SIZES = [(64, 64, 64), (8, 8, 500), (256, 1, 256), (1, 1, 1), (37, 53, 71), (1, 300, 7), (5, 4, 0), (0, 3, 4)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_numpy(library: Library, size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b = whole((m, k)), whole((k, n), seed=1)
    np.testing.assert_array_equal(library.gemm(a, b), a @ b)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8])
def test_element_types(library: Library, dtype: Any) -> None:
    a, b = whole((20, 6), dtype), whole((6, 30), dtype, seed=1)
    d = library.gemm(a, b)
    assert d.dtype == (np.int32 if dtype is np.int8 else dtype)
    np.testing.assert_array_equal(d.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64))


def views(shape: tuple[int, int]) -> dict[str, Any]:
    """The same matrix, lying in memory in different ways."""
    m, n = shape
    plain = whole(shape)
    padded, by_column = np.zeros((m, n + 3), np.float32), np.zeros((n, m + 2), np.float32)
    spread, reversed_ = np.zeros((m, 2 * n), np.float32), plain[::-1].copy()
    padded[:, :n], by_column[:, :m], spread[:, ::2] = plain, plain.T, plain
    unaligned = np.frombuffer(b"\0" + plain.tobytes(), np.uint8)[1:].view(np.float32).reshape(shape)
    return {
        "rows": plain,
        "columns": np.asfortranarray(plain),
        "padded rows": padded[:, :n],
        "padded columns": by_column[:, :m].T,
        "every other": spread[:, ::2],
        "reversed": reversed_[::-1],
        "unaligned": unaligned,
    }


@pytest.mark.parametrize("lies_a", views((1, 1)))
@pytest.mark.parametrize("lies_b", views((1, 1)))
def test_operands_may_lie_in_any_way(library: Library, lies_a: str, lies_b: str) -> None:
    a, b = views((33, 21))[lies_a], views((21, 45))[lies_b]
    np.testing.assert_array_equal(library.gemm(a, b), np.ascontiguousarray(a) @ np.ascontiguousarray(b))


@pytest.mark.parametrize("lies", ["rows", "columns", "padded rows", "padded columns"])
def test_contiguous_operands_are_not_copied(library: Library, lies: str) -> None:
    a, b = views((1000, 500))[lies], whole((500, 4))
    out = np.empty((1000, 4), np.float32)
    library.gemm(a, b, out=out)
    tracemalloc.start()
    library.gemm(a, b, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < a.nbytes / 10


def test_an_operand_is_copied_where_there_is_no_kernel_for_its_transpose(library: Library) -> None:
    a, b = whole((20, 6), np.float64), whole((30, 6), np.float64, seed=1)
    np.testing.assert_array_equal(library.gemm(a, b.T), a @ b.T)


@pytest.mark.parametrize("shapes", [((3, 5, 7), (3, 7, 9)), ((5, 7), (3, 7, 9)), ((3, 5, 7), (7, 9))])
def test_batches(library: Library, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = whole(shapes[0]), whole(shapes[1], seed=1)
    np.testing.assert_array_equal(library.gemm(a, b), a @ b)


@pytest.mark.parametrize("lies", ["rows", "columns", "shared"])
def test_c_of_a_batch_may_lie_in_any_way(library: Library, lies: str) -> None:
    a, b, c = whole((3, 5, 7)), whole((7, 9), seed=1), whole((3, 5, 9), seed=2)
    if lies == "columns":
        c = np.zeros((3, 20, 5), np.float32)[:, :9].swapaxes(1, 2)
        c[:] = whole((3, 5, 9), seed=2)
    elif lies == "shared":
        c = np.broadcast_to(c[:1], c.shape)
    np.testing.assert_array_equal(library.gemm(a, b, c=c, beta=2.0), a @ b + 2 * c)


def test_a_batch_of_overlapping_windows(library: Library) -> None:
    a = np.lib.stride_tricks.sliding_window_view(whole((20,)), 8).reshape(13, 1, 8)
    b = whole((8, 4))
    np.testing.assert_array_equal(library.gemm(a, b), a @ b)


def test_scalars_and_c(library: Library) -> None:
    a, b, c = whole((12, 7)), whole((7, 9), seed=1), whole((12, 9), seed=2)
    np.testing.assert_array_equal(library.gemm(a, b, c=c, alpha=2.0, beta=-3.0), 2 * (a @ b) - 3 * c)
    np.testing.assert_array_equal(library.gemm(a, b, c=c.T.copy().T, beta=1.0), a @ b + c)
    out = c.copy()
    assert library.gemm(a, b, c=out, beta=1.0, out=out) is out
    np.testing.assert_array_equal(out, a @ b + c)


def test_c_is_not_read_where_beta_is_0(library: Library) -> None:
    a, b = whole((12, 7)), whole((7, 9), seed=1)
    np.testing.assert_array_equal(library.gemm(a, b, c=np.full((12, 9), np.nan, np.float32)), a @ b)


@pytest.mark.parametrize("k", [0, 5])
def test_a_product_of_nothing_leaves_c_and_bias(library: Library, k: int) -> None:
    a, b = np.full((6, k), np.nan, np.float32), np.full((k, 4), np.nan, np.float32)
    c, bias = whole((6, 4)), whole((4,))
    nan = np.full((64, 64), np.nan, np.float32)
    library.gemm(nan, nan, bias=nan[0])  # leaves a workspace that is full of them
    np.testing.assert_array_equal(
        library.gemm(a, b, c=c, alpha=0.0 if k else np.inf, beta=2.0, bias=bias), 2 * c + bias
    )


def test_bias_belongs_to_columns_and_activation_comes_last(library: Library) -> None:
    a, b, bias = whole((12, 7)), whole((7, 9), seed=1), whole((9,), seed=2)
    np.testing.assert_array_equal(library.gemm(a, b, bias=bias), a @ b + bias)
    spread = np.zeros(18, np.float32)
    spread[::2] = bias
    x = (a @ b + bias).astype(np.float64) / 8
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    d = library.gemm(a / 8, b, bias=spread[::2] / 8, activation="gelu")
    np.testing.assert_allclose(d, gelu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lies", ["rows", "columns", "padded rows", "padded columns", "every other"])
def test_out_may_lie_in_any_way(library: Library, lies: str, with_bias: bool) -> None:
    a, b, c, out = whole((12, 7)), whole((7, 9), seed=1), whole((12, 9), seed=3), views((12, 9))[lies]
    bias = whole((9,), seed=2) if with_bias else None
    assert library.gemm(a, b, c=c, beta=1.0, bias=bias, out=out) is out
    np.testing.assert_array_equal(out, a @ b + c + (0 if bias is None else bias))


def test_out_may_overlap_operands(library: Library) -> None:
    a, b = whole((16, 16)), whole((16, 16), seed=1)
    expected, memory = a @ b, a.copy()
    library.gemm(memory, b, out=memory)
    np.testing.assert_array_equal(memory, expected)
    memory = np.zeros((17, 16), np.float32)
    memory[:16] = b
    library.gemm(a, b, c=memory[:16], beta=1.0, out=memory[1:])
    np.testing.assert_array_equal(memory[1:], expected + b)


def test_what_was_tuned_for_rows_runs_in_place(shop: Workshop, tmp_path: Path) -> None:
    spec = loads_spec(
        "gemms: [{layout: row, trans: NT, epilogue: {bias: true}, sizes: [[24, 40, 16]]}]", "rows.yaml"
    )
    problem = spec.problems[0]
    shop.export([shop.winner(problem)], tmp_path / "x")
    a, weight, bias = whole((24, 16)), whole((40, 16), seed=1), whole((40,), seed=2)
    with tuner.load(tmp_path / "x") as library:
        assert library.problems == (problem,)
        np.testing.assert_array_equal(library.gemm(a, weight.T, bias=bias), a @ weight.T + bias)


A, B = whole((4, 3)), whole((3, 2))
MISTAKES: list[tuple[type[Exception], str, Callable[[Library], Any]]] = [
    (TypeError, "must be a NumPy array, but is list", lambda lib: lib.gemm([[1.0]], B)),  # type: ignore[arg-type]
    (TypeError, "a must have 2 axes, or 3 with a batch, but has 1", lambda lib: lib.gemm(A[0], B)),
    (TypeError, "element type must be one of", lambda lib: lib.gemm(A.astype(complex), B)),
    (TypeError, "element type must be one of", lambda lib: lib.gemm(A.astype(">f4"), B)),
    (ValueError, "there are 3 and 4", lambda lib: lib.gemm(A, A)),
    (ValueError, "the same batch", lambda lib: lib.gemm(np.stack([A] * 2), np.stack([B] * 3))),
    (ValueError, "so that c is needed", lambda lib: lib.gemm(A, B, beta=1.0)),
    (ValueError, "c must have the shape (4, 2)", lambda lib: lib.gemm(A, B, c=A, beta=1.0)),
    (ValueError, "out must have the shape (4, 2)", lambda lib: lib.gemm(A, B, out=A)),
    (ValueError, "bias must have the shape (2,)", lambda lib: lib.gemm(A, B, bias=A[0])),
    (ValueError, "activation must be one of none", lambda lib: lib.gemm(A, B, activation="tanh")),
    (ValueError, "read-only", lambda lib: lib.gemm(A, B, out=np.broadcast_to(np.float32(0), (4, 2)))),
    (LibraryError, "no kernel for f32 x f64, but for", lambda lib: lib.gemm(A, B.astype(float))),
    (LibraryError, "f32 x f32 and relu", lambda lib: lib.gemm(A, B, activation="relu")),
    (LibraryError, "with a bias of f64", lambda lib: lib.gemm(A, B, bias=np.zeros(2))),
    (LibraryError, "and out of float64", lambda lib: lib.gemm(A, B, out=np.zeros((4, 2)))),
    (LibraryError, "scalar is not valid", lambda lib: lib.gemm(A.astype("i1"), B.astype("i1"), alpha=0.5)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_mistakes_of_the_caller(library: Library, mistake: tuple[type[Exception], str, Any]) -> None:
    error, message, call = mistake
    with pytest.raises(error, match=re.escape(message)):
        call(library)


def test_many_threads_use_one_library(library: Library) -> None:
    cases = [(whole((m, 30), seed=m), whole((30, 40), seed=m + 1)) for m in (3, 64, 65, 200)]
    wrong = []

    def work(a: Any, b: Any) -> None:
        expected = a @ b
        for _ in range(100):
            if not np.array_equal(library.gemm(a, b), expected):
                wrong.append(a.shape)

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_of_fork_computes_and_ends(library: Library) -> None:
    a, b = whole((64, 64)), whole((64, 64), seed=1)
    library.gemm(a, b)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are other threads, as meant
        child = os.fork()
    if child == 0:
        os.write(write, bytes([np.array_equal(library.gemm(a, b), a @ b)]))
        os._exit(0)
    os.close(write)
    ended, _, _ = select.select([read], [], [], 60)
    answer = os.read(read, 1) if ended else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    assert answer == b"\1"


def test_a_closed_library_is_not_used(exported: Path) -> None:
    library = tuner.load(exported)
    library.close()
    library.close()
    assert "is closed" in refused(lambda: library.gemm(A, B))


def test_threads_must_be_a_number_of_threads(exported: Path) -> None:
    for threads in (-1, 5000):
        assert "1 to 1024" in refused(lambda threads=threads: tuner.load(exported, threads=threads))  # type: ignore[misc]
    with tuner.load(exported, threads=1) as library:
        assert library.threads == 1


# What the runtime does, seen by kernels that tell.


def test_who_finds_the_team_busy_runs_alone(shop: Workshop, tmp_path: Path) -> None:
    body = "static int inside; __atomic_add_fetch(&inside, 1, 5); " + (
        "while (__atomic_load_n(&inside, 5) < 2) {} d[0] = (float)team->size;"
    )
    shop.export([shop.probe(GemmProblem.create(F32, 4, 4, 4), "meet", body)], tmp_path / "x")
    x = whole((4, 4))
    sizes: list[float] = []
    with tuner.load(tmp_path / "x", threads=THREADS) as library:
        threads = [threading.Thread(target=lambda: sizes.append(library.gemm(x, x)[0, 0])) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(sizes) == [1.0, float(THREADS)]


def test_a_workspace_is_aligned_whole_and_kept(shop: Workshop, tmp_path: Path) -> None:
    body = (
        "char *w = g->workspace; for (int64_t i = 0; i < g->workspace_bytes; i++) w[i] = 1; "
        "*(void **)d = w; d[2] = (float)g->workspace_bytes;"
    )
    problem = GemmProblem.create(F32, 4, 4, 4)
    shop.export([shop.probe(problem, "tell", body, "1000 * team_size * g->k + 1")], tmp_path / "x")
    with tuner.load(tmp_path / "x", threads=THREADS) as library:

        def call(k: int) -> tuple[int, float]:
            d = library.gemm(whole((4, k)), whole((k, 4)))
            return int(d.reshape(-1)[:2].view(np.uint64)[0]), float(d.reshape(-1)[2])

        first = call(8)
        assert first[0] % 64 == 0
        assert first[1] >= 1000 * THREADS * 8 + 1
        assert call(3)[0] == call(8)[0] == first[0]


def test_c_and_python_choose_the_same_kernel(shop: Workshop, tmp_path: Path) -> None:
    random_ = random.Random(1)
    sizes = {tuple(random_.choice((1, 4, 8, 16, 50, 128, 3000)) for _ in range(3)) for _ in range(30)}
    problems = [
        GemmProblem.create(F32, m, n, k, batch_count=batch)
        for m, n, k in sizes
        for batch in random_.choice(((1,), (1, 8)))
    ]
    winners = [shop.probe(p, f"k{number}", f"d[0] = {number};") for number, p in enumerate(problems)]
    winners += [shop.probe(GemmProblem.create(BIAS, 8, 8, 8), "with_bias", "")]
    shop.export(winners, tmp_path / "x")
    args = Args(tmp_path / "x")
    exact_count = 0
    with tuner.load(tmp_path / "x", threads=1) as library:

        def expected(m: int, n: int, k: int, batch: int = 1) -> tuple[str, bool]:
            choice = library.kernel_for(GemmProblem.create(F32, m, n, k, batch_count=batch))
            assert choice is not None
            return choice.symbol, choice.exact

        for _ in range(3000):
            m, n, k = (random_.choice((1, 2, 4, 8, 16, 50, 90, 128, 3000, 10**9)) for _ in range(3))
            batch = random_.choice((1, 2, 3, 8))
            found = args.kernel(m, n, k, batch)
            exact_count += found[1]
            assert found == expected(m, n, k, batch)
        assert exact_count > 10
        for _ in range(2000):  # many more than the runtime remembers, and what really runs
            m, n, k = (random_.randrange(1, 200) for _ in range(3))
            ran = library.gemm(np.empty((n, k), np.float32), np.empty((k, m), np.float32))[0, 0]
            assert f"k{ran:.0f}" == expected(m, n, k)[0]
        assert library.kernel_for(GemmProblem.create(BIAS_GELU, 8, 8, 8)) is None


def test_kernels_of_one_name_and_different_text_are_both_there(shop: Workshop, tmp_path: Path) -> None:
    winners = [
        shop.probe(GemmProblem.create(F32, 4, 4, 4), "same", "d[0] = 1;"),
        shop.probe(GemmProblem.create(F32, 9, 9, 9), "same", "d[0] = 2;"),
    ]
    shop.export(winners, tmp_path / "x")
    with tuner.load(tmp_path / "x") as library:
        assert library.gemm(whole((4, 4)), whole((4, 4)))[0, 0] == 1
        assert library.gemm(whole((9, 9)), whole((9, 9)))[0, 0] == 2
        shop.export(winners[::-1], tmp_path / "y")
        assert verify(tmp_path / "y").id == library.manifest.id


# The C interface.


class GemmArgs(ctypes.Structure):
    """`wavetune_gemm_args` of wavetune.h."""

    _fields_ = (
        *[(name, ctypes.c_int) for name in ("trans_a", "trans_b", "a_type", "b_type", "c_type", "d_type")],
        *[(name, ctypes.c_int) for name in ("compute_type", "bias_type", "activation")],
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "batch_count")],
        *[(name, ctypes.c_int64) for name in ("lda", "ldb", "ldc", "ldd")],
        *[(name, ctypes.c_int64) for name in ("stride_a", "stride_b", "stride_c", "stride_d")],
        *[(name, ctypes.c_double) for name in ("alpha", "beta")],
        *[(name, ctypes.c_void_p) for name in ("a", "b", "c", "d", "bias")],
        *[(name, ctypes.c_void_p) for name in ("scale_a", "scale_b", "scale_alpha_vec")],
    )


class Args:
    """The library's C functions, and arguments for them."""

    def __init__(self, folder: Path, path: str = "lib/libwavetune.so") -> None:
        self.c = ctypes.CDLL(str(folder / path))
        self.c.wavetune_kernel_name.restype = ctypes.c_char_p
        self.c.wavetune_status_string.restype = ctypes.c_char_p
        self.c.wavetune_library_id.restype = ctypes.c_char_p
        self.c.wavetune_arch.restype = ctypes.c_char_p
        self.x = np.zeros(4096, np.float32)

    def make(self, m: int = 4, n: int = 5, k: int = 6, dtype: int = 2, **changes: Any) -> GemmArgs:
        args = GemmArgs()
        sizes = map(ctypes.c_int64, (m, n, k))
        self.c.wavetune_gemm_init(ctypes.byref(args), dtype, 0, 0, *sizes)
        for name in ("a", "b", "d"):
            setattr(args, name, self.x.ctypes.data)
        for name, value in changes.items():
            setattr(args, name, value)
        return args

    def kernel(self, m: int, n: int, k: int, batch: int) -> tuple[str, bool]:
        exact = ctypes.c_int(-1)
        args = self.make(m, n, k, batch_count=batch)
        return self.c.wavetune_kernel_name(ctypes.byref(args), ctypes.byref(exact)).decode(), bool(
            exact.value
        )


@pytest.fixture(scope="module")
def c(exported: Path) -> Args:
    return Args(exported)


@pytest.fixture
def handle(c: Args) -> Iterator[ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    assert c.c.wavetune_create(ctypes.byref(handle), 1) == 0
    yield handle
    c.c.wavetune_destroy(handle)


SUCCESS, INVALID_VALUE, NOT_SUPPORTED, ARCH_MISMATCH = range(4)
CALLS = [
    (SUCCESS, {}),
    (SUCCESS, {"m": 0, "a": None, "d": None}),
    (SUCCESS, {"batch_count": 0}),
    (SUCCESS, {"alpha": 0.0, "a": None, "b": None}),
    (SUCCESS, {"ldc": 0, "c": None}),
    (SUCCESS, {"batch_count": 2, "stride_d": 20}),
    (INVALID_VALUE, {"m": -1}),
    (INVALID_VALUE, {"n": -1}),
    (INVALID_VALUE, {"k": -1}),
    (INVALID_VALUE, {"batch_count": -1}),
    (INVALID_VALUE, {"lda": 3}),
    (INVALID_VALUE, {"ldb": 5}),
    (INVALID_VALUE, {"ldd": 3}),
    (INVALID_VALUE, {"m": 0, "ldd": 0}),
    (INVALID_VALUE, {"lda": 2**62}),
    (INVALID_VALUE, {"beta": 1.0, "c": 64, "ldc": 3}),
    (INVALID_VALUE, {"beta": 1.0}),
    (INVALID_VALUE, {"batch_count": 2, "stride_d": 19}),
    (INVALID_VALUE, {"batch_count": 2, "stride_d": 20, "stride_a": 23}),
    (INVALID_VALUE, {"a": None}),
    (INVALID_VALUE, {"b": None}),
    (INVALID_VALUE, {"d": None}),
    (INVALID_VALUE, {"bias_type": 2}),
    (NOT_SUPPORTED, {"activation": 1}),
    (NOT_SUPPORTED, {"activation": 16}),
    (NOT_SUPPORTED, {"a_type": -1}),
    (NOT_SUPPORTED, {"trans_a": 1, "trans_b": 1}),
    (NOT_SUPPORTED, {"scale_a": 64}),
    (NOT_SUPPORTED, {"bias_type": 4}),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_status_of_a_call(c: Args, handle: ctypes.c_void_p, call: tuple[int, dict[str, Any]]) -> None:
    expected, changes = call
    assert c.c.wavetune_gemm(handle, ctypes.byref(c.make(**changes))) == expected


def test_null_is_an_invalid_value(c: Args, handle: ctypes.c_void_p) -> None:
    assert c.c.wavetune_gemm(None, ctypes.byref(c.make())) == INVALID_VALUE
    assert c.c.wavetune_gemm(handle, None) == INVALID_VALUE
    assert c.c.wavetune_create(None, 1) == INVALID_VALUE
    assert c.c.wavetune_kernel_name(None, None) is None
    c.c.wavetune_destroy(None)


def test_init_fills_in_types_that_exist(c: Args, handle: ctypes.c_void_p) -> None:
    for dtype in (1, 2, 3, 4, 5):
        args = c.make(4, 4, 4, dtype)
        assert c.c.wavetune_gemm(handle, ctypes.byref(args)) == SUCCESS
    assert (args.d_type, args.compute_type, args.alpha, args.batch_count) == (6, 6, 1.0, 1)


def test_i8_takes_whole_scalars_alone(c: Args, handle: ctypes.c_void_p) -> None:
    for alpha, expected in ((2.0, SUCCESS), (0.5, INVALID_VALUE), (float("inf"), INVALID_VALUE)):
        args = c.make(4, 4, 4, dtype=5, alpha=alpha)
        assert c.c.wavetune_gemm(handle, ctypes.byref(args)) == expected


def test_every_status_has_a_sentence(c: Args) -> None:
    sentences = [c.c.wavetune_status_string(status) for status in (0, 1, 2, 3, 4, 99)]
    assert len(set(sentences)) == 6


def test_only_the_interface_is_visible(exported: Path, c: Args) -> None:
    declared = set(re.findall(r"\b(wavetune_\w+)\(", (exported / "include/wavetune.h").read_text()))
    listed = set(re.findall(r"\b(wavetune_\w+);", (exported / "src/exports.map").read_text()))
    assert declared == listed
    for name in declared:
        assert hasattr(c.c, name)
    for hidden in ("wavetune_types", "host_team_run", "wavetune_processor_features", *kernels(exported)):
        assert not hasattr(c.c, hidden)


def kernels(exported: Path) -> list[str]:
    return [path.stem for path in (exported / "kernels").iterdir()]


# Other programs.


@pytest.fixture(scope="module", params=["system", "zig"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workshop, Path]:
    """A small library made with each compiler that there is: the workshop, and the folder moved away."""
    patch = pytest.MonkeyPatch()
    if request.param == "zig":
        pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
        patch.setenv("TUNER_CC", "zig")
    host_toolchain.cache_clear()
    shop = Workshop(host_toolchain(), BuildCache(tmp_path_factory.mktemp("cache")))
    patch.undo()
    host_toolchain.cache_clear()
    place = tmp_path_factory.mktemp("built")
    shop.export([shop.winner(GemmProblem.create(F32, 64, 32, 96))], place / "first")
    (place / "first").rename(place / "tuned")
    return shop, place / "tuned"


def docs(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs/library.md").read_text(), re.M | re.S)


def expected_element() -> float:
    m, n, k = 64, 32, 96
    a = (np.arange(m * k) % 7).reshape(k, m).T
    b = (np.arange(k * n) % 5).reshape(n, k).T
    return float((a @ b)[1, 2])


def check_program(program: Path, kernel: str) -> None:
    result = subprocess.run([program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"success: D(1,2) = {expected_element():g} by {kernel}\n"


def test_the_c_program_of_the_docs(built: tuple[Workshop, Path], tmp_path: Path) -> None:
    shop, folder = built
    (program,) = docs("c")
    assert len(program.splitlines()) <= 24
    (tmp_path / "program.c").write_text(program)
    command = [*shop.toolchain.command, *shop.toolchain.portable_flags, "program.c", f"-I{folder}/include"]
    command += [f"-L{folder}/lib", "-lwavetune", f"-Wl,-rpath,{folder}/lib", "-o", "program"]
    subprocess.run(command, cwd=tmp_path, check=True)
    check_program(tmp_path / "program", kernels(folder)[0])


def test_the_python_program_of_the_docs(built: tuple[Workshop, Path]) -> None:
    _, folder = built
    (program,) = docs("python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder.parent, env=environment, capture_output=True, text=True
    )
    assert result.stderr == ""
    assert float(result.stdout) < 1e-4


def test_pkg_config_finds_the_library(built: tuple[Workshop, Path], tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    shop, folder = built
    (tmp_path / "program.c").write_text(docs("c")[0])
    line = next(line for line in docs("console")[0].splitlines() if "pkg-config" in line).removeprefix(
        "$ cc "
    )
    (tmp_path / "tuned").symlink_to(folder)
    compiler = " ".join([*shop.toolchain.command, *shop.toolchain.portable_flags])
    subprocess.run(f"{compiler} {line} -o program", shell=True, cwd=tmp_path, check=True)
    check_program(tmp_path / "program", kernels(folder)[0])


def test_cmake_finds_the_library(built: tuple[Workshop, Path], tmp_path: Path) -> None:
    if shutil.which("cmake") is None or not (shutil.which("make") or shutil.which("ninja")):
        pytest.skip("cmake, or make and ninja, are not installed")
    shop, folder = built
    (tmp_path / "program.c").write_text(docs("c")[0])
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(example C)\nadd_executable(program program.c)\n"
        + docs("cmake")[0].replace("CONFIG", "0.1 CONFIG")
    )
    generator = [] if shutil.which("make") else ["-G", "Ninja"]
    environment = {**os.environ, "CC": " ".join(shop.toolchain.command)}
    flags = f"-DCMAKE_C_FLAGS={' '.join(shop.toolchain.extra_flags)}"
    for command in (
        ["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={folder}", flags, *generator],
        ["cmake", "--build", "build"],
    ):
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    check_program(tmp_path / "build/program", kernels(folder)[0])


def test_the_sources_build_the_library_again(built: tuple[Workshop, Path], tmp_path: Path) -> None:
    shop, folder = built
    shutil.copytree(folder, tmp_path / "copy")
    (script,) = re.findall(r"^```sh\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
    environment = {**os.environ, "CC": " ".join(shop.toolchain.command)}
    subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path / "copy", env=environment, check=True)
    again = Args(tmp_path / "copy", "build/libwavetune.so")
    assert again.c.wavetune_library_id() == Args(folder).c.wavetune_library_id()
    assert again.kernel(64, 32, 96, 1) == (kernels(folder)[0], True)
    handle = ctypes.c_void_p()
    assert again.c.wavetune_create(ctypes.byref(handle), 2) == SUCCESS
    assert again.c.wavetune_gemm(handle, ctypes.byref(again.make())) == SUCCESS
    again.c.wavetune_destroy(handle)


def test_the_header_is_c_plus_plus(exported: Path, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "program.cpp").write_text(
        "#include <wavetune.h>\nwavetune_status status = WAVETUNE_SUCCESS;\n"
    )
    command = [compiler, "-fsyntax-only", "-Wall", "-Werror", f"-I{exported}/include", "program.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)


RACE = """
#include <pthread.h>
#include <stdio.h>
#include <wavetune.h>
enum { S = 40, CALLS = 50 };
static float a[S * S], b[S * S];
static wavetune_handle *handle;
static void *work(void *argument) {
    static float results[4][S * S];
    float *d = results[(long)argument];
    for (int call = 0; call < CALLS; call++) {
        wavetune_gemm_args args;
        int64_t k = 1 + call % S;
        wavetune_gemm_init(&args, WAVETUNE_F32, WAVETUNE_N, WAVETUNE_N, S, S, k);
        args.a = a, args.b = b, args.d = d, args.ldb = S;
        if (wavetune_gemm(handle, &args)) return "status";
        for (int i = 0; i < S * S; i++) if (d[i] != (float)(2 * k)) return "result";
    }
    return NULL;
}
int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < S * S; i++) a[i] = 1, b[i] = 2;
    if (wavetune_create(&handle, 2)) return 1;
    for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    int wrong = 0;
    for (int i = 0; i < 4; i++) {
        void *what;
        pthread_join(threads[i], &what);
        if (what) wrong = 1;
    }
    wavetune_destroy(handle);
    return wrong;
}
"""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_callers_do_not_race(exported: Path, shop: Workshop, tmp_path: Path, sanitizer: str) -> None:
    if shop.toolchain.id.startswith("zig"):
        pytest.skip("zig compiles its sanitizers first, which takes minutes")
    (tmp_path / "race.c").write_text(RACE)
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-g", "-pthread"]
    compiler = list(shop.toolchain.command)
    subprocess.run([*compiler, *flags, "empty.c", "-o", "empty"], cwd=tmp_path, capture_output=True)
    if (
        not (tmp_path / "empty").exists()
        or subprocess.run([tmp_path / "empty"], capture_output=True).returncode
    ):
        pytest.skip(f"-fsanitize={sanitizer} does not work with {shop.toolchain.id} here")
    kernel_flags = [flag for flag in shop.toolchain.flags(shop.target) if flag not in ("-O3", "-shared")]
    sources = [*(exported / "kernels").iterdir(), *(exported / "src").glob("*.c"), tmp_path / "race.c"]
    includes = [f"-I{exported}/include", f"-I{exported}/src"]
    command = [*compiler, *kernel_flags, "-O1", *flags, *includes, *map(str, sources), "-lm", "-o", "race"]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "race"], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


# What may go wrong with a library, and with writing one.


@pytest.fixture
def tampered(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_tampered_library_is_not_loaded(tampered: Path) -> None:
    verify(tampered)
    path = tampered / "lib/libwavetune.so"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "has changed since it was exported" in refused(lambda: tuner.load(tampered))


def test_a_linked_library_is_not_loaded(tampered: Path) -> None:
    path = tampered / "lib/libwavetune.so"
    path.rename(tampered / "other.so")
    path.symlink_to(tampered / "other.so")
    assert "is a link" in refused(lambda: tuner.load(tampered))


def test_a_library_for_another_kind_of_machine_is_not_loaded(tampered: Path) -> None:
    path = tampered / "manifest.json"
    path.write_text(
        path.read_text().replace('"arch": "x86_64', '"arch": "riscv64').replace("aarch64", "riscv64")
    )
    message = refused(lambda: tuner.load(tampered))
    assert "riscv64" in message
    assert os.uname().machine in message


def test_a_processor_without_the_instructions_is_told(shop: Workshop, tmp_path: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("instruction sets are added by name on x86_64 alone")
    present = Path("/proc/cpuinfo").read_text()
    lacking = {"avx512fp16": "avx512_fp16", "avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}
    feature = next((flag for flag, name in lacking.items() if name not in present), None)
    if feature is None:
        pytest.skip("this processor has every instruction set that could be asked for")
    target = Target("cpu", f"x86_64-v2+{feature}")
    winner = shop.probe(GemmProblem.create(F32, 4, 4, 4), "k", "d[0] = 1;")
    winner = replace(winner, fingerprint=replace(winner.fingerprint, arch=target.arch))
    export_library([winner], tmp_path / "x", shop.toolchain, target, cache=shop.cache)
    message = refused(lambda: tuner.load(tmp_path / "x"))
    assert f"is for {target.arch} processors, but this one is {shop.target.arch}" in message
    args, handle = Args(tmp_path / "x"), ctypes.c_void_p(1)
    assert args.c.wavetune_create(ctypes.byref(handle), 1) == ARCH_MISMATCH
    assert handle.value is None
    assert args.c.wavetune_arch() == target.arch.encode()


def small(shop: Workshop, number: int) -> list[Winner]:
    return [shop.probe(GemmProblem.create(F32, 4, 4, 4), f"k{number}", f"d[0] = {number};")]


def answer(folder: Path) -> float:
    with tuner.load(folder, threads=1) as library:
        return float(library.gemm(whole((4, 4)), whole((4, 4)))[0, 0])


def test_an_earlier_export_is_replaced_on_request_alone(shop: Workshop, tmp_path: Path) -> None:
    shop.export(small(shop, 1), tmp_path / "x")
    assert "pass --overwrite" in refused(lambda: shop.export(small(shop, 2), tmp_path / "x"))
    assert answer(tmp_path / "x") == 1
    shop.export(small(shop, 2), tmp_path / "x", overwrite=True)
    assert answer(tmp_path / "x") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_earlier_export_is_replaced_where_folders_cannot_be_exchanged(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.export(small(shop, 1), tmp_path / "x")
    monkeypatch.setattr("tuner.export.write._exchange", lambda a, b: False)
    shop.export(small(shop, 2), tmp_path / "x", overwrite=True)
    assert answer(tmp_path / "x") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_empty_folder_is_filled(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    shop.export(small(shop, 1), tmp_path / "x")
    assert answer(tmp_path / "x") == 1


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_of_someone_else_is_never_replaced(shop: Workshop, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text('{"format": "mine"}')
    for overwrite in (False, True):
        message = refused(lambda o=overwrite: shop.export(small(shop, 1), tmp_path / "x", overwrite=o))  # type: ignore[misc]
        assert "must be a new folder or an earlier export" in message
    assert [path.name for path in (tmp_path / "x").iterdir()] == [name]


def test_a_file_in_the_way_is_kept(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    refused(lambda: shop.export(small(shop, 1), tmp_path / "x", overwrite=True))
    assert (tmp_path / "x").read_text() == "mine"


def test_files_that_someone_added_to_an_export_are_kept(shop: Workshop, tmp_path: Path) -> None:
    shop.export(small(shop, 1), tmp_path / "x")
    (tmp_path / "x/src/notes.txt").write_text("mine")
    message = refused(lambda: shop.export(small(shop, 2), tmp_path / "x", overwrite=True))
    assert "src/notes.txt" in message
    assert (tmp_path / "x/src/notes.txt").exists()


def test_a_library_that_is_still_open_is_not_mistaken_for_a_new_one(shop: Workshop, tmp_path: Path) -> None:
    shop.export(small(shop, 1), tmp_path / "x")
    old = tuner.load(tmp_path / "x", threads=1)
    shop.export(small(shop, 2), tmp_path / "x", overwrite=True)
    assert "close that library first" in refused(lambda: tuner.load(tmp_path / "x"))
    assert old.gemm(whole((4, 4)), whole((4, 4)))[0, 0] == 1
    old.close()
    assert answer(tmp_path / "x") == 2


class Interrupted(HostToolchain):
    def link(self, inputs: Sequence[Path], output: Path, flags: tuple[str, ...]) -> str | None:
        if output.suffix == ".so":
            raise KeyboardInterrupt
        return super().link(inputs, output, flags)


def test_an_interrupted_export_leaves_nothing(shop: Workshop, tmp_path: Path) -> None:
    toolchain = Interrupted(shop.toolchain.command, shop.toolchain.version, shop.toolchain.extra_flags)
    with pytest.raises(KeyboardInterrupt):
        export_library(small(shop, 1), tmp_path / "x", toolchain, shop.target, cache=shop.cache)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_export import *
shop = Workshop(host_toolchain(), BuildCache(Path(sys.argv[2])))
print("ready", flush=True)
number = 0
while True:
    number += 1
    shop.export(small(shop, number % 3), Path(sys.argv[3]), overwrite=True)
"""


def test_a_killed_export_leaves_a_whole_library(shop: Workshop, tmp_path: Path) -> None:
    folder, cache = tmp_path / "x", tmp_path / "cache"
    shop.export(small(shop, 0), folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    random_ = random.Random(1)
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(cache), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random_.uniform(0.3, 1.0))
        process.kill()
        process.wait()
        process.stdout.close()
        verify(folder)
        assert answer(folder) in (0, 1, 2)


def changed(shop: Workshop, **changes: Any) -> Winner:
    (winner,) = small(shop, 1)
    return replace(winner, fingerprint=replace(shop.fingerprint, **changes))


def test_winners_that_cannot_be_exported(shop: Workshop, tmp_path: Path) -> None:
    (good,) = small(shop, 1)
    text = "int k(void) { return nothing; }"
    for winners, expected in (
        ([], "at least one winner"),
        ([changed(shop, kind="hip")], "only winners of the cpu device"),
        ([good, changed(shop, name="Another Processor")], "for one device"),
        ([changed(shop, toolchain="cc 0.1")], "with cc 0.1 for"),
        ([changed(shop, arch="x86_64-v9")], "for x86_64-v9, but the compiler here"),
        ([replace(good, source=replace(good.source, text=text))], "the kernel k1 does not build"),
        ([replace(good, source=replace(good.source, symbol="../k"))], "must be a C identifier"),
    ):
        assert expected in refused(lambda w=winners: shop.export(w, tmp_path / "x"))  # type: ignore[misc]
    assert "the name of a library" in refused(lambda: shop.export([good], tmp_path / "x", name="../x"))
    assert list(tmp_path.iterdir()) == []


def test_a_library_may_have_another_name(shop: Workshop, tmp_path: Path) -> None:
    shop.export(small(shop, 3), tmp_path / "x", name="mine_2")
    assert (tmp_path / "x/lib/libmine_2.so").exists()
    assert (tmp_path / "x/lib/cmake/mine_2/mine_2Config.cmake").exists()
    assert answer(tmp_path / "x") == 3


def test_a_place_that_cannot_be_written_is_told(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(lambda: shop.export(small(shop, 1), tmp_path / "file" / "x"))
