"""`fleet add` on small models: what it decides and refuses, and that it is whole or nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.client import Client
from producer.contract.errors import ConfigError
from tests import onnx_models
from tests.support.adding import added, left, refused, start_add
from tests.support.commands import FLEET, run_command
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import alive, children_of, running_worker
from workers.adding import command
from workers.adding.speed import SIZES
from workers.models import load_model
from workers.runner import ModelRunner

DIGITS = onnx_models.DIGITS / "digits.onnx"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration without a model."""
    folder = tmp_path / "config"
    folder.mkdir()
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return where a test writes its model."""
    return tmp_path / "mine.onnx"


def loaded(config: Path, name: str = "mine") -> ModelRunner:
    """Load an added model as a worker does."""
    return ModelRunner.load(load_model(config / "models" / name), threads=1)


def test_a_file_becomes_a_model_that_a_worker_serves(
    server: TestServer, fleet: Client, config: Path
) -> None:
    said = added(config, DIGITS, "--name", "mine")

    with np.load(onnx_models.DIGITS / "test.npz") as file, running_worker(server, config):
        images, labels = file["image"][:200], file["labels"][:200]
        jobs = fleet.submit_many("mine", ({"image": image[None]} for image in images))
        answers = [job.reply(20).outputs["scores"][0].argmax() for job in jobs]

    assert said["batches"]
    assert said["max_batch_size"] in SIZES
    assert np.mean(np.array(answers) == labels) > 0.97


def test_what_was_decided_is_a_table_with_reasons(config: Path) -> None:
    ran = run_command(*FLEET, "add", str(DIGITS), FLEET_CONFIG=str(config))

    assert ran.returncode == 0
    assert "input   image   float32  [rows, 1, 8, 8]  axis 0" in ran.stdout
    assert "batching   on, max_batch_size " in ran.stdout
    assert "why        " in ran.stdout
    assert "rows  ms a run  rows/s  " in ran.stdout
    assert 'infer.delay("digits", {"image": numpy.zeros([1, 1, 8, 8], "float32")})' in ran.stdout


def test_a_batch_axis_that_is_not_the_first_is_found_and_a_scalar_left_whole(
    config: Path, file: Path
) -> None:
    onnx_models.state_on_axis_one(file)

    said = added(config, file)

    axes = {port["name"]: port["batch_axis"] for port in (*said["inputs"], *said["outputs"])}
    assert axes == {"x": 0, "state": 1, "rate": None, "y": 0, "next": 1}
    assert loaded(config).max_rows == said["max_batch_size"]


@pytest.mark.parametrize(
    ("write", "why", "whole"),
    [
        (onnx_models.running_sum, "rows influence each other", True),
        (onnx_models.positive_pixels, "for 1 rows on axis 0", True),
        (onnx_models.baked_reshape, "two rows are refused", False),
        (onnx_models.digits_int8, "rows influence each other", True),
        (lambda path: onnx_models.linear(path, rows=1), "takes exactly one row", False),
        (lambda path: onnx_models.linear(path, rows=8), "is fixed at 8", True),
    ],
)
def test_where_rows_may_not_share_a_run_batching_is_off_with_the_reason(
    config: Path, file: Path, write: Callable[[Path], None], why: str, whole: bool
) -> None:
    write(file)

    said = added(config, file)

    runner = loaded(config)
    assert (said["batches"], said["max_batch_size"], said["whole"]) == (False, 1, whole)
    assert why in said["why"]
    assert why in (config / "models" / "mine" / "model.toml").read_text()
    assert (runner.max_rows, runner.describe()["whole_jobs"]) == (1, whole)


@pytest.mark.parametrize("write", [onnx_models.digits_int8_static, onnx_models.linear])
def test_an_added_model_is_probed_by_a_worker_as_it_was_when_it_was_added(
    config: Path, file: Path, write: Callable[[Path], None]
) -> None:
    write(file)

    said = added(config, file)

    assert said["batches"]
    assert loaded(config).max_rows == said["max_batch_size"]
    # What a person may want to say of it is there to be uncommented.
    written = config / "models" / "mine" / "model.toml"
    written.write_text(written.read_text().replace("# time_limit_s", "time_limit_s"))
    assert load_model(written.parent).time_limit_s == 10


def test_names_that_toml_or_a_comment_would_choke_on_are_kept(config: Path, file: Path) -> None:
    name = 'a "b"\n[engines]\tü.0'
    graph = helper.make_graph(
        [helper.make_node("Relu", [name], ["y\n"])],
        "names",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n\n[x]", "free\n= 1"])],
        [helper.make_tensor_value_info("y\n", TensorProto.FLOAT, ["n\n[x]", None])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file
    )

    said = added(config, file)

    assert said["inputs"][0]["name"] == name
    assert load_model(config / "models" / "mine").batch_axes_in == {name: 0}


def test_weights_beside_the_file_come_along(config: Path, file: Path) -> None:
    onnx_models.linear(file)
    (file.parent / "parts").mkdir()
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, location="parts/w.bin", size_threshold=0
    )

    added(config, file)
    shutil.rmtree(file.parent / "parts")

    x = np.ones((1, 4), np.float32)
    runner = loaded(config)
    (outcome,) = runner.run([runner.prepare({"x": x})])
    assert outcome.outputs is not None
    np.testing.assert_allclose(
        outcome.outputs["y"], x @ np.linspace(-1, 1, 12).reshape(4, 3), atol=1e-5
    )


def unknown_operator(path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Fancy", ["x"], ["y"], domain="com.acme")],
        "unknown",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.acme", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def only_seven_columns(path: Path) -> None:
    """The second axis is free by name, and takes seven alone."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "seven",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.ones((7, 2), np.float32), "w")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (unknown_operator, "com.acme:Fancy. Export the model with standard operators."),
        (only_seven_columns, "--probe-shape x=1,1 is its whole shape"),
        (onnx_models.text, "input 'x' is text"),
        (Path.touch, "is empty"),
    ],
)
def test_a_refused_model_says_what_is_in_the_way_and_leaves_nothing(
    config: Path, file: Path, write: Callable[[Path], object], says: str
) -> None:
    write(file)

    line = refused(config, file)

    assert says in line
    assert str(file) in line
    assert list(config.iterdir()) == []


