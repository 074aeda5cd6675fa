"""Small real ONNX models, each with one property that breaks a naive batcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common import float16
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

DIGITS = Path(__file__).resolve().parent.parent / "configs" / "models" / "digits"

FLOAT, INT64, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING

Tensor: TypeAlias = tuple[str, int, list[int | str]]


def linear(path: Path, *, rows: int | str = "n") -> None:
    """``y = x @ w``: rows do not touch each other; a number of ``rows`` fixes the batch."""
    weights = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    _save(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs=[("x", FLOAT, [rows, 4])],
        outputs=[("y", FLOAT, [rows, 3])],
        constants={"w": weights},
    )


def baked_reshape(path: Path) -> None:
    """The batch axis is dynamic by name, and fixed at 1 by a constant inside."""
    _save(
        path,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        inputs=[("x", FLOAT, ["n", 4])],
        outputs=[("y", FLOAT, ["n", 4])],
        constants={"shape": np.array([1, 4], np.int64)},
    )


def state_on_axis_one(path: Path) -> None:
    """As in voice models: the state's batch axis is 1, and ``rate`` is a scalar for all rows."""
    _save(
        path,
        [
            helper.make_node("Cast", ["rate"], ["factor"], to=FLOAT),
            helper.make_node("Mul", ["x", "factor"], ["scaled"]),
            helper.make_node("ReduceSum", ["state", "first"], ["level"], keepdims=0),
            helper.make_node("Add", ["scaled", "level"], ["y"]),
            helper.make_node("Add", ["state", "x"], ["next"]),
        ],
        inputs=[("x", FLOAT, ["b", 3]), ("state", FLOAT, [2, "b", 3]), ("rate", INT64, [])],
        outputs=[("y", FLOAT, ["b", 3]), ("next", FLOAT, [2, "b", 3])],
        constants={"first": np.array([0], np.int64)},
    )


def running_sum(path: Path) -> None:
    """The first axis is time: each step adds to the ones before."""
    _save(
        path,
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        inputs=[("x", FLOAT, ["t", 3])],
        outputs=[("y", FLOAT, ["t", 3])],
        constants={"axis": np.array(0, np.int64)},
    )


def positive_pixels(path: Path) -> None:
    """Finds things: the answer has as many rows as were found, not as were sent."""
    _save(
        path,
        [
            helper.make_node("NonZero", ["x"], ["found"]),
            helper.make_node("Transpose", ["found"], ["y"]),
        ],
        inputs=[("x", FLOAT, ["n", 4])],
        outputs=[("y", INT64, ["found", 2])],
    )


def lookup(path: Path) -> None:
    """A table of five rows: an index outside of it is refused while the batch runs."""
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    _save(
        path,
        [helper.make_node("Gather", ["table", "ids"], ["y"], axis=0)],
        inputs=[("ids", INT64, ["n", 3])],
        outputs=[("y", FLOAT, ["n", 3, 2])],
        constants={"table": table},
    )


def lstm(path: Path) -> None:
    """An LSTM over ``[time, rows, 2]``: a batch of no rows may abort the process."""
    rng = np.random.default_rng(3)
    hidden = 4
    _save(
        path,
        [
            helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], hidden_size=hidden),
            helper.make_node("Squeeze", ["last", "zero"], ["y"]),
        ],
        inputs=[("x", FLOAT, ["t", "n", 2])],
        outputs=[("y", FLOAT, ["n", hidden])],
        constants={
            "w": rng.standard_normal((1, 4 * hidden, 2)).astype(np.float32),
            "r": rng.standard_normal((1, 4 * hidden, hidden)).astype(np.float32),
            "zero": np.array([0], np.int64),
        },
    )


def text(path: Path) -> None:
    """An input that holds text."""
    _save(
        path,
        [helper.make_node("Identity", ["x"], ["y"])],
        inputs=[("x", TEXT, ["n"])],
        outputs=[("y", TEXT, ["n"])],
    )


