"""CUDA's runtime calls that an engine needs, each checked; and the memory and the stream it owns.

Every call of `cuda.bindings.runtime` returns an error and its values, and raises nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any, Final

import numpy as np

from producer.contract.errors import EngineFailed, OutOfMemory
from workers.batching.stacking import Array
from workers.engines.base import EngineLost
from workers.engines.out_of_memory import CUDA_OUT_OF_MEMORY

#: After one of these every further call of the process fails: CUDA asks for a new process.
STICKY: Final = {
    "cudaErrorDevicesUnavailable": 46,
    "cudaErrorECCUncorrectable": 214,
    "cudaErrorNvlinkUncorrectable": 220,
    "cudaErrorContained": 226,
    "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchTimeout": 702,
    "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714,
    "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717,
    "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719,
    "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorExternalDevice": 911,
    "cudaErrorUnknown": 999,
}

#: How a runtime on top of CUDA names its errors.
_ERROR_NUMBER: Final = re.compile(r"\bCUDA (?:failure|error):? ([0-9]+)\b")


def says_lost(text: str) -> bool:
    """Return whether the error of a runtime on top of CUDA is one after which nothing works."""
    found = _ERROR_NUMBER.search(text)
    return found is not None and int(found[1]) in STICKY.values()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What decides which plans a GPU can run."""

    name: str
    #: As ``10.3``.
    compute_capability: str
    #: A MIG slice has a part of its GPU's; kernels are chosen for their number.
    multiprocessors: int
    memory_bytes: int
    #: The newest CUDA that the driver knows, as ``13.0``: each branch of drivers has its own.
    driver: str

    @property
    def kind(self) -> str:
        """Return the same text for devices that can do the same."""
        gib = round(self.memory_bytes / (1 << 30))
        return f"{self.name} {self.compute_capability} {self.multiprocessors} SM {gib} GiB"


class Cuda:
    """The calls; ``cudart`` is the module `cuda.bindings.runtime`."""

    def __init__(self, cudart: Any) -> None:
        self._cudart = cudart

    def why_no_device(self) -> str:
        """Return why this process has no GPU, or nothing when it has one."""
        error, count = self._cudart.cudaGetDeviceCount()
        if int(error) != 0:
            return f"CUDA finds no GPU: {self._text(error)}"
        return "" if count else "CUDA finds no GPU"

    def device(self) -> Device:
        """Return the device of this process: its first, for it sees but one."""
        cudart = self._cudart
        self.checked(cudart.cudaSetDevice(0))
        found = self.checked(cudart.cudaGetDeviceProperties(0))
        version = self.checked(cudart.cudaDriverGetVersion())
        name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
        return Device(
            name=name.rstrip("\0"),
            compute_capability=f"{found.major}.{found.minor}",
            multiprocessors=int(found.multiProcessorCount),
            memory_bytes=int(found.totalGlobalMem),
            driver=f"{version // 1000}.{version % 1000 // 10}",
        )

    def check_alive(self) -> None:
        """Raise EngineLost when an error of before stays for good; forget one that does not."""
        self._cudart.cudaGetLastError()
        self.checked(self._cudart.cudaDeviceSynchronize())

    def stream(self) -> Stream:
        """Return a new stream that waits for no other."""
        cudart = self._cudart
        return Stream(
            self, self.checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
        )

    def device_memory(self, nbytes: int) -> int:
        """Return the address of new memory on the device, aligned to 256 bytes."""
        return int(self.checked(self._cudart.cudaMalloc(nbytes), wanted=nbytes))

    def free_device_memory(self, address: int) -> None:
        self.checked(self._cudart.cudaFree(address))

    def pinned_memory(self, nbytes: int) -> int:
        """Return the address of new memory on the host that the device copies from directly."""
        cudart = self._cudart
        taken = cudart.cudaHostAlloc(nbytes, cudart.cudaHostAllocDefault)
        return int(self.checked(taken, wanted=nbytes))

    def free_pinned_memory(self, address: int) -> None:
        self.checked(self._cudart.cudaFreeHost(address))

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.checked(self._cudart.cudaMemcpyAsync(target, source, nbytes, kind, stream.handle))

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.checked(self._cudart.cudaMemcpyAsync(target, source, nbytes, kind, stream.handle))

    def synchronize(self, handle: Any) -> None:
        self.checked(self._cudart.cudaStreamSynchronize(handle))

    def destroy(self, handle: Any) -> None:
        self.checked(self._cudart.cudaStreamDestroy(handle))

    def checked(self, answer: tuple[Any, ...], *, wanted: int | None = None) -> Any:
        """Return what a call gave; its error becomes OutOfMemory, EngineLost or EngineFailed."""
        error, *values = answer
        if int(error) == 0:
            return values[0] if len(values) == 1 else tuple(values)
        text = self._text(error)
        if int(error) == CUDA_OUT_OF_MEMORY:
            raise OutOfMemory(f"CUDA error 2: {text}{self._asked(wanted)}")
        if error.name in STICKY:
            raise EngineLost(f"CUDA error {int(error)}: {text}. This process cannot go on.")
        raise EngineFailed(f"CUDA error {int(error)}: {text}")

    def _asked(self, wanted: int | None) -> str:
        """Return how much was asked for, and how much of the device nobody has taken."""
        if wanted is None:
            return ""
        _error, free, _total = self._cudart.cudaMemGetInfo()
        return f"; {wanted} bytes were asked for, {free} are free"

    def _text(self, error: Any) -> str:
        _, said = self._cudart.cudaGetErrorString(error)
        return f"{error.name}: {said.decode() if isinstance(said, bytes) else said}"


