"""Whether an answer holds numbers: half precision overflows where single precision does not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workers.batching.stacking import Array


def is_finite(outputs: Mapping[str, Array]) -> bool:
    """Return whether no output holds NaN or infinity."""
    return all(
        bool(np.isfinite(array).all()) for array in outputs.values() if array.dtype.kind == "f"
    )
