"""What both sides are given: one ONNX file, the same rows, and the answers that must come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.plain_celery import session

MODEL: Final = "mlp"
#: Bytes of a row: 3 KB.
ROW_BYTES: Final = 768 * 4
ABOUT: Final = "an MLP 768-128-10 (ReLU) with random weights of a fixed seed, made for this run"

_SIZES: Final = (768, 128, 10)
_SEED: Final = 2024
#: Batches of another size add up in another order; more than this is a wrong answer.
_TOLERANCE: Final = 1e-4

Array = npt.NDArray[np.float32]

_MODEL_FILE: Final = """\
max_batch_size = 32
ladder = []

[engines]
fp32 = "{onnx_file}"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Single rows and the model's answers to them."""

    onnx_file: Path
    #: One array of shape (1, 768) for each job, and the same as lists.
    rows: tuple[Array, ...]
    lists: tuple[Any, ...]
    expected: Array

    def check(self, answers: list[Any]) -> None:
        """Raise ValueError unless ``answers``, in the order of the rows, are the model's."""
        got = np.concatenate([np.asarray(answer, dtype=np.float32) for answer in answers])
        off = float(np.abs(got - self.expected).max()) if got.shape == self.expected.shape else None
        if off is None or off > _TOLERANCE:
            raise ValueError(f"answers are not the model's: shape {got.shape}, off by {off}")


def make(folder: Path, *, jobs: int) -> Workload:
    """Write the model into ``folder`` and make ``jobs`` rows for it."""
    onnx_file = folder / f"{MODEL}.onnx"
    onnx.save(_model(), str(onnx_file))
    rows = np.random.default_rng(_SEED).random((jobs, 1, _SIZES[0]), dtype=np.float32)
    (expected,) = session(str(onnx_file)).run(None, {"x": rows[:, 0]})
    return Workload(
        onnx_file=onnx_file,
        rows=tuple(rows),
        lists=tuple(rows.tolist()),
        expected=expected,
    )


def write_config(folder: Path, workload: Workload) -> Path:
    """Write the configuration of a fleet that serves the model with one instance."""
    model = folder / "models" / MODEL
    model.mkdir(parents=True)
    (folder / "fleet.toml").write_text("instances = 1\n")
    (model / "model.toml").write_text(_MODEL_FILE.format(onnx_file=workload.onnx_file))
    return folder


def _model() -> onnx.ModelProto:
    random = np.random.default_rng(_SEED)
    size_in, hidden, size_out = _SIZES
    weights = {
        "w1": random.normal(0, size_in**-0.5, (size_in, hidden)),
        "b1": np.zeros(hidden),
        "w2": random.normal(0, hidden**-0.5, (hidden, size_out)),
        "b2": np.zeros(size_out),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["sum"]),
            helper.make_node("Relu", ["sum"], ["hidden"]),
            helper.make_node("Gemm", ["hidden", "w2", "b2"], ["y"]),
        ],
        MODEL,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", size_in])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", size_out])],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)