def wide(path: Path, *, width: int = 4096) -> None:
    """Weights are nothing beside what a row takes while it runs: ``width`` floats, twice."""
    _save(
        path,
        [
            helper.make_node("MatMul", ["x", "w"], ["spread"]),
            helper.make_node("Sigmoid", ["spread"], ["bent"]),
            helper.make_node("ReduceMean", ["bent"], ["y"], axes=[1], keepdims=1),
        ],
        inputs=[("x", FLOAT, ["n", 1])],
        outputs=[("y", FLOAT, ["n", 1])],
        constants={"w": np.linspace(-1, 1, width, dtype=np.float32)[None]},
    )


def wide_sequence(path: Path, *, width: int = 4096) -> None:
    """What a row takes while it runs depends on its length: ``width`` floats for each step."""
    _save(
        path,
        [
            helper.make_node("MatMul", ["x", "w"], ["spread"]),
            helper.make_node("Sigmoid", ["spread"], ["bent"]),
            helper.make_node("ReduceMean", ["bent"], ["y"], axes=[1, 2], keepdims=0),
        ],
        inputs=[("x", FLOAT, ["n", "t", 1])],
        outputs=[("y", FLOAT, ["n"])],
        constants={"w": np.linspace(-1, 1, width, dtype=np.float32)[None]},
    )


def sentences(path: Path) -> None:
    """Token ids with a mask: one vector for each row, one for each token, one number for each pair
    of tokens. What the mask leaves out changes nothing.
    """
    table = np.random.default_rng(5).standard_normal((10, 4)).astype(np.float32)
    _save(
        path,
        [
            helper.make_node("Gather", ["table", "ids"], ["tokens"], axis=0),
            helper.make_node("Cast", ["mask"], ["kept"], to=FLOAT),
            helper.make_node("Unsqueeze", ["kept", "last"], ["weights"]),
            helper.make_node("Mul", ["tokens", "weights"], ["weighted"]),
            helper.make_node("ReduceSum", ["weighted", "second"], ["sum"], keepdims=0),
            helper.make_node("ReduceSum", ["kept", "second"], ["count"], keepdims=1),
            helper.make_node("Div", ["sum", "count"], ["mean"]),
            helper.make_node("Transpose", ["tokens"], ["turned"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["tokens", "turned"], ["pairs"]),
        ],
        inputs=[("ids", INT64, ["n", "s"]), ("mask", INT64, ["n", "s"])],
        outputs=[
            ("mean", FLOAT, ["n", 4]),
            ("tokens", FLOAT, ["n", "s", 4]),
            ("pairs", FLOAT, ["n", "s", "s"]),
        ],
        constants={
            "table": table,
            "second": np.array([1], np.int64),
            "last": np.array([2], np.int64),
        },
    )


def pair(path: Path) -> None:
    """Two texts of lengths of their own, and one number of both."""
    _save(
        path,
        [
            helper.make_node("ReduceSum", ["query", "second"], ["one"], keepdims=0),
            helper.make_node("ReduceSum", ["passage", "second"], ["other"], keepdims=0),
            helper.make_node("Add", ["one", "other"], ["y"]),
        ],
        inputs=[("query", FLOAT, ["n", "q"]), ("passage", FLOAT, ["n", "p"])],
        outputs=[("y", FLOAT, ["n"])],
        constants={"second": np.array([1], np.int64)},
    )


def two_texts(path: Path) -> None:
    """Two texts of lengths of their own, each with a mask, and one number: the difference of the
    largest that each mask lets through.
    """
    largest = [
        [
            helper.make_node("Sub", [f"{text}_mask", "one"], [f"{text}_hidden"]),
            helper.make_node("Mul", [f"{text}_hidden", "far"], [f"{text}_far"]),
            helper.make_node("Add", [text, f"{text}_far"], [f"{text}_seen"]),
            helper.make_node("ReduceMax", [f"{text}_seen"], [f"{text}_most"], axes=[1], keepdims=0),
        ]
        for text in ("query", "passage")
    ]
    _save(
        path,
        [*largest[0], *largest[1], helper.make_node("Sub", ["query_most", "passage_most"], ["y"])],
        inputs=[
            (f"{text}{mask}", FLOAT, ["n", size])
            for mask in ("", "_mask")
            for text, size in (("query", "q"), ("passage", "p"))
        ],
        outputs=[("y", FLOAT, ["n"])],
        constants={"one": np.array([1], np.float32), "far": np.array([1e4], np.float32)},
    )


def reduced(path: Path, *, how: str) -> None:
    """``how`` is an operator that makes one number of the steps of a row, as ``ReduceMax``."""
    # In this opset one of them takes its axes as an input.
    given = ["x", "second"] if how == "ReduceSum" else ["x"]
    axes: dict[str, Any] = {} if how == "ReduceSum" else {"axes": [1]}
    _save(
        path,
        [helper.make_node(how, given, ["y"], keepdims=0, **axes)],
        inputs=[("x", FLOAT, ["n", "t", 3])],
        outputs=[("y", FLOAT, ["n", 3])],
        constants={"second": np.array([1], np.int64)} if len(given) > 1 else {},
    )


def roots(path: Path) -> None:
    """Of numbers below 5, and so of those that a probe makes up, the answer is NaN."""
    _save(
        path,
        [
            helper.make_node("Sub", ["x", "five"], ["above"]),
            helper.make_node("Sqrt", ["above"], ["y"]),
        ],
        inputs=[("x", FLOAT, ["n", "t", 3])],
        outputs=[("y", FLOAT, ["n", "t", 3])],
        constants={"five": np.array([5], np.float32)},
    )


def every_second(path: Path) -> None:
    """The answer is half as long as the row."""
    _save(
        path,
        [helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[2], strides=[2])],
        inputs=[("x", FLOAT, ["n", 1, "t"])],
        outputs=[("y", FLOAT, ["n", 1, "half"])],
    )


