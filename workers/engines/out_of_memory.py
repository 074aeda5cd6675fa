"""Whether an error of a runtime says that memory ran out: all texts and numbers, in one place.

No runtime raises one exception for it. ONNX Runtime raises plain exceptions with a text, TensorRT
returns nothing and writes to its log and its error recorder, CUDA returns a number, numpy raises a
MemoryError. What is not known here is no lack of memory: a smaller batch would not mend it.
"""

from __future__ import annotations

import re
from typing import Final

#: cudaErrorMemoryAllocation of the runtime, and CUDA_ERROR_OUT_OF_MEMORY of the driver.
CUDA_OUT_OF_MEMORY: Final = 2

#: What a runtime says of an input that it refuses, whatever words the input's names hold.
_INVALID: Final = re.compile(r"INVALID_ARGUMENT|InvalidArgument|Got invalid dimensions")

_OUT_OF_MEMORY: Final = re.compile(
    "|".join(
        (
            # ONNX Runtime, any arena: over its limit, or refused by the system or the device.
            r"bfc_arena\.cc.*?Available memory of [0-9]+ is smaller than requested bytes",
            r"Failed to allocate memory for requested buffer of size",
            # The C++ library of Linux and macOS, and that of Windows.
            r"std::bad_alloc|\bbad allocation\b",
            # CUDA through ONNX Runtime, PyTorch, TensorRT, the driver. Not 209, 700 and others.
            r"CUDA (?:failure|error):? 2\b|CUDA (?:error: )?out of memory",
            r"\bcudaError(?:_t)? ?[.:]? ?2\b|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
            r"Cuda (?:Runtime|Driver) \(out of memory\)",
            r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
            r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
            # TensorRT's own.
            r"GPU memory \([0-9]+ bytes\) could not be allocated",
            r"Error Code [0-9]+: OutOfMemory|\bFAILED_ALLOCATION\b",
        )
    ),
    re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error``, raised by a runtime or by numpy, says that memory ran out."""
    # numpy's _ArrayMemoryError is a MemoryError.
    return isinstance(error, MemoryError) or says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Return whether ``text``, of an exception, a log or an error recorder, says so."""
    return _OUT_OF_MEMORY.search(text) is not None and _INVALID.search(text) is None
