"""Engines that memory breaks are opened anew in the same process, and batches go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from producer.contract.errors import ConfigError, NonFinite, OutOfMemory
from tests.support.tight_engine import Row
from workers.engines.base import EngineLost
from workers.models import load_model
from workers.runner import ModelRunner, Outcome


def loaded(tmp_path: Path, options: str, top: str = "") -> ModelRunner:
    folder = tmp_path / "tight"
    folder.mkdir()
    (folder / "model.toml").write_text(
        f'runtime = "tests.support.tight_engine:Tight"\nengines = ["fp32", "fp16"]\n{top}\n'
        f'[options]\nlog = "{tmp_path / "log"}"\n{options}'
    )
    return ModelRunner.load(load_model(folder), threads=1)


def answers(runner: ModelRunner, *rows: Row) -> list[Outcome]:
    return runner.run([runner.prepare({"x": [[float(row)]]}) for row in rows])


def opened(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "log").read_text().splitlines()
    return [line.split()[2] for line in lines if line.startswith("load ")]


def test_an_engine_that_breaks_is_opened_anew_before_its_next_run_alone(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 8, fp16 = 24}")

    first = answers(runner, *[Row.OK] * 32)
    assert opened(tmp_path) == ["fp32", "fp16"]
    then = [answers(runner, *[Row.OK] * 32) for _ in range(3)][-1]

    assert {(o.precision, o.batch_size, o.error) for o in first} == {("fp16", 16, None)}
    assert {(o.precision, o.batch_size, o.error) for o in then} == {("fp32", 8, None)}
    assert opened(tmp_path) == ["fp32", "fp16", "fp32", "fp32"]
    assert (runner.counters.out_of_memory, runner.reopened) == (2, 2)
    assert runner.describe()["ceilings"] == {"fp32": 8}


def test_where_an_engine_cannot_be_opened_again_the_process_has_to_end(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 8, fp16 = 24}\nopens = 2")
    answers(runner, *[Row.OK] * 32)

    with pytest.raises(EngineLost, match="fp32 could not be opened again"):
        answers(runner, Row.OK)


def test_one_row_that_never_fits_fails_alone_in_as_many_runs_as_halving_takes(
    tmp_path: Path,
) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 64, fp16 = 64}")

    outcomes = answers(runner, *[Row.OK] * 20, Row.NEVER_FITS, *[Row.OK] * 11)

    assert [n for n, o in enumerate(outcomes) if o.error] == [20]
    assert isinstance(outcomes[20].error, OutOfMemory)
    assert runner.counters.out_of_memory <= 6
    assert answers(runner, *[Row.OK] * 32)[0].batch_size == 32


def test_jobs_that_never_fit_cost_no_way_down_the_ladder_each(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 64, fp16 = 64}")

    outcomes = answers(runner, Row.OK, *[Row.NEVER_FITS] * 30, Row.OK)

    assert [n for n, o in enumerate(outcomes) if not o.error] == [0, 31]
    assert runner.counters.out_of_memory <= 2 * 6 + 28
    assert answers(runner, *[Row.OK] * 32)[0].batch_size == 32


def test_rows_that_are_not_finite_in_fp16_are_answered_row_by_row_in_fp32(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 8, fp16 = 24}")

    outcomes = answers(
        runner, *[Row.OK] * 15, Row.NAN_IN_FP16, Row.INFINITE_IN_FP16, *[Row.OK] * 15
    )

    assert all(o.error is None for o in outcomes)
    assert all(o.outputs is not None and np.isfinite(o.outputs["y"]).all() for o in outcomes)
    again = [(o.precision, o.batch_size, o.non_finite) for o in outcomes[15:17]]
    assert again == [("fp32", 1, 1), ("fp32", 1, 1)]
    assert {(o.precision, o.non_finite) for o in outcomes[:15]} == {("fp16", 0)}
    assert runner.counters.non_finite == 2


def test_a_job_of_many_rows_is_computed_again_row_by_row_and_joined_in_order(
    tmp_path: Path,
) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 2, fp16 = 24}")
    x = np.full((12, 1), float(Row.OK), np.float32)
    x[3, 0], x[7, 0] = float(Row.NAN_IN_FP16), float(Row.INFINITE_IN_FP16)

    (outcome,) = runner.run([runner.prepare({"x": x})])

    assert outcome.outputs is not None
    np.testing.assert_array_equal(outcome.outputs["y"], x * 2)
    assert outcome.non_finite >= 1


def test_a_row_that_is_finite_in_no_precision_that_fits_fails_as_non_finite(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 2, fp16 = 24}\nno_row_in_fp32 = true")

    outcomes = answers(runner, Row.OK, Row.NAN_IN_FP16, *[Row.OK] * 6)
    then = answers(runner, Row.NAN_IN_FP16)

    assert [n for n, o in enumerate(outcomes) if o.error] == [1]
    assert isinstance(outcomes[1].error, NonFinite)
    assert isinstance(then[0].error, NonFinite)
    assert then[0].out_of_memory == 0


def test_what_the_main_precision_answers_stands_whatever_it_is(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 8, fp16 = 24}")

    (fitting,) = answers(runner, Row.NAN)
    fallen = answers(runner, Row.NAN, *[Row.OK] * 31)[0]

    for outcome in (fitting, fallen):
        assert outcome.outputs is not None
        assert np.isnan(outcome.outputs["y"]).all()
        assert outcome.precision == "fp32"


def test_a_ladder_may_halve_the_same_precision_first(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 4, fp16 = 24}", 'ladder = ["same/2", "fp16/4"]')

    outcomes = answers(runner, *[Row.OK] * 32)

    assert {(o.precision, o.batch_size, o.error) for o in outcomes} == {("fp16", 4, None)}
    assert runner.counters.out_of_memory == 2


def test_the_largest_batches_are_found_by_running_them_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 11, fp16 = 24}", "find_ceiling = true")

    runner.find_ceilings()

    assert runner.describe()["ceilings"] == {"fp32": 11, "fp16": 24}
    before = (tmp_path / "log").read_text().count("oom ")
    outcomes = answers(runner, *[Row.OK] * 32)
    assert {(o.precision, o.out_of_memory) for o in outcomes} == {("fp32", 0)}
    assert max(o.batch_size for o in outcomes) == 11
    assert (tmp_path / "log").read_text().count("oom ") == before


def test_nothing_is_searched_for_unless_it_is_asked_for(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 11, fp16 = 24}")

    runner.find_ceilings()

    assert runner.describe()["ceilings"] == {}
    assert "oom " not in (tmp_path / "log").read_text()


def test_a_model_in_which_everything_fits_gets_no_ceiling(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "fits = {fp32 = 32, fp16 = 32}", "find_ceiling = true")

    runner.find_ceilings()

    assert runner.describe()["ceilings"] == {}


def test_a_ladder_that_needs_a_twin_which_is_missing_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "model.toml").write_text(
        'runtime = "tests.support.tight_engine:Tight"\nprecision = "int8"\nengines = ["int8"]\n'
        'ladder = ["same/2", "fp16/4"]\n'
    )

    with pytest.raises(ConfigError, match=r"names fp16.*`fleet build alone --precision fp16`"):
        load_model(folder)
