"""The choice of kernels: what the table keeps, and what is nearest."""

from __future__ import annotations

from dataclasses import replace

from tuner.export.table import Entry, Table, distance, type_code
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType, Transpose

F32 = ProblemType()


def entry(m: int, n: int, k: int, symbol: str, type: ProblemType = F32, **more: float) -> Entry:
    return Entry(GemmProblem.create(type, m, n, k, **more), symbol, 1000.0)  # type: ignore[arg-type]


def found(table: Table, m: int, n: int, k: int, **more: int) -> tuple[str, bool]:
    choice = table.find(GemmProblem.create(F32, m, n, k, **more))
    assert choice is not None
    return choice.symbol, choice.exact


def test_a_tuned_size_gets_its_own_kernel_and_time() -> None:
    table = Table([entry(8, 8, 8, "small"), Entry(GemmProblem.create(F32, 64, 8, 8), "tall", 25.0)])
    choice = table.find(GemmProblem.create(F32, 64, 8, 8, lda=100, beta=1.0))
    assert choice is not None
    assert (choice.symbol, choice.exact, choice.time_ns) == ("tall", True, 25.0)


def test_another_size_gets_the_nearest_by_ratio() -> None:
    table = Table([entry(8, 8, 8, "small"), entry(1000, 1000, 1000, "large")])
    assert found(table, 89, 89, 89) == ("small", False)  # below the geometric mean, far below the other
    assert found(table, 90, 90, 90) == ("large", False)
    assert found(table, 1, 10**6, 1) == ("small", False)


def test_the_batch_counts_as_a_size() -> None:
    table = Table([entry(8, 8, 8, "one"), entry(8, 8, 8, "many", batch_count=64)])
    assert found(table, 8, 8, 8, batch_count=4) == ("one", False)
    assert found(table, 8, 8, 8, batch_count=32) == ("many", False)


def test_equally_near_sizes_are_taken_in_ascending_order() -> None:
    table = Table([entry(16, 8, 8, "c"), entry(8, 16, 8, "b"), entry(4, 8, 8, "a")])
    assert found(table, 8, 8, 8) == ("a", False)


def test_a_type_that_was_not_tuned_has_no_kernel() -> None:
    table = Table([entry(8, 8, 8, "f32")])
    assert table.find(GemmProblem.create(replace(F32, trans_a=Transpose.T), 8, 8, 8)) is None


def test_of_one_size_the_dense_winner_without_c_stands() -> None:
    entries = [
        entry(8, 8, 8, "padded", lda=16),
        entry(8, 8, 8, "adds", beta=1.0),
        entry(8, 8, 8, "plain"),
        entry(8, 8, 8, "scaled", alpha=-1.0),
    ]
    for order in (entries, entries[::-1]):
        table = Table(order)
        assert len(table) == 1
        assert found(table, 8, 8, 8) == ("plain", True)


def test_distance_is_one_for_equal_sizes_and_symmetric() -> None:
    assert distance((3, 7, 11, 1), (3, 7, 11, 1)) == 1.0
    assert distance((3, 7, 11, 2), (6, 7, 33, 1)) == distance((6, 7, 33, 1), (3, 7, 11, 2)) == 12.0


def test_type_codes_tell_all_types_apart() -> None:
    types = [
        replace(F32, trans_a=a, trans_b=b, dtype_d=d, epilogue=epilogue)
        for a in Transpose
        for b in Transpose
        for d in (DType.F32, DType.F16)
        for epilogue in (
            Epilogue(),
            Epilogue(bias=DType.F32),
            Epilogue(bias=DType.F16, activation=Activation.SILU),
            Epilogue(scale_a=True),
            Epilogue(scale_b=True),
            Epilogue(scale_alpha_vec=True),
        )
    ]
    assert len({type_code(type) for type in types}) == len(types)
    assert 0 not in {type_code(type) for type in types}
