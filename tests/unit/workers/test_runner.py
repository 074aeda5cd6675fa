"""Every model that breaks a naive batcher: answered as if alone, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnxruntime.datasets import get_example

from producer.contract.errors import BadRequest, ConfigError, EngineFailed, OutOfMemory
from tests import onnx_models
from workers.models import load_model
from workers.runner import ModelRunner, Outcome

Array: TypeAlias = npt.NDArray[Any]
Load: TypeAlias = Callable[..., ModelRunner]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a model that a builder writes, with more lines for its model.toml."""

    def loaded(build: Callable[[Path], None], more: str = "", top: str = "") -> ModelRunner:
        folder = tmp_path / build.__name__
        folder.mkdir()
        build(folder / "model.onnx")
        (folder / "model.toml").write_text(f'{top}\n[engines]\nfp32 = "model.onnx"\n{more}')
        return ModelRunner.load(load_model(folder), threads=1)

    return loaded


def alone(runner: ModelRunner, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the file itself answers, without any of our code in between."""
    path = runner.spec.engines[runner.spec.precision]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def outputs_of(outcome: Outcome) -> Mapping[str, Array]:
    assert outcome.error is None
    assert isinstance(outcome.outputs, Mapping)
    return outcome.outputs


def assert_all_as_if_alone(runner: ModelRunner, jobs: list[dict[str, Array]]) -> list[Outcome]:
    outcomes = runner.run([runner.prepare(job) for job in jobs])
    for job, outcome in zip(jobs, outcomes, strict=True):
        for name, expected in alone(runner, job).items():
            found = outputs_of(outcome)[name]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return outcomes


def rows(count: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((count, *shape), np.float32)


def test_jobs_that_run_together_are_answered_as_if_alone(load: Load) -> None:
    runner = load(onnx_models.linear)

    outcomes = assert_all_as_if_alone(runner, [{"x": rows(1, 4, seed=n)} for n in range(32)])

    assert {outcome.batch_size for outcome in outcomes} == {32}
    assert (runner.max_rows, runner.why) == (32, "")


def test_a_job_of_a_thousand_rows_is_split_and_joined(load: Load) -> None:
    runner = load(onnx_models.linear)

    (outcome,) = assert_all_as_if_alone(runner, [{"x": rows(1000, 4)}])

    assert outcome.batch_size == 32
    assert runner.counters.largest_batch == 32
    assert runner.counters.rows == 1000


def test_a_run_holds_no_more_bytes_than_the_limit(load: Load) -> None:
    runner = load(onnx_models.linear, top="max_batch_bytes = 64")

    assert_all_as_if_alone(runner, [{"x": rows(10, 4)}, {"x": rows(1, 4)}])

    assert runner.counters.largest_batch == 4


def test_a_model_of_exactly_one_row_answers_row_by_row(load: Load) -> None:
    def fixed_one(path: Path) -> None:
        onnx_models.linear(path, rows=1)

    runner = load(fixed_one)
    x = rows(5, 4)

    (outcome,) = runner.run([runner.prepare({"x": x})])

    assert (runner.max_rows, runner.why) == (1, "input 'x' takes exactly one row")
    expected = np.concatenate([alone(runner, {"x": row[None]})["y"] for row in x])
    np.testing.assert_allclose(outputs_of(outcome)["y"], expected, rtol=1e-5)


def test_a_batch_axis_that_lies_is_found_and_answered_row_by_row(load: Load) -> None:
    runner = load(onnx_models.baked_reshape)
    x = rows(3, 4)

    (outcome,) = runner.run([runner.prepare({"x": x})])

    assert runner.max_rows == 1
    assert "two rows are refused" in runner.why
    np.testing.assert_array_equal(outputs_of(outcome)["y"], x)


STATE = "[inputs.state]\nbatch_axis = 1\n[outputs.next]\nbatch_axis = 1\n"


def test_a_batch_axis_may_be_the_second_and_a_scalar_is_not_stacked(load: Load) -> None:
    runner = load(onnx_models.state_on_axis_one, more=STATE)
    jobs: list[dict[str, Array]] = [
        {
            "x": rows(n, 3, seed=n),
            "state": np.ascontiguousarray(rows(2, n, 3, seed=9 + n)),
            "rate": np.array(rate, np.int64),
        }
        for n, rate in [(1, 8), (2, 8), (1, 16), (3, 8)]
    ]

    outcomes = assert_all_as_if_alone(runner, jobs)

    assert [outcome.batch_size for outcome in outcomes] == [6, 6, 1, 6]


def test_an_undeclared_axis_that_is_fixed_runs_one_job_at_a_time(load: Load) -> None:
    runner = load(onnx_models.state_on_axis_one)

    assert_all_as_if_alone(
        runner,
        [{"x": rows(1, 3), "state": rows(2, 1, 3, seed=n), "rate": np.array(8)} for n in (1, 2)],
    )

    assert runner.max_rows == 1
    assert "input 'state' is fixed at 2" in runner.why


def test_a_first_axis_that_is_time_is_not_cut_and_not_shared(load: Load) -> None:
    runner = load(onnx_models.running_sum)

    assert_all_as_if_alone(runner, [{"x": rows(steps, 3, seed=steps)} for steps in (1, 7, 40)])

    assert runner.max_rows == 1
    assert "rows influence each other" in runner.why


def test_an_axis_declared_as_none_is_not_shared(load: Load) -> None:
    runner = load(onnx_models.running_sum, more='[inputs.x]\nbatch_axis = "none"\n')

    assert_all_as_if_alone(runner, [{"x": rows(40, 3)}, {"x": rows(40, 3, seed=1)}])

    assert (runner.max_rows, runner.why) == (1, "no input has a batch axis")


def test_answers_with_other_row_counts_are_given_to_one_job_at_a_time(load: Load) -> None:
    runner = load(onnx_models.positive_pixels)

    assert_all_as_if_alone(runner, [{"x": rows(n, 4, seed=n).round()} for n in (1, 2, 3)])

    assert runner.max_rows == 1
    assert "output 'y' has shape" in runner.why


def test_rows_that_are_quantised_together_are_found_and_run_alone(load: Load) -> None:
    runner = load(onnx_models.digits_int8)
    held_out = np.load(onnx_models.DIGITS / "heldout.npz")
    images = (held_out["images"][:20] / 16).astype(np.float32)[:, None]

    assert_all_as_if_alone(runner, [{"image": image[None]} for image in images])

    assert runner.max_rows == 1
    assert "rows influence each other" in runner.why


def test_a_declared_batch_axis_is_cut_even_where_rows_influence_each_other(load: Load) -> None:
    runner = load(onnx_models.digits_int8, more="[inputs.image]\nbatch_axis = 0\n")
    images = rows(3, 1, 8, 8)

    (outcome,) = runner.run([runner.prepare({"image": images})])

    expected = [alone(runner, {"image": image[None]})["scores"][0] for image in images]
    np.testing.assert_allclose(outputs_of(outcome)["scores"], expected, rtol=1e-5)


def test_an_output_that_is_no_tensor_is_refused_with_the_remedy(load: Load) -> None:
    def iris(path: Path) -> None:
        shutil.copy(get_example("logreg_iris.onnx"), path)

    with pytest.raises(ConfigError, match=r"seq.*not a tensor.*zipmap=False"):
        load(iris)


def test_text_is_refused_with_the_reason(load: Load) -> None:
    with pytest.raises(ConfigError, match="'x' is text; jobs carry numbers"):
        load(onnx_models.text)


def test_no_rows_never_reach_a_runtime_that_would_abort(load: Load) -> None:
    runner = load(onnx_models.lstm, more="[inputs.x]\nbatch_axis = 1\n")

    assert_all_as_if_alone(runner, [{"x": rows(5, n, 2, seed=n)} for n in (1, 3)])

    assert runner.max_rows == 32
    for shape in [(5, 0, 2), (0, 1, 2)]:
        with pytest.raises(BadRequest, match="no rows or no elements"):
            runner.prepare({"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize("bad", [(0,), (7,), (15,), (3, 4), tuple(range(16))])
def test_a_value_that_the_engine_refuses_fails_its_job_alone(
    load: Load, bad: tuple[int, ...]
) -> None:
    runner = load(onnx_models.lookup)
    ids = [np.full((1, 3), 99 if n in bad else n % 5, np.int64) for n in range(16)]

    outcomes = runner.run([runner.prepare({"ids": value}) for value in ids])

    for position, outcome in enumerate(outcomes):
        if position in bad:
            assert isinstance(outcome.error, BadRequest)
        else:
            expected = alone(runner, {"ids": ids[position]})["y"]
            np.testing.assert_array_equal(outputs_of(outcome)["y"], expected)


def test_a_cut_job_with_one_refused_row_fails_whole_and_alone(load: Load) -> None:
    runner = load(onnx_models.lookup)
    large = np.zeros((100, 3), np.int64)
    large[70] = 99

    outcomes = runner.run(
        [runner.prepare({"ids": ids}) for ids in (np.ones((1, 3), np.int64), large)]
    )

    assert outputs_of(outcomes[0])["y"].shape == (1, 3, 2)
    assert isinstance(outcomes[1].error, BadRequest)


PLUGIN = """
import numpy as np
from workers.engines.base import Engine
from workers.models import TensorSpec

class Touchy(Engine):
    runtime = "touchy 1"
    inputs = (TensorSpec(name="x", dtype="float32", shape=(None, 1), batch_axis=0),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(None, 1), batch_axis=0),)

    def __init__(self, spec, precision, *, threads):
        self.most = spec.options.get("most", 10**9)

    def run(self, feeds):
        x = feeds["x"]
        if (x == 666).any() or len(x) > self.most:
            raise MemoryError("too much")
        if (x == 13).any():
            raise RuntimeError("unlucky")
        return {"y": x * 2}

    def close(self):
        pass
