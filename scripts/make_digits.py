"""Make the digits family: train a small network with numpy alone and write its files.

    python scripts/make_digits.py

Needs numpy, onnx, onnxruntime, onnxconverter-common and, only to read the images, scikit-learn.
The same versions on the same kind of machine write the same files.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxconverter_common import float16
from sklearn.datasets import load_digits

Array = npt.NDArray[Any]

MODELS: Final = Path(__file__).resolve().parent.parent / "configs" / "models"
TRAINING_IMAGES: Final = 1257
#: Training images from which int8 and fp8 take their ranges.
CALIBRATION_IMAGES: Final = 256
CHANNELS: Final = (16, 32)
HIDDEN: Final = 48
EPOCHS: Final = 40
ROWS: Final = 64
SEED: Final = 7


def main() -> None:
    images, labels = _shuffled()
    train, held_out = images[:TRAINING_IMAGES], images[TRAINING_IMAGES:]
    weights = _train(_as_input(train), labels[:TRAINING_IMAGES])
    _write_models(weights)
    np.savez_compressed(
        MODELS / "digits" / "heldout.npz",
        images=held_out.astype(np.uint8),
        labels=labels[TRAINING_IMAGES:].astype(np.uint8),
    )
    _write_build_rows(_as_input(train), _as_input(held_out), labels[TRAINING_IMAGES:])
    _write_sums()
    for path in (
        "digits/digits.onnx",
        "digits/digits_fp16.onnx",
        "digits-fixed1/digits_fixed1.onnx",
    ):
        right = _right(MODELS / path, _as_input(held_out), labels[TRAINING_IMAGES:])
        _say(f"{path}: {right} of {len(held_out)} right ({right / len(held_out):.4f})")


def _write_build_rows(train: Array, held_out: Array, labels: Array) -> None:
    """Write the rows of `fleet build`: arrays named as the model's inputs, and the labels."""
    folder = MODELS / "digits"
    np.savez_compressed(folder / "calibration.npz", image=train[:CALIBRATION_IMAGES])
    np.savez_compressed(folder / "test.npz", image=held_out, labels=labels.astype(np.int64))


def _shuffled() -> tuple[Array, Array]:
    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.images))
    return data.images[order], data.target[order]


def _as_input(images: Array) -> Array:
    """Return images of 0..16 as the model takes them: [N, 1, 8, 8] of 0..1."""
    return (images / 16).astype(np.float32)[:, None]


# -- training ---------------------------------------------------------------------------------


def _train(images: Array, labels: Array) -> dict[str, Array]:
    rng = np.random.default_rng(SEED)
    weights = _initial(rng)
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in weights.items()}
    step = 0
    for epoch in range(EPOCHS):
        order = rng.permutation(len(images))
        rate = 3e-3 * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS)) + 1e-5
        for start in range(0, len(order), ROWS):
            batch = order[start : start + ROWS]
            step += 1
            slopes = _slopes(weights, _moved(images[batch], rng), labels[batch], rng)
            _adam(weights, slopes, moments, rate=rate, step=step)
    return weights


def _initial(rng: np.random.Generator) -> dict[str, Array]:
    first, second = CHANNELS
    shapes = {
        "conv1.weight": (first, 1, 3, 3),
        "conv2.weight": (second, first, 3, 3),
        "hidden.weight": (second * 16, HIDDEN),
        "scores.weight": (HIDDEN, 10),
    }
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        inputs = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        weights[name] = (rng.standard_normal(shape) * np.sqrt(2 / inputs)).astype(np.float32)
        outputs = shape[0] if len(shape) == 4 else shape[1]
        weights[name.replace("weight", "bias")] = np.zeros(outputs, np.float32)
    return weights


def _moved(images: Array, rng: np.random.Generator) -> Array:
    """Return the images shifted by at most one pixel up, down, left or right, half of them."""
    moved = images.copy()
    for row, (down, right) in enumerate(rng.integers(-1, 2, (len(images), 2))):
        if rng.random() < 0.5:
            padded = np.pad(images[row, 0], 1)
            moved[row, 0] = padded[1 - down : 9 - down, 1 - right : 9 - right]
    return moved


