"""The digits read by a wide perceptron, 64-1024-1024-10: made in about a second with numpy alone.

Its two hidden layers are random; the last is fitted by least squares to the calibration images and
to what the committed network says they show. The same versions of numpy make the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.onnx_models import DIGITS
from workers.engines.base import open_engine
from workers.models import load_model

Array = npt.NDArray[Any]

WIDTH = 1024


def write_mlp(path: Path) -> None:
    """Write the model: ``image`` [rows, 1, 8, 8] to ``scores`` [rows, 10]."""
    images, labels = _training_images()
    rng = np.random.default_rng(7)
    weights = {
        "first.weight": _random(rng, 64),
        "first.bias": _random(rng, 1)[0] * np.float32(0.1),
        "second.weight": _random(rng, WIDTH),
        "second.bias": _random(rng, 1)[0] * np.float32(0.1),
    }
    hidden = images.reshape(len(images), -1)
    for layer in ("first", "second"):
        hidden = np.maximum(hidden @ weights[f"{layer}.weight"] + weights[f"{layer}.bias"], 0)
    weights["scores.weight"] = _fitted(hidden, np.eye(10)[labels])
    weights["scores.bias"] = np.zeros(10, np.float32)
    path.write_bytes(_model(weights).SerializeToString(deterministic=True))


def _training_images() -> tuple[Array, Array]:
    """Return the calibration images, each in nine places, and what they show."""
    with np.load(DIGITS / "calibration.npz", allow_pickle=False) as file:
        images = file["image"]
    labels = open_engine(load_model(DIGITS), "fp32", threads=1).run({"image": images})["scores"]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moved = [padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return np.concatenate(moved), np.tile(labels.argmax(axis=1), len(moved))


def _random(rng: np.random.Generator, inputs: int) -> Array:
    weight: Array = rng.standard_normal((inputs, WIDTH)) * np.sqrt(2 / inputs)
    return weight.astype(np.float32)


def _fitted(hidden: Array, wanted: Array) -> Array:
    wide = hidden.astype(np.float64)
    fitted: Array = np.linalg.solve(wide.T @ wide + 10 * np.eye(WIDTH), wide.T @ wanted)
    return fitted.astype(np.float32)


def _model(weights: dict[str, Array]) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"], name="flat"),
        _dense("flat", "first"),
        helper.make_node("Relu", ["first"], ["relu1"], name="relu1"),
        _dense("relu1", "second"),
        helper.make_node("Relu", ["second"], ["relu2"], name="relu2"),
        _dense("relu2", "scores"),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 10])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _dense(source: str, layer: str) -> onnx.NodeProto:
    return helper.make_node(
        "Gemm", [source, f"{layer}.weight", f"{layer}.bias"], [layer], name=layer
    )