"""


@pytest.fixture
def touchy(tmp_path: Path) -> Callable[[str], ModelRunner]:
    """Load an engine of one's own that lies beside its model.toml."""

    def loaded(more: str) -> ModelRunner:
        folder = tmp_path / "touchy"
        folder.mkdir()
        (folder / "own.py").write_text(PLUGIN)
        (folder / "model.toml").write_text(f'runtime = "own:Touchy"\n{more}')
        return ModelRunner.load(load_model(folder), threads=1)

    return loaded


def doubled(runner: ModelRunner, values: list[float]) -> list[Outcome]:
    return runner.run([runner.prepare({"x": [[value]]}) for value in values])


def test_a_memory_error_fails_only_its_job_and_batches_stay_large(
    touchy: Callable[[str], ModelRunner],
) -> None:
    runner = touchy("")

    outcomes = doubled(runner, [1.0] * 15 + [666.0] + [1.0] * 16)

    failed = [position for position, outcome in enumerate(outcomes) if outcome.error]
    assert failed == [15]
    assert isinstance(outcomes[15].error, OutOfMemory)
    assert doubled(runner, [1.0] * 32)[0].batch_size == 32


def test_an_engine_of_ones_own_may_raise_anything(touchy: Callable[[str], ModelRunner]) -> None:
    runner = touchy("")

    outcomes = doubled(runner, [1.0, 13.0, 3.0])

    assert [o.outputs and o.outputs["y"].item() for o in outcomes] == [2.0, None, 6.0]
    assert isinstance(outcomes[1].error, EngineFailed)


def test_batches_that_were_too_large_stay_below_it_from_then_on(
    touchy: Callable[[str], ModelRunner],
) -> None:
    runner = touchy('engines = ["fp32", "fp16"]\n[options]\nmost = 16')

    first, then = doubled(runner, [1.0] * 32), doubled(runner, [1.0] * 32)

    assert {(o.precision, o.batch_size, o.out_of_memory) for o in first} == {("fp16", 16, 1)}
    assert {(o.precision, o.batch_size, o.out_of_memory) for o in then} == {("fp32", 16, 0)}


def test_an_input_name_in_the_file_that_the_model_lacks_is_refused_with_the_nearest(
    load: Load,
) -> None:
    with pytest.raises(ConfigError, match=r"no input 'xx'. Did you mean 'x'\?"):
        load(onnx_models.linear, more="[inputs.xx]\nbatch_axis = 0\n")


def test_a_description_is_safe_for_json(load: Load) -> None:
    described = json.loads(json.dumps(load(onnx_models.linear).describe()))

    assert described["inputs"] == {"x": "float32 [rows, 4]"}
