"""Element types of GEMM operands, with their NumPy counterparts and rounding errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np


class DType(StrEnum):
    """An element type, by the name used in specs, kernel names and the database."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    I32 = "i32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype with the same bits."""
        return _NUMPY[self]

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def is_integer(self) -> bool:
        return self in (DType.I8, DType.I32)

    @property
    def is_fp8(self) -> bool:
        return self in (DType.FP8_E4M3, DType.FP8_E5M2)

    @property
    def epsilon(self) -> float:
        """Unit roundoff u: the largest relative error of rounding to nearest; 0 for integers."""
        return _UNIT_ROUNDOFF.get(self, 0.0)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I8: np.dtype(np.int8),
    DType.I32: np.dtype(np.int32),
    DType.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}

# 2**-(precision bits), with the implicit leading bit counted.
_UNIT_ROUNDOFF: dict[DType, float] = {
    DType.F64: 2.0**-53,
    DType.F32: 2.0**-24,
    DType.F16: 2.0**-11,
    DType.BF16: 2.0**-8,
    DType.FP8_E4M3: 2.0**-4,
    DType.FP8_E5M2: 2.0**-3,
}
