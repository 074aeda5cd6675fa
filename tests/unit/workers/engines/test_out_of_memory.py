"""What runtimes really say when memory runs out, and what only looks like it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import onnx_models
from workers.engines.out_of_memory import is_out_of_memory, says_out_of_memory

ROOT = onnx_models.DIGITS.parent.parent.parent
ORT = "[ONNXRuntimeError] : "
NODE = "Non-zero status code returned while running MatMul node. Name:'' Status Message: "
ARENA = "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::"


@pytest.mark.parametrize(
    "text",
    [
        # ONNX Runtime on the CPU: the arena's limit, the system's, the C++ library's.
        f"{ORT}1 : FAIL : {NODE}{ARENA}AllocateRawInternal(size_t, bool, onnxruntime::Stream*) "
        "Available memory of 25952256 is smaller than requested bytes of 33554432",
        f"{ORT}1 : FAIL : {NODE}{ARENA}AllocateRawInternal(size_t, bool, onnxruntime::Stream*) "
        "Failed to allocate memory for requested buffer of size 268435456\n",
        f"{ORT}6 : RUNTIME_EXCEPTION : Exception during initialization: {ARENA}AllocateRawInternal"
        "(size_t, bool) Failed to allocate memory for requested buffer of size 4500000000000000000",
        f"{ORT}6 : RUNTIME_EXCEPTION : {NODE}std::bad_alloc",
        f"{ORT}6 : RUNTIME_EXCEPTION : {NODE}bad allocation",
        # ONNX Runtime with CUDA.
        f"{ORT}6 : RUNTIME_EXCEPTION : {NODE}CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; "
        "file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_allocator.cc ; line=47 ; "
        "expr=cudaMalloc((void**)&p, size);",
        f"{ORT}1 : FAIL : {NODE}CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
        f"{ORT}1 : FAIL : {NODE}CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0",
        # TensorRT's log and error recorder.
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "Requested amount of GPU memory (8589934592 bytes) could not be allocated. There may not "
        "be enough free memory for allocation to succeed.",
        "[executionContext.cpp::initializeExecutionContext::602] Error Code 2: OutOfMemory "
        "(no further information)",
        "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (cudaError 2: out of memory)",
        "FAILED_ALLOCATION",
        # CUDA itself.
        "cudaError_t.cudaErrorMemoryAllocation",
        "CUresult.CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity)",
    ],
)
def test_a_text_of_a_runtime_that_ran_out_of_memory_is_known(text: str) -> None:
    assert says_out_of_memory(text)
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        f"{ORT}2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the following "
        "indices\n index: 1 Got: 5 Expected: 4\n Please fix either the inputs/outputs or the "
        "model.",
        f"{ORT}2 : INVALID_ARGUMENT : Invalid input name: std::bad_alloc",
        f"{ORT}1 : FAIL : {NODE}CUDA failure 209: no kernel image is available for execution",
        f"{ORT}1 : FAIL : {NODE}CUDA failure 700: an illegal memory access was encountered",
        f"{ORT}1 : FAIL : {NODE}CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR",
        "Error Code 1: Cuda Runtime (an illegal memory access was encountered)",
        "(cudaError 209: no kernel image is available)",
        "(cudaError 35: CUDA driver version is insufficient for CUDA runtime version)",
        "setDeviceMemoryV2: The provided memory size is too small. Provided 1, required 2",
        "Skipping tactic 0x3 due to insufficient memory on requested size of 1024 detected",
        "memory must be aligned on 256",
        f"{ORT}6 : RUNTIME_EXCEPTION : {NODE}Integer overflow",
        "index 99 is out of bounds",
        "",
    ],
)
def test_what_a_smaller_batch_would_not_mend_is_no_lack_of_memory(text: str) -> None:
    assert not says_out_of_memory(text)
    assert not is_out_of_memory(RuntimeError(text))


def test_numpy_and_python_raise_a_memory_error() -> None:
    with pytest.raises(MemoryError) as raised:
        np.zeros(1 << 60, dtype=np.int8)

    assert is_out_of_memory(raised.value)
    assert type(raised.value) is not MemoryError
    assert is_out_of_memory(MemoryError())


#: Runs one model in one session until it is refused, and once more with what fitted before.
SCRIPT = """
import json, resource, sys
import numpy as np, onnxruntime as ort
from workers.engines.onnxrt import register_arena
from workers.engines.out_of_memory import is_out_of_memory

path, how = sys.argv[1:]
options = ort.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
options.enable_cpu_mem_arena = how != "system without arena"
if how == "arena":
    register_arena(64 << 20, first_chunk_bytes=1 << 20)
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.enable_mem_pattern = False
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
run = lambda rows: session.run(None, {"x": np.ones((rows, 1), np.float32)})
run(2)
if how != "arena":
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    run(128)
except Exception as error:
    found = {"is": is_out_of_memory(error), "text": str(error), "type": type(error).__name__}
else:
    found = {}
run(4)
try:
    session.run(None, {"x": np.ones((1, 3), np.float32)})
except Exception as error:
    found["other"] = is_out_of_memory(error)
print(json.dumps(found))
"""


def provoked(tmp_path: Path, how: str) -> Any:
    onnx_models.wide(tmp_path / "model.onnx", width=1 << 18)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model.onnx"), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not kept elsewhere")
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("arena", "Available memory of"),
        ("system with arena", "Failed to allocate memory for requested buffer"),
        ("system without arena", "std::bad_alloc"),
    ],
)
def test_onnxruntime_that_really_runs_out_of_memory_is_understood(
    tmp_path: Path, how: str, says: str
) -> None:
    found = provoked(tmp_path, how)

    assert found["is"] is True
    assert says in found["text"]
    # A wrong shape, refused by the same runtime in the same process.
    assert found["other"] is False
