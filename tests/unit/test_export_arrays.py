"""How arrays may lie in memory for a kernel to read them in place."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.export.arrays import Array, layouts
from tuner.problem import Transpose

N, T = Transpose.N, Transpose.T
MATRIX = np.zeros((6, 4), np.float32)
BATCH = np.zeros((3, 6, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (MATRIX, {N: 4}),
        (MATRIX.T, {T: 4}),
        (MATRIX[:, :3], {N: 4}),
        (MATRIX[::2], {N: 8}),
        (MATRIX[:, ::2], {}),
        (MATRIX[::-1], {}),
        (MATRIX[:, ::-1], {}),
        (MATRIX[:1], {N: 4, T: 1}),
        (MATRIX[:, :1], {N: 4}),
        (MATRIX[:1, :1], {N: 1, T: 1}),
        (MATRIX[:0], {N: 4, T: 1}),
        (np.broadcast_to(np.float32(1), (6, 4)), {}),
        (np.frombuffer(bytes(97), np.uint8)[1:].view(np.float32).reshape(6, 4), {}),
        (BATCH, {N: 4}),
        (BATCH[::2], {N: 4}),
        (BATCH[::-1], {}),
        (BATCH.transpose(1, 0, 2), {}),
        (BATCH.swapaxes(1, 2), {T: 4}),
        (np.broadcast_to(MATRIX, (3, 6, 4)), {N: 4}),
    ],
)
def test_layouts(x: Array, expected: dict[Transpose, int]) -> None:
    assert layouts(x) == expected
