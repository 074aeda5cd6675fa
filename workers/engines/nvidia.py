"""CUDA and TensorRT of this process: the only file that imports them, and only where a GPU is.

Without a driver TensorRT's library may kill the process that opens a plan, so CUDA is asked first.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from producer.contract.errors import ConfigError
from workers.engines.cuda import Cuda, Device, Scratch, Stream
from workers.engines.device_budget import DeviceBudget
from workers.engines.trt_journal import Journal
from workers.error_text import one_line


class Nvidia:
    """What all engines of a process share. ``trt`` and ``cudart`` are the vendor's modules."""

    def __init__(self, trt: Any, cudart: Any) -> None:
        self.trt = trt
        self.cuda = Cuda(cudart)
        self.device: Device = self.cuda.device()
        self.stream: Stream = self.cuda.stream()
        self.scratch = Scratch(self.cuda)
        self.budget = DeviceBudget()
        self.journal = Journal(trt)

    @property
    def version(self) -> str:
        """Return the version of TensorRT: a plan of another one is not tried."""
        return str(self.trt.__version__)


def why_no_gpu() -> str:
    """Return why this process cannot compute on a GPU with CUDA, or nothing when it can."""
    if not _is_installed("cuda.bindings"):
        return "cuda-bindings is not installed"
    from cuda.bindings import runtime

    return Cuda(runtime).why_no_device()


def device_kind() -> str:
    """Return the same text in processes whose GPUs can do the same."""
    from cuda.bindings import runtime

    return Cuda(runtime).device().kind


def why_no_tensorrt() -> str:
    """Return why TensorRT cannot be used, or nothing; nothing is imported to find out."""
    return "" if _is_installed("tensorrt") else "tensorrt is not installed"


@functools.cache
def open_nvidia() -> Nvidia:
    """Return the GPU and TensorRT of this process; ConfigError says what is missing."""
    if why := why_no_gpu() or why_no_tensorrt():
        raise ConfigError(
            f'{why}. runtime = "tensorrt" needs an NVIDIA GPU, its driver, and the extras '
            '"worker-gpu" and "tensorrt".'
        )
    from cuda.bindings import runtime

    try:
        import tensorrt
    except (ImportError, OSError) as error:
        # PyPI has its Python part; the libraries come from NVIDIA's own index or image.
        raise ConfigError(
            f"tensorrt is installed and cannot be imported: {one_line(error)}",
            "Install it whole, from NVIDIA's index or image.",
        ) from error
    return Nvidia(tensorrt, runtime)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
