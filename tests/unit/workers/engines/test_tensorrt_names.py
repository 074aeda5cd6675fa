"""Our files use the names that TensorRT 11.4 and CUDA have: no machine here can run them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tensorrt_on_host
from tests.support.cuda_on_host import CudaOnHost
from tests.support.tensorrt_names import FACTS, checked, problems
from workers.engines import cuda

WORKERS = Path(cuda.__file__).parent.parent

#: Every file that touches TensorRT's module or one of its objects.
FILES = ("engines/trt.py", "engines/trt_journal.py", "engines/nvidia.py", "plans/builder.py")


def source(name: str) -> str:
    return (WORKERS / name).read_text(encoding="utf-8")


def cudart() -> Any:
    """Return CUDA's real module, which needs no driver to be imported."""
    if sys.platform != "linux":
        pytest.skip("cuda-bindings is for Linux and Windows")
    return pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is in extra `test`")


@pytest.mark.parametrize("name", FILES)
def test_every_name_of_tensorrt_is_one_that_it_has(name: str) -> None:
    assert problems(source(name)) == []


def test_no_other_file_touches_tensorrt() -> None:
    touching = [
        path.relative_to(WORKERS).as_posix()
        for path in WORKERS.rglob("*.py")
        if any(
            each.startswith(("trt.", "self._trt.", "gpu.trt."))
            for each in checked(path.read_text())
        )
    ]

    assert set(touching) <= {*FILES, "plans/making.py"}


def test_most_of_what_an_engine_calls_is_looked_at() -> None:
    names = checked(source("engines/trt.py")) | checked(source("plans/builder.py"))

    assert {
        "IExecutionContext.execute_async_v3",
        "IExecutionContext.set_device_memory",
        "ICudaEngine.get_tensor_profile_shape",
        "Runtime.deserialize_cuda_engine",
        "IBuilderConfig.set_timing_cache",
        "IOptimizationProfile.set_shape",
        "OnnxParser.parse_from_file",
        "ParserError.node_operator",
        "ITensor.is_shape_tensor",
        "trt.BuilderFlag",
    } <= names


@pytest.mark.parametrize(
    ("name", "written", "misspelt", "says"),
    [
        ("engines/trt.py", "execute_async_v3(", "execute_async_v4(", "has no execute_async_v4"),
        ("engines/trt.py", "USER_MANAGED", "USER_MANGED", "has no USER_MANGED"),
        ("engines/trt.py", "TensorIOMode.INPUT", "TensorIoMode.INPUT", "has no TensorIoMode"),
        ("engines/trt.py", "num_io_tensors", "num_bindings", "ICudaEngine has no num_bindings"),
        (
            "engines/trt.py",
            "get_device_memory_size_for_profile_v2(index)",
            "get_device_memory_size_for_profile_v2(index, 0)",
            "does not take",
        ),
        ("plans/builder.py", "BuilderFlag.TF32", "BuilderFlag.FP16", "BuilderFlag has no FP16"),
        ("plans/builder.py", "create_network(0)", "create_network(flag=0)", "does not take"),
        ("plans/builder.py", "error.desc()", "error.description()", "has no description"),
        ("plans/builder.py", "def step_complete(", "def step_completed(", "has no step_completed"),
        ("engines/trt_journal.py", "Severity.ERROR", "Severity.ERR", "has no ERR"),
        ("engines/trt_journal.py", "(self, severity: Any, msg: str)", "(self, msg: str)", "called"),
    ],
)
def test_a_misspelt_name_is_found(name: str, written: str, misspelt: str, says: str) -> None:
    text = source(name)
    assert written in text

    found = problems(text.replace(written, misspelt))

    assert any(says in problem for problem in found), found


def test_a_call_of_something_unknown_is_found() -> None:
    found = problems("def run(thing):\n    thing.execute_async_v3(1)\n")

    assert found == ["line 2: the class of thing is not known"]


def test_every_name_of_cuda_is_one_that_it_has() -> None:
    module = cudart()
    used = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(source("engines/cuda.py")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).removeprefix("self._").startswith("cudart.")
    }

    for name in used:
        owner = module
        for part in name.removeprefix("self._").split(".")[1:]:
            assert hasattr(owner, part), name
            owner = getattr(owner, part)
    assert len(used) > 15


def test_every_error_that_ends_a_process_is_one_of_cudas() -> None:
    known = {error.name: int(error) for error in cudart().cudaError_t}

    assert {name: known.get(name) for name in cuda.STICKY} == cuda.STICKY


@pytest.mark.parametrize(
    ("stand_in", "kind"),
    [
        (tensorrt_on_host.CudaEngine, "ICudaEngine"),
        (tensorrt_on_host.ExecutionContext, "IExecutionContext"),
        (tensorrt_on_host.Runtime, "Runtime"),
        (tensorrt_on_host.Builder, "Builder"),
    ],
)
def test_what_stands_for_tensorrt_in_tests_has_no_call_that_it_has_not(
    stand_in: type, kind: str
) -> None:
    calls = {name for name in vars(stand_in) if not name.startswith("_")}

    assert calls
    assert calls <= FACTS["classes"][kind]["methods"].keys()


def test_what_stands_for_cuda_in_tests_has_no_call_that_it_has_not() -> None:
    calls = {name for name in vars(CudaOnHost) if name.startswith("cuda")}

    assert len(calls) > 15
    assert all(hasattr(cudart(), name) for name in calls)
