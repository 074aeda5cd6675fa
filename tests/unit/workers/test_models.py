"""A model's file: what it says, and one line for everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from tests import onnx_models
from workers.models import load_model, load_models

CONFIGS = onnx_models.DIGITS.parent.parent


def folder_with(tmp_path: Path, toml: str) -> Path:
    folder = tmp_path / "models" / "linear"
    folder.mkdir(parents=True)
    onnx_models.linear(folder / "model.onnx")
    (folder / "model.toml").write_text(toml)
    return folder


def test_the_files_of_this_repository_load() -> None:
    # Those of whoever tries this clone may lie beside them.
    models = {name: load_model(CONFIGS / "models" / name) for name in ("digits", "digits-fixed1")}

    assert models["digits"].ladder == ("fp16/2",)
    assert models["digits"].memory_limit_bytes is None
    assert models["digits-fixed1"].ladder == ("same/2",)


def test_a_file_may_say_nothing_but_its_engine(tmp_path: Path) -> None:
    spec = load_model(folder_with(tmp_path, '[engines]\nfp32 = "model.onnx"\n'))

    assert (spec.name, spec.precision, spec.max_batch_size) == ("linear", "fp32", 32)
    assert spec.batch_axes_in == {}


def test_axes_and_probe_hints_are_read_by_name(tmp_path: Path) -> None:
    spec = load_model(
        folder_with(
            tmp_path,
            '[engines]\nfp32 = "model.onnx"\n'
            "[inputs.x]\nbatch_axis = 1\nprobe_shape = [2, 1]\nprobe_max = 50\n"
            '[inputs.rate]\nbatch_axis = "none"\n[outputs.y]\nbatch_axis = 0\n',
        )
    )

    assert spec.batch_axes_in == {"x": 1, "rate": None}
    assert spec.batch_axes_out == {"y": 0}
    assert (spec.probe_hints["x"].shape, spec.probe_hints["x"].largest) == ((2, 1), 50.0)


ENGINES = '\n[engines]\nfp32 = "model.onnx"\n'


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("max_batchsize = 3" + ENGINES, "max_batchsize is not a known key. .*'max_batch_size'"),
        ("max_batch_size = 0" + ENGINES, "max_batch_size must be a whole number of at least 1"),
        ('max_batch_size = "8"' + ENGINES, "max_batch_size must be a whole number"),
        ("max_queue_delay_s = -1" + ENGINES, "max_queue_delay_s must be a number of at least 0"),
        ("max_queue_delay_s = nan" + ENGINES, "max_queue_delay_s must be a number"),
        (
            'runtime = "onnxrt"' + ENGINES,
            'runtime must be "module:Class" or one of ours, .* Did you mean .onnxruntime',
        ),
        ('precision = "fp16"' + ENGINES, r"precision is 'fp16', but \[engines\] has no such"),
        ('ladder = ["fp16"]' + ENGINES, "ladder steps look like 'fp16/2'"),
        ('ladder = ["fp16/2"]' + ENGINES, r"ladder names fp16, but \[engines\] has no such"),
        ('ladder = "fp16/2"' + ENGINES, "ladder must be a list of texts"),
        ("find_ceiling = 1" + ENGINES, "find_ceiling must be true or false, not 1"),
        (ENGINES + 'fp16 = "half.onnx"', "does not exist.*fleet build linear --precision fp16"),
        ("memory_limit_bytes = 4096" + ENGINES, "not above memory_first_chunk_bytes"),
        ("engines = 3", r"engines must be a table, written as \[engines\]"),
        ("", r"engines is missing; write \[engines\]"),
        ('[engines]\nfp31 = "model.onnx"', "fp31 is not a known precision. Did you mean 'fp32'"),
        ('[engines]\nfp32 = "modell.onnx"', "does not exist. Did you mean 'model.onnx'"),
        (ENGINES + '[inputs.x]\nbatch_axis = "one"', 'batch_axis must be 0, 1, ... or "none"'),
        (ENGINES + "[inputs.x]\nbatch_axes = 1", "batch_axes is not a known key. .*'batch_axis'"),
        (ENGINES + "[outputs.y]\nprobe_max = 1", "probe_max is not a known key"),
        (ENGINES + "[inputs.x]\nprobe_shape = [0]", "probe_shape must list the sizes of one row"),
        (ENGINES + "[inputs.x]\nprobe_min = 1", "probe_min is 1, not below probe_max, 1"),
        (ENGINES + '[inputs.x]\nprobe_min = "0"', "probe_min must be the least number of a job"),
        ("max_batch_size =" + ENGINES, r"is not valid TOML: .*line 1"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_and_what_instead(
    tmp_path: Path, toml: str, says: str
) -> None:
    folder = folder_with(tmp_path, toml)

    with pytest.raises(ConfigError, match=says) as raised:
        load_model(folder)

    assert str(raised.value).startswith(str(folder / "model.toml"))
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no model 'digit'\. Did you mean 'digits'"):
        load_models(CONFIGS, ["digit"])


def test_a_folder_without_a_file_is_an_error_not_a_model_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "models" / "empty").mkdir(parents=True)

    with pytest.raises(ConfigError, match=r"model\.toml: there is no such file"):
        load_models(tmp_path)


def test_no_models_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()

    with pytest.raises(ConfigError, match="no model to serve"):
        load_models(tmp_path)


@pytest.mark.parametrize("broken", [b"", b"not a model", b"\x08\x08", None])
def test_a_broken_model_file_is_refused_without_a_runtime(
    tmp_path: Path, broken: bytes | None
) -> None:
    folder = folder_with(tmp_path, ENGINES)
    whole = (folder / "model.onnx").read_bytes()

    (folder / "model.onnx").write_bytes(whole[:-20] if broken is None else broken)

    with pytest.raises(ConfigError, match=r"model\.onnx, which is"):
        load_model(folder)


def test_an_engine_of_ones_own_needs_no_file(tmp_path: Path) -> None:
    spec = load_model(folder_with(tmp_path, 'runtime = "mine:Engine"\n[options]\nsize = 3\n'))

    assert spec.engines == {"fp32": None}
    assert spec.options == {"size": 3}


def test_an_empty_file_is_refused_whoever_runs_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 'runtime = "mine:Engine"\nprecision = "fp16"\n')
    with (folder / "model.toml").open("a") as file:
        file.write('[engines]\nfp16 = "twin.onnx"\n')
    (folder / "twin.onnx").touch()

    with pytest.raises(ConfigError, match=r"fp16 names .*twin\.onnx, which is empty"):
        load_model(folder)