def steps_int8(path: Path) -> None:
    """A layer for each step, quantised by the largest value of each run: steps touch each other."""
    weights = np.random.default_rng(6).standard_normal((3, 3)).astype(np.float32)
    plain = path.with_name("plain.onnx")
    _save(
        plain,
        [
            helper.make_node("Add", ["x", "one"], ["shifted"]),
            helper.make_node("MatMul", ["shifted", "w"], ["y"]),
        ],
        inputs=[("x", FLOAT, ["n", "t", 3])],
        outputs=[("y", FLOAT, ["n", "t", 3])],
        constants={"w": weights, "one": np.array([4, -4, 0], np.float32)},
    )
    quantize_dynamic(plain, path, weight_type=QuantType.QUInt8)


def in_fp16(path: Path) -> Path:
    """Write the FP16 twin of a model beside it and return its path."""
    twin = path.with_name(f"{path.stem}_fp16.onnx")
    half = float16.convert_float_to_float16(onnx.load(path), keep_io_types=True)
    onnx.save(half, twin)
    return twin


def digits_int8_static(path: Path) -> None:
    """The digits in INT8, quantised by what 64 held-out images show: rows do not touch."""
    images = np.load(DIGITS / "heldout.npz")["images"][:64, None, None]
    quantize_static(
        DIGITS / "digits.onnx",
        path,
        _Calibration(images.astype(np.float32) / 16),
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,
        },
    )


class _Calibration(CalibrationDataReader):
    """Images of the digits, one at a time."""

    def __init__(self, images: npt.NDArray[Any]) -> None:
        self._images = iter(images)

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        image = next(self._images, None)
        return None if image is None else {"image": image}


def digits_int8(path: Path) -> None:
    """The digits, quantised by the largest value of each batch: rows touch each other."""
    quantize_dynamic(DIGITS / "digits.onnx", path, weight_type=QuantType.QUInt8)


def _save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    constants: dict[str, npt.NDArray[Any]] | None = None,
) -> None:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(*tensor) for tensor in inputs],
        [helper.make_tensor_value_info(*tensor) for tensor in outputs],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
