"""CUDA's runtime calls over the memory of this machine: what they promise, held to, without a GPU.

Memory outside of what was taken is refused, so an engine that counts wrong is found. Faults are
put in by the name of the call. It computes nothing; `tensorrt_on_host` does.
"""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

#: Bytes of the made-up device.
MEMORY_BYTES = 1 << 20


class CudaError(enum.IntEnum):
    """Some of CUDA's errors, by their numbers."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700


class CudaOnHost:
    """Stands for the module `cuda.bindings.runtime`."""

    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self.memory_bytes = memory_bytes
        #: What every later call of a name gives.
        self.faults: dict[str, CudaError] = {}
        #: An error that stays, as CUDA's sticky ones do.
        self.sticky = CudaError.cudaSuccess
        self.device_blocks: dict[int, Any] = {}
        self.host_blocks: dict[int, Any] = {}
        self.streams: set[int] = set()
        #: Device memory that was taken, in all.
        self.mallocs = 0

    @property
    def taken_bytes(self) -> int:
        return sum(len(block) for block in self.device_blocks.values())

    def require(self, address: int, nbytes: int, *, device: bool) -> None:
        """Refuse memory that was not taken, or not as much."""
        blocks = self.device_blocks if device else self.host_blocks
        assert address in blocks, f"{address} is no address of taken memory"
        assert nbytes <= len(blocks[address]), "more bytes than were taken"

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        error = self.sticky or self.faults.get(name, CudaError.cudaSuccess)
        return (error, *values) if not error else (error, *(None for _ in values))

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return self._answer("cudaGetDeviceCount", 1)

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        assert device == 0
        return self._answer("cudaSetDevice")

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        found = SimpleNamespace(
            name=b"Host pretending\0\0",
            major=8,
            minor=9,
            multiProcessorCount=4,
            totalGlobalMem=self.memory_bytes,
        )
        return self._answer("cudaGetDeviceProperties", found)

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cudaDriverGetVersion", 13010)

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        free = self.memory_bytes - self.taken_bytes
        return self._answer("cudaMemGetInfo", free, self.memory_bytes)

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return (self.sticky,)

    def cudaDeviceSynchronize(self) -> tuple[Any, ...]:
        return self._answer("cudaDeviceSynchronize")

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking
        self.streams.add(17)
        return self._answer("cudaStreamCreateWithFlags", 17)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert stream in self.streams
        return self._answer("cudaStreamSynchronize")

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams.remove(stream)
        return self._answer("cudaStreamDestroy")

    def cudaMalloc(self, nbytes: int) -> tuple[Any, ...]:
        if nbytes > self.memory_bytes - self.taken_bytes:
            return CudaError.cudaErrorMemoryAllocation, None
        block = (ctypes.c_ubyte * nbytes)(*([0xAB] * nbytes))
        address = ctypes.addressof(block)
        self.device_blocks[address] = block
        self.mallocs += 1
        return self._answer("cudaMalloc", address)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.device_blocks[address]
        return self._answer("cudaFree")

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaHostAllocDefault
        block = (ctypes.c_ubyte * nbytes)()
        self.host_blocks[ctypes.addressof(block)] = block
        return self._answer("cudaHostAlloc", ctypes.addressof(block))

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.host_blocks[address]
        return self._answer("cudaFreeHost")

    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        to_device = kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.require(target, nbytes, device=to_device)
        self.require(source, nbytes, device=not to_device)
        assert stream in self.streams
        ctypes.memmove(target, source, nbytes)
        return self._answer("cudaMemcpyAsync")

    def cudaGetErrorString(self, error: CudaError) -> tuple[Any, ...]:
        words = {CudaError.cudaErrorMemoryAllocation: b"out of memory"}
        return CudaError.cudaSuccess, words.get(error, b"an error of CUDA's")