class Stream:
    """A queue of work on the device, done in order."""

    def __init__(self, cuda: Cuda, handle: Any) -> None:
        self._cuda, self.handle = cuda, handle

    def __int__(self) -> int:
        return int(self.handle)

    def synchronize(self) -> None:
        """Wait until everything in it is done."""
        self._cuda.synchronize(self.handle)

    def close(self) -> None:
        self._cuda.destroy(self.handle)


class Scratch:
    """Device memory for what an engine computes in between: one block, shared by all engines of a
    process, for only one of them runs at a time.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._address = 0
        self.nbytes = 0

    def block(self, nbytes: int) -> int:
        """Return the address of at least ``nbytes``. Nothing may run: the block may move."""
        if self._address == 0 or nbytes > self.nbytes:
            # Not both at once: the larger block may need the room of the smaller one.
            self.close()
            self._address = self._cuda.device_memory(max(nbytes, 1))
            self.nbytes = nbytes
        return self._address

    def close(self) -> None:
        if self._address:
            address, self._address, self.nbytes = self._address, 0, 0
            self._cuda.free_device_memory(address)


class Staging:
    """One tensor's memory: on the device, and pinned on the host; as large as was ever needed."""

    def __init__(self, cuda: Cuda, dtype: str) -> None:
        self._cuda, self._dtype = cuda, np.dtype(dtype)
        self.address = 0
        self._pinned = 0
        self.nbytes = 0

    def reserve(self, shape: tuple[int, ...]) -> None:
        """Make room for ``shape``. Nothing may run: the memory may move."""
        wanted = max(1, self.size_of(shape))
        if wanted <= self.nbytes:
            return
        self.close()
        self.address = self._cuda.device_memory(wanted)
        self._pinned = self._cuda.pinned_memory(wanted)
        self.nbytes = wanted

    def view(self, shape: tuple[int, ...]) -> Array:
        """Return the pinned memory as an array; it is overwritten by the next batch."""
        nbytes = self.size_of(shape)
        raw = np.ctypeslib.as_array((ctypes.c_ubyte * max(1, nbytes)).from_address(self._pinned))
        return raw[:nbytes].view(self._dtype).reshape(shape)

    def to_device(self, shape: tuple[int, ...], stream: Stream) -> None:
        self._cuda.copy_to_device(self.address, self._pinned, self.size_of(shape), stream)

    def to_host(self, shape: tuple[int, ...], stream: Stream) -> None:
        self._cuda.copy_to_host(self._pinned, self.address, self.size_of(shape), stream)

    def size_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of ``shape``."""
        return int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize

    def close(self) -> None:
        address, pinned = self.address, self._pinned
        self.address = self._pinned = self.nbytes = 0
        if address:
            self._cuda.free_device_memory(address)
        if pinned:
            self._cuda.free_pinned_memory(pinned)
