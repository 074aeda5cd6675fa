"""Pinned memory, copies on a stream, device memory that really runs out: by CUDA's own calls."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

MIB = 1 << 20
NBYTES = 256 * MIB


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of CUDA gave; none of them raises."""
    error, *values = answer
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else tuple(values)


@pytest.fixture
def cudart(cuda: None) -> Any:
    from cuda.bindings import runtime

    checked(runtime.cudaSetDevice(0))
    return runtime


@pytest.fixture
def stream(cudart: Any) -> Iterator[Any]:
    made = checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
    yield made
    checked(cudart.cudaStreamDestroy(made))


@pytest.fixture
def device(cudart: Any) -> Iterator[int]:
    address = checked(cudart.cudaMalloc(NBYTES))
    yield address
    checked(cudart.cudaFree(address))


@pytest.fixture
def pinned(cudart: Any) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Return the address of pinned memory, and the same memory as an array."""
    address = int(checked(cudart.cudaHostAlloc(NBYTES, cudart.cudaHostAllocDefault)))
    yield address, np.ctypeslib.as_array((ctypes.c_ubyte * NBYTES).from_address(address))
    checked(cudart.cudaFreeHost(address))


def test_what_goes_to_the_device_comes_back(
    cudart: Any, stream: Any, device: int, pinned: tuple[int, npt.NDArray[np.uint8]]
) -> None:
    address, view = pinned
    sent = np.random.default_rng(7).integers(0, 256, NBYTES, np.uint8)
    kinds = cudart.cudaMemcpyKind
    view[:] = sent

    began_s = time.perf_counter()
    to_device = kinds.cudaMemcpyHostToDevice
    checked(cudart.cudaMemcpyAsync(device, address, NBYTES, to_device, stream))
    checked(cudart.cudaStreamSynchronize(stream))
    there_s = time.perf_counter()
    view[:] = 0
    back_began_s = time.perf_counter()
    to_host = kinds.cudaMemcpyDeviceToHost
    checked(cudart.cudaMemcpyAsync(address, device, NBYTES, to_host, stream))
    checked(cudart.cudaStreamSynchronize(stream))
    back_s = time.perf_counter()

    print(f"to the device {NBYTES / (there_s - began_s) / 1e9:.1f} GB/s")
    print(f"back {NBYTES / (back_s - back_began_s) / 1e9:.1f} GB/s")
    assert np.array_equal(view, sent)


def test_memory_that_runs_out_is_error_2_and_passes(cudart: Any) -> None:
    free, total = checked(cudart.cudaMemGetInfo())
    ballast = checked(cudart.cudaMalloc(free - 256 * MIB))
    try:
        error, _ = cudart.cudaMalloc(1024 * MIB)
        assert int(error) == 2
        assert error.name == "cudaErrorMemoryAllocation"
        # It is no sticky one: the same process goes on.
        cudart.cudaGetLastError()
        checked(cudart.cudaDeviceSynchronize())
        small = checked(cudart.cudaMalloc(MIB))
        checked(cudart.cudaFree(small))
    finally:
        checked(cudart.cudaFree(ballast))
    checked(cudart.cudaFree(checked(cudart.cudaMalloc(1024 * MIB))))
    print(f"{free / MIB:,.0f} of {total / MIB:,.0f} MiB were free")
