"""ONNX files become plans with TensorRT's real parser and builder, which need no GPU."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.contract.errors import ConfigError, FleetError
from tests.onnx_models import DIGITS, linear, running_sum
from tests.support.building import built as variants
from tests.support.building import digits_folder, model_folder
from tests.support.mlp import write_mlp
from tests.support.tensorrt_builder import QUIET, workshop
from workers.build.store import variants_folder
from workers.children import Ended, ended_by_signals
from workers.models import ModelSpec, load_model
from workers.plans.builder import Built, build

pytestmark = pytest.mark.filterwarnings(QUIET)


def plan_of(
    spec: ModelSpec, precision: str = "fp32", *, tell: Callable[[float], None] = lambda _share: None
) -> Built:
    made = workshop()
    onnx_file = spec.engines[precision]
    assert onnx_file is not None
    return build(made.trt, made.journal, spec, onnx_file, tell=tell)


def spec_of(tmp_path: Path, write: Callable[[Path], None], toml: str = "") -> ModelSpec:
    return load_model(model_folder(tmp_path, write, toml=toml))


def unknown_operator(path: Path) -> None:
    linear(path)
    model = onnx.load(str(path))
    model.graph.node[0].op_type, model.graph.node[0].domain = "Frobnicate", "made.up"
    model.graph.node[0].name = "the strange one"
    model.opset_import.append(helper.make_opsetid("made.up", 1))
    path.write_bytes(model.SerializeToString())


def strings(path: Path) -> None:
    """A weight whose type TensorRT has not."""
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "doubles",
        [helper.make_tensor_value_info("x", TensorProto.COMPLEX64, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.COMPLEX64, ["n", 4])],
        [numpy_helper.from_array(np.ones(4, np.complex64), "w")],
    )
    path.write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())


def cut_short(path: Path) -> None:
    linear(path)
    path.write_bytes(path.read_bytes()[:-20])


def test_a_plan_has_a_profile_for_each_batch_size_and_tells_its_progress() -> None:
    spec = load_model(DIGITS)
    done: list[float] = []

    plan = plan_of(spec, tell=done.append).plan

    assert len(plan) > 10_000
    assert done == sorted(done)
    assert 0.5 < done[-1] <= 1
    # Each profile has kernels of its own.
    one = dataclasses.replace(spec, max_batch_size=1)
    assert len(plan) > 2 * len(plan_of(one).plan)


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
def test_a_plan_keeps_the_precision_of_its_file(tmp_path: Path, precision: str) -> None:
    folder = model_folder(tmp_path, write_mlp)
    digits = digits_folder(tmp_path)
    variants(folder, precision, calibrate=digits / "calibration.npz")
    (path,) = variants_folder(folder).glob(f"{precision}-*.onnx")
    spec = dataclasses.replace(load_model(folder), engines={precision: path}, max_batch_size=8)

    size = len(plan_of(spec, precision).plan)

    parameters = 64 * 1024 + 1024 * 1024 + 1024 * 10
    bytes_each = 2 if precision == "fp16" else 1
    assert parameters * bytes_each < size < parameters * (bytes_each + 1.9)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (unknown_operator, r"TensorRT cannot read it: .*Frobnicate"),
        (strings, "TensorRT cannot read it"),
        (cut_short, "TensorRT cannot read it: .*Failed to parse"),
    ],
)
def test_a_file_that_is_no_model_of_tensorrts_is_one_clear_error(
    tmp_path: Path, write: Callable[[Path], None], says: str
) -> None:
    spec = spec_of(tmp_path, linear)
    path = spec.engines["fp32"]
    assert path is not None
    write(path)

    with pytest.raises(ConfigError, match=says) as raised:
        plan_of(spec)

    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_file_that_the_parser_takes_for_an_empty_network_is_refused(
    tmp_path: Path, content: bytes
) -> None:
    spec = spec_of(tmp_path, linear)
    path = spec.engines["fp32"]
    assert path is not None
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="holds no model"):
        plan_of(spec)


def test_a_profile_for_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    toml = "[inputs.xx]\nmin_shape = [1, 4]\nmax_shape = [1, 4]\n"
    spec = spec_of(tmp_path, linear, toml)

    with pytest.raises(ConfigError, match=r"has no input 'xx'\. Did you mean 'x'"):
        plan_of(spec)


def test_a_workspace_that_no_kernel_fits_in_is_named() -> None:
    spec = load_model(DIGITS)
    spec = dataclasses.replace(spec, plans=dataclasses.replace(spec.plans, workspace_bytes=1))

    with pytest.raises(ConfigError, match=r"workspace_bytes below .plans. is 1; raise it"):
        plan_of(spec)


def test_rows_that_may_belong_together_have_one_profile_for_any_number(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, running_sum)

    assert len(plan_of(spec).plan) > 0


def test_a_signal_ends_a_build() -> None:
    spec = load_model(DIGITS)
    done: list[float] = []
    started, sent = threading.Event(), threading.Event()

    def tell(share: float) -> None:
        done.append(share)
        started.set()
        sent.wait(30)

    def interrupt() -> None:
        started.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        sent.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(Ended), ended_by_signals():
        plan_of(spec, tell=tell)

    assert done[-1] < 0.8


def test_what_tensorrt_says_reaches_the_error() -> None:
    spec = load_model(DIGITS)
    spec = dataclasses.replace(spec, plans=dataclasses.replace(spec.plans, workspace_bytes=1))

    with pytest.raises(FleetError, match="no tactics to implement the operation"):
        plan_of(spec)
