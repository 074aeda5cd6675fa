"""The engine on TensorRT's and CUDA's rules, over the memory of this machine: no GPU is here.

What a real GPU computes is not shown by these tests; docs/b300.md lists what only a GPU can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.contract.errors import ConfigError, EngineFailed, FleetError, OutOfMemory
from tests.onnx_models import linear
from tests.support.building import model_folder
from tests.support.cuda_on_host import CudaError, CudaOnHost
from tests.support.tensorrt_on_host import WEIGHTS_BYTES, TensorRtOnHost, plan
from workers.batching.stacking import Array
from workers.engines.base import EngineLost, EngineRefused
from workers.engines.nvidia import Nvidia
from workers.engines.trt import TensorRtEngine
from workers.models import ModelSpec, load_model
from workers.plans import store
from workers.plans.builder import build
from workers.plans.making import workshop_of

DECLARED = "[inputs.x]\nbatch_axis = 0\n[outputs.y]\nbatch_axis = 0\n"
SIXTEEN_BYTES_A_ROW = 16


class Host:
    """A process with a made-up GPU, and models whose plans lie in the cache."""

    def __init__(self, folder: Path, cuda: CudaOnHost) -> None:
        self.cuda = cuda
        self.trt = TensorRtOnHost(cuda)
        self.nvidia = Nvidia(self.trt, cuda)
        self._folder = folder

    def spec(
        self, plan: bytes, *, name: str = "my", toml: str = DECLARED, top: str = ""
    ) -> ModelSpec:
        folder = model_folder(self._folder, linear, name=name, toml=toml)
        file = folder / "model.toml"
        file.write_text(f"{top}{file.read_text()}")
        spec = load_model(folder)
        place = store.plans_folder(folder)
        place.mkdir(parents=True)
        recipe = workshop_of(self.nvidia).recipe(spec, "fp32")
        store.publish(place, recipe, plan, build_s=0.0)
        return spec

    def open(self, plan: bytes, **about: Any) -> TensorRtEngine:
        return TensorRtEngine(self.spec(plan, **about), "fp32", threads=1, nvidia=self.nvidia)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    return Host(tmp_path, CudaOnHost())


def rows(count: int) -> dict[str, Array]:
    return {"x": np.arange(count * 4, dtype=np.float32).reshape(count, 4)}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_a_batch_is_padded_to_the_tightest_profile_and_cut_back(host: Host, count: int) -> None:
    engine = host.open(plan((1, 1), (4, 4), (8, 8)))
    host.trt.executed.clear()

    answer = engine.run(rows(count))["y"]

    np.testing.assert_array_equal(answer, rows(count)["x"] * 2)
    padded = 1 if count == 1 else 4 if count <= 4 else 8
    assert host.trt.executed == [{"x": (padded, 4)}]


def test_a_batch_in_a_profile_of_any_number_is_not_padded(host: Host) -> None:
    engine = host.open(plan((1, 8)))

    engine.run(rows(3))

    assert host.trt.executed[-1] == {"x": (3, 4)}


def test_every_profile_is_run_at_its_largest_before_the_first_job(host: Host) -> None:
    host.open(plan((1, 1), (4, 4), (8, 8)))

    assert host.trt.executed == [{"x": (1, 4)}, {"x": (4, 4)}, {"x": (8, 4)}]


def test_runs_take_no_memory_once_every_profile_is_warm(host: Host) -> None:
    engine = host.open(plan((1, 1), (8, 8)))
    taken, contexts = host.cuda.mallocs, host.trt.contexts_made

    for count in (8, 1, 5, 8):
        engine.run(rows(count))

    assert host.cuda.mallocs == taken
    assert host.trt.contexts_made == contexts == 2


def test_the_engines_of_a_process_share_one_block_of_scratch_memory(host: Host) -> None:
    small = host.open(plan((1, 8), scratch=(1000,)), name="small")
    buffers = 2 * 8 * SIXTEEN_BYTES_A_ROW
    assert host.cuda.taken_bytes == 1000 + buffers

    large = host.open(plan((1, 8), scratch=(5000,)), name="large")

    assert host.cuda.taken_bytes == 5000 + 2 * buffers
    np.testing.assert_array_equal(small.run(rows(2))["y"], rows(2)["x"] * 2)
    np.testing.assert_array_equal(large.run(rows(2))["y"], rows(2)["x"] * 2)


def test_it_is_closed_in_the_order_that_tensorrt_asks_for(host: Host) -> None:
    engine = host.open(plan((1, 1), (8, 8)))

    engine.close()

    assert host.trt.freed == ["context", "context", "engine", "runtime"]
    assert host.cuda.host_blocks == {}
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(rows(1))


def test_half_precision_goes_in_and_out_as_it_is(host: Host) -> None:
    engine = host.open(plan((1, 8), kind="HALF"))

    answer = engine.run({"x": np.ones((2, 4), np.float16)})["y"]

    assert answer.dtype == np.float16
    assert engine.inputs[0].dtype == "float16"
    assert engine.inputs[0].shape == (None, 4)


def test_answers_stay_as_they_are_when_the_next_batch_runs(host: Host) -> None:
    engine = host.open(plan((1, 8)))

    first = engine.run(rows(2))["y"]
    engine.run({"x": np.zeros((2, 4), np.float32)})

    np.testing.assert_array_equal(first, rows(2)["x"] * 2)


def test_a_shape_outside_of_every_profile_is_refused_with_what_was_built_for(host: Host) -> None:
    engine = host.open(plan((1, 8)))

    with pytest.raises(EngineRefused, match=r"x \[9, 4\]; it was built for x \[1, 4\] to \[8, 4\]"):
        engine.run(rows(9))


# -- what cannot be provoked without a GPU: TensorRT returns nothing, and says why in its log


def test_no_builder_is_a_typed_error(host: Host, tmp_path: Path) -> None:
    spec = load_model(model_folder(tmp_path, linear))
    host.trt.faults["Builder"] = "no device"

    with pytest.raises(ConfigError, match=r"TensorRT built nothing .*no device"):
        build(host.trt, host.nvidia.journal, spec, spec.folder / "model.onnx")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Error Code 10: no implementation", ConfigError),
        ("Error Code 1: Cuda Runtime (out of memory)", OutOfMemory),
    ],
)
def test_a_build_that_gives_nothing_is_a_typed_error(
    host: Host, tmp_path: Path, words: str, kind: type[FleetError]
) -> None:
    toml = "[inputs.x]\nmin_shape = [1, 4]\nmax_shape = [1, 4]\n"
    spec = load_model(model_folder(tmp_path, linear, toml=toml))
    host.trt.faults["build_serialized_network"] = words

    with pytest.raises(kind) as raised:
        build(host.trt, host.nvidia.journal, spec, spec.folder / "model.onnx")

    assert words in str(raised.value)


def test_no_runtime_is_a_typed_error(host: Host) -> None:
    host.trt.faults["Runtime"] = "no device"

    with pytest.raises(EngineFailed, match="there is no runtime: no device; pybind11"):
        host.open(plan((1, 8)))


def test_a_profile_that_is_refused_is_a_typed_error(host: Host, tmp_path: Path) -> None:
    spec = load_model(model_folder(tmp_path, linear))
    host.trt.faults["add_optimization_profile"] = "MIN<=OPT<=MAX"

    with pytest.raises(ConfigError, match=r"a profile is refused: .*MIN<=OPT<=MAX"):
        build(host.trt, host.nvidia.journal, spec, spec.folder / "model.onnx")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed", EngineFailed),
        ("IRuntime: Error Code 1: Cuda Runtime (out of memory)", OutOfMemory),
    ],
)
def test_a_plan_that_is_not_loaded_is_a_typed_error(
    host: Host, words: str, kind: type[FleetError]
) -> None:
    host.trt.faults["deserialize_cuda_engine"] = words

    with pytest.raises(kind, match="its plan cannot be loaded") as raised:
        host.open(plan((1, 8)))

    assert words in str(raised.value)


def test_no_context_is_no_memory(host: Host) -> None:
    host.trt.faults["create_execution_context"] = "Error Code 2: OutOfMemory"

    with pytest.raises(OutOfMemory, match="no room for a context: Error Code 2: OutOfMemory"):
        host.open(plan((1, 8)))

    assert host.cuda.device_blocks == {}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("enqueueV3: Error Code 3: API Usage Error", EngineRefused),
        ("Error Code 1: Cuda Runtime (out of memory)", OutOfMemory),
        ("", EngineRefused),
    ],
)
def test_a_run_that_is_refused_is_a_typed_error_and_the_next_has_a_new_context(
    host: Host, words: str, kind: type[FleetError]
) -> None:
    engine = host.open(plan((1, 8)))
    host.trt.faults["execute_async_v3"] = words

    with pytest.raises(kind, match="the run was refused"):
        engine.run(rows(1))
    host.trt.faults.clear()

    np.testing.assert_array_equal(engine.run(rows(1))["y"], rows(1)["x"] * 2)
    assert host.trt.contexts_made == 2


def test_an_error_of_cuda_that_stays_ends_the_process(host: Host) -> None:
    engine = host.open(plan((1, 8)))
    host.cuda.sticky = CudaError.cudaErrorIllegalAddress

    with pytest.raises(EngineLost, match="CUDA error 700: cudaErrorIllegalAddress"):
        engine.run(rows(1))


def test_a_refused_run_behind_which_an_error_stays_ends_the_process(host: Host) -> None:
    engine = host.open(plan((1, 8)))
    host.trt.faults["execute_async_v3"] = "cudaError 700"
    host.cuda.faults["cudaDeviceSynchronize"] = CudaError.cudaErrorIllegalAddress

    with pytest.raises(EngineLost):
        engine.run(rows(1))


def test_memory_that_runs_out_in_a_run_is_out_of_memory_and_the_process_goes_on(host: Host) -> None:
    engine = host.open(plan((1, 8)))
    host.cuda.faults["cudaStreamSynchronize"] = CudaError.cudaErrorMemoryAllocation

    with pytest.raises(OutOfMemory, match="CUDA error 2"):
        engine.run(rows(1))
    host.cuda.faults.clear()

    np.testing.assert_array_equal(engine.run(rows(1))["y"], rows(1)["x"] * 2)


def test_profiles_that_do_not_fit_are_left_out_and_smaller_ones_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    host = Host(tmp_path, CudaOnHost(memory_bytes=2000))
    engine = host.open(plan((1, 1), (4, 4), (8, 8), scratch=(100, 400, 100_000)))

    np.testing.assert_array_equal(engine.run(rows(4))["y"], rows(4)["x"] * 2)
    with pytest.raises(OutOfMemory, match="100000 bytes were asked for"):
        engine.run(rows(5))
    np.testing.assert_array_equal(engine.run(rows(3))["y"], rows(3)["x"] * 2)


def test_one_row_that_does_not_fit_is_refused_at_load_and_leaves_no_memory_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    host = Host(tmp_path, CudaOnHost(memory_bytes=2000))

    with pytest.raises(OutOfMemory, match="4000 bytes were asked for"):
        host.open(plan((1, 1), scratch=(4000,)))

    assert host.cuda.taken_bytes == 0
    assert host.cuda.host_blocks == {}


def test_a_limit_below_what_weights_and_buffers_take_is_refused_with_what_takes_most(
    host: Host,
) -> None:
    buffers = 2 * 8 * SIXTEEN_BYTES_A_ROW
    total = WEIGHTS_BYTES + buffers + 1000
    limited = f"memory_limit_bytes = {total - 1}\nmemory_first_chunk_bytes = 256\n"

    with pytest.raises(ConfigError, match=f"take {total} on the GPU, 1000 .*; my fp32 takes"):
        host.open(plan((1, 8), scratch=(1000,)), top=limited)

    enough = f"memory_limit_bytes = {total}\nmemory_first_chunk_bytes = 256\n"
    host.open(plan((1, 8), scratch=(1000,)), name="other", top=enough).run(rows(8))


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"source": {"location": "HOST"}}, "'x' lies on the host"),
        ({"kind": "BF16"}, "'x' is BF16, which numpy cannot hold"),
        ({"output": {"depends_on_data": True}}, "how large output 'y' is"),
    ],
)
def test_what_this_engine_cannot_serve_is_said_when_it_is_opened(
    host: Host, about: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        host.open(plan((1, 8), **about))


def test_an_output_without_a_part_for_each_row_is_refused_where_rows_were_padded(
    host: Host,
) -> None:
    engine = host.open(plan((4, 4), output={"shape": [2, 8]}))

    with pytest.raises(EngineRefused, match="has not one part for each of 4 rows"):
        engine.run(rows(3))
