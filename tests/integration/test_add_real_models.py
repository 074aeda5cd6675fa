"""`fleet add` on real models, without an edit: its decisions, and answers as of the file alone.

Those that are slow or come in packages are in tests/chaos/test_real_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from tests import onnx_models
from tests.support.adding import added
from tests.support.mlp import write_mlp
from tests.support.real_models import light_resnet50
from workers.models import load_model
from workers.runner import ModelRunner

Array: TypeAlias = npt.NDArray[Any]

#: How far answers may differ from the file's own, as a share of the largest.
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "int8": 1e-3}


def assert_answers_as_alone(config: Path, name: str, inputs: Mapping[str, Array]) -> None:
    """Send the rows as one job, and as one job each; compare them with the file row by row."""
    runner = ModelRunner.load(load_model(config / "models" / name), threads=1)
    path = runner.spec.engines[runner.spec.precision]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    rows = len(next(iter(inputs.values())))
    jobs = [{key: value[n : n + 1] for key, value in inputs.items()} for n in range(rows)]
    expected = [dict(zip(names, session.run(names, job), strict=True)) for job in jobs]

    together = runner.run([runner.prepare(job) for job in jobs])
    found = [together]
    if not runner.describe()["whole_jobs"]:
        found.append(runner.run([runner.prepare(inputs)]))

    for output in names:
        wanted = np.concatenate([answer[output] for answer in expected])
        limit = TOLERANCE[runner.spec.precision] * np.abs(wanted).max()
        for outcomes in found:
            assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
            got = np.concatenate(
                [outcome.outputs[output] for outcome in outcomes if outcome.outputs]
            )
            np.testing.assert_allclose(got, wanted, rtol=0, atol=limit)


def images(count: int) -> dict[str, Array]:
    with np.load(onnx_models.DIGITS / "test.npz") as file:
        return {"image": file["image"][:count]}


def test_the_digits_in_fp16_are_called_so(tmp_path: Path) -> None:
    said = added(tmp_path, onnx_models.DIGITS / "digits_fp16.onnx", "--name", "half")

    assert (said["precision"], said["batches"]) == ("fp16", True)
    assert_answers_as_alone(tmp_path, "half", images(20))


def test_the_digits_in_static_int8_share_runs(tmp_path: Path) -> None:
    onnx_models.digits_int8_static(tmp_path / "int8.onnx")

    said = added(tmp_path, tmp_path / "int8.onnx")

    assert (said["precision"], said["batches"]) == ("int8", True)
    assert_answers_as_alone(tmp_path, "int8", images(20))


def test_the_digits_in_dynamic_int8_run_alone(tmp_path: Path) -> None:
    onnx_models.digits_int8(tmp_path / "dynamic.onnx")

    said = added(tmp_path, tmp_path / "dynamic.onnx")

    assert (said["precision"], said["batches"], said["whole"]) == ("int8", False, True)
    assert_answers_as_alone(tmp_path, "dynamic", images(20))


def test_the_digits_with_their_weights_beside_them(tmp_path: Path) -> None:
    source = tmp_path / "source" / "digits.onnx"
    source.parent.mkdir()
    onnx.save(
        onnx.load(onnx_models.DIGITS / "digits.onnx"),
        source,
        save_as_external_data=True,
        location="digits.data",
        size_threshold=0,
    )

    said = added(tmp_path, source)

    assert said["batches"]
    assert (tmp_path / "models" / "digits" / "digits.data").is_file()
    assert_answers_as_alone(tmp_path, "digits", images(20))


def test_the_digits_for_one_image_run_row_by_row(tmp_path: Path) -> None:
    file = onnx_models.DIGITS.parent / "digits-fixed1" / "digits_fixed1.onnx"

    said = added(tmp_path, file, "--name", "fixed")

    assert (said["batches"], said["whole"]) == (False, False)
    assert "takes exactly one row" in said["why_batch"]
    assert_answers_as_alone(tmp_path, "fixed", images(5))


def test_a_perceptron_for_which_batching_pays(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp.onnx")

    said = added(tmp_path, tmp_path / "mlp.onnx")

    assert said["max_batch_size"] >= 4
    assert "times the jobs/s of one by one" in said["why_batch"]


def test_a_light_resnet50_that_takes_one_image(tmp_path: Path) -> None:
    said = added(tmp_path, light_resnet50())

    rows = np.random.default_rng(1).random((2, 3, 224, 224), np.float32)
    assert (said["batches"], said["whole"]) == (False, False)
    assert_answers_as_alone(tmp_path, "light_resnet50", {"gpu_0/data_0": rows})