def test_a_model_of_sizes_that_nobody_guesses_is_added_with_a_hint_that_its_file_keeps(
    config: Path, file: Path
) -> None:
    only_seven_columns(file)

    said = added(config, file, "--probe-shape", "x=1,7")

    assert said["batches"]
    assert loaded(config).max_rows == said["max_batch_size"]


def test_a_name_that_is_taken_is_refused_and_with_replace_the_old_model_is_kept(
    config: Path, file: Path
) -> None:
    onnx_models.linear(file)
    added(config, file)
    (config / "models" / "mine" / "rows.npz").write_bytes(b"precious")

    assert "--replace" in refused(config, file)
    added(config, DIGITS, "--name", "mine", "--replace")

    assert left(config) == [".mine.before", "mine"]
    assert (config / "models" / ".mine.before" / "rows.npz").read_bytes() == b"precious"
    assert set(load_model(config / "models" / "mine").batch_axes_in) == {"image"}


def test_a_file_that_lies_in_the_folder_of_its_model_already_can_be_added(config: Path) -> None:
    folder = config / "models" / "mine"
    folder.mkdir(parents=True)
    onnx_models.linear(folder / "mine.onnx")

    added(config, folder / "mine.onnx", "--replace")

    assert loaded(config).spec.engines == {"fp32": folder / "mine.onnx"}


def test_a_second_command_at_the_same_time_is_refused_and_harms_nothing(
    config: Path, file: Path
) -> None:
    onnx_models.linear(file)
    first = start_add(config, DIGITS)
    trial = trial_of(first)
    os.kill(trial, signal.SIGSTOP)

    line = refused(config, file)

    os.kill(trial, signal.SIGCONT)
    first.communicate(timeout=60)
    assert "another `fleet add` is at work" in line
    assert (first.returncode, left(config)) == (0, ["digits"])


@pytest.mark.parametrize("name", ["", "../x", ".x", "a b", "x" * 65])
def test_what_cannot_name_a_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a model"):
        command.add(DIGITS, name, {}, replace=False, serves=False, as_json=False)


def test_a_refused_name_is_one_line(config: Path) -> None:
    assert "cannot name a model" in refused(config, DIGITS, "--name", "../x")
    assert list(config.iterdir()) == []


def trial_of(process: subprocess.Popen[str]) -> int:
    """Return the process in which the model is tried."""
    return wait_until(lambda: next(iter(children_of(process.pid)), 0), what="a trial")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_and_no_process(config: Path, signum: signal.Signals) -> None:
    process = start_add(config, DIGITS)
    trial = trial_of(process)

    process.send_signal(signum)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (128 + signum, "")
    assert err == "fleet: interrupted; nothing was added.\n"
    assert list(config.iterdir()) == []
    wait_until(lambda: not alive(trial), what="the end of the trial")


def test_a_project_with_a_package_of_the_same_name_is_not_taken_for_ours(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()

    process = start_add(config, DIGITS, cwd=tmp_path)

    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "batching   on" in out


def test_a_model_that_kills_its_process_is_refused_with_the_signal(config: Path) -> None:
    process = start_add(config, DIGITS)

    os.kill(trial_of(process), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (2, "")
    assert "killed its process (SIGKILL)" in err
    assert list(config.iterdir()) == []


def test_what_a_killed_command_left_is_no_model_and_gone_after_the_next(config: Path) -> None:
    process = start_add(config, DIGITS)
    trial_of(process)
    process.kill()
    process.communicate(timeout=60)
    assert all(name.startswith(".adding-") for name in left(config))

    added(config, DIGITS)

    assert left(config) == ["digits"]