def _columns(images: Array) -> Array:
    """Return the 3x3 neighbourhoods of every pixel: [N, 64, C * 9]."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1, 4, 5)).reshape(len(images), 64, -1)


def _convolve(columns: Array, weight: Array, bias: Array) -> Array:
    flat = columns @ weight.reshape(len(weight), -1).T + bias
    return flat.transpose(0, 2, 1).reshape(len(columns), len(weight), 8, 8)


def _slopes(
    weights: dict[str, Array], images: Array, labels: Array, rng: np.random.Generator
) -> dict[str, Array]:
    """Return the gradient of the cross entropy, with dropout before the last layer."""
    count = len(images)
    columns1 = _columns(images)
    conv1 = np.maximum(_convolve(columns1, weights["conv1.weight"], weights["conv1.bias"]), 0)
    columns2 = _columns(conv1)
    conv2 = np.maximum(_convolve(columns2, weights["conv2.weight"], weights["conv2.bias"]), 0)
    blocks = conv2.reshape(count, CHANNELS[1], 4, 2, 4, 2)
    pooled = blocks.max(axis=(3, 5))
    flat = pooled.reshape(count, -1)
    hidden = np.maximum(flat @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    kept = (rng.random(hidden.shape) < 0.8).astype(np.float32) / np.float32(0.8)
    logits = (hidden * kept) @ weights["scores.weight"] + weights["scores.bias"]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)

    back = scores
    back[np.arange(count), labels] -= 1
    back /= count
    slopes = {"scores.weight": (hidden * kept).T @ back, "scores.bias": back.sum(axis=0)}
    back = (back @ weights["scores.weight"].T) * kept * (hidden > 0)
    slopes |= {"hidden.weight": flat.T @ back, "hidden.bias": back.sum(axis=0)}
    back = (back @ weights["hidden.weight"].T).reshape(pooled.shape)
    largest = blocks == pooled[:, :, :, None, :, None]
    back = (largest * back[:, :, :, None, :, None]).reshape(conv2.shape) * (conv2 > 0)
    slopes |= _convolution_slopes("conv2", columns2, back)
    back = _convolve(
        _columns(back),
        weights["conv2.weight"][:, :, ::-1, ::-1].transpose(1, 0, 2, 3),
        np.zeros(CHANNELS[0], np.float32),
    ) * (conv1 > 0)
    return slopes | _convolution_slopes("conv1", columns1, back)


def _convolution_slopes(name: str, columns: Array, back: Array) -> dict[str, Array]:
    outputs = back.shape[1]
    flat = back.transpose(0, 2, 3, 1).reshape(-1, outputs)
    weight = flat.T @ columns.reshape(-1, columns.shape[2])
    return {
        f"{name}.weight": weight.reshape(outputs, -1, 3, 3),
        f"{name}.bias": flat.sum(axis=0),
    }


def _adam(
    weights: dict[str, Array],
    slopes: dict[str, Array],
    moments: dict[str, tuple[Array, Array]],
    *,
    rate: float,
    step: int,
) -> None:
    for name, weight in weights.items():
        slope = slopes[name] + 1e-4 * weight
        mean, square = moments[name]
        mean += 0.1 * (slope - mean)
        square += 0.01 * (slope**2 - square)
        scaled = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
        weights[name] = (weight - rate * scaled).astype(np.float32)


# -- files ------------------------------------------------------------------------------------


def _write_models(weights: dict[str, Array]) -> None:
    dynamic = _model(weights, rows="rows")
    _save(dynamic, MODELS / "digits" / "digits.onnx")
    _save(
        float16.convert_float_to_float16(dynamic, keep_io_types=True),
        MODELS / "digits" / "digits_fp16.onnx",
    )
    _save(_model(weights, rows=1), MODELS / "digits-fixed1" / "digits_fixed1.onnx")


def _model(weights: dict[str, Array], *, rows: int | str) -> onnx.ModelProto:
    nodes = [
        _node("Conv", "image", "conv1.weight", "conv1.bias", to="conv1", pads=[1, 1, 1, 1]),
        _node("Relu", "conv1", to="relu1"),
        _node("Conv", "relu1", "conv2.weight", "conv2.bias", to="conv2", pads=[1, 1, 1, 1]),
        _node("Relu", "conv2", to="relu2"),
        _node("MaxPool", "relu2", to="pooled", kernel_shape=[2, 2], strides=[2, 2]),
        _node("Flatten", "pooled", to="flat"),
        _node("Gemm", "flat", "hidden.weight", "hidden.bias", to="hidden"),
        _node("Relu", "hidden", to="relu3"),
        _node("Gemm", "relu3", "scores.weight", "scores.bias", to="logits"),
        _node("Softmax", "logits", to="scores", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [rows, 1, 8, 8])],
        [helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [rows, 10])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
        producer_name="make_digits",
    )


def _node(kind: str, *inputs: str, to: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [to], name=to, **attributes)


def _save(model: onnx.ModelProto, path: Path) -> None:
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _write_sums() -> None:
    files: Sequence[Path] = sorted((*MODELS.glob("digits*/*.onnx"), *MODELS.glob("digits/*.npz")))
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(MODELS)}\n"
        for path in files
    ]
    (MODELS / "digits" / "SHA256SUMS").write_text("".join(lines))


def _right(path: Path, images: Array, labels: Array) -> int:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    scores = np.concatenate([session.run(["scores"], {"image": row[None]})[0] for row in images])
    return int((scores.argmax(axis=1) == labels).sum())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
