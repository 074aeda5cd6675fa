"""Which runtime runs a model: chosen where it runs, told with its reason, never a silent change."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from tests.onnx_models import DIGITS
from workers.engines import nvidia
from workers.engines.base import open_engine
from workers.engines.choice import Surroundings, choice, choose, look_around
from workers.engines.cuda import says_lost
from workers.models import (
    AUTO,
    ONNXRUNTIME,
    ONNXRUNTIME_CUDA,
    ONNXRUNTIME_TENSORRT,
    TENSORRT,
    ModelSpec,
    load_model,
)
from workers.runner import ModelRunner


def digits(runtime: str) -> ModelSpec:
    return dataclasses.replace(load_model(DIGITS), runtime=runtime)


@pytest.mark.parametrize(
    ("here", "runtime", "why"),
    [
        (Surroundings(), TENSORRT, "auto: a GPU and TensorRT are here"),
        (Surroundings(is_cpu_instance=True), ONNXRUNTIME, "auto: this instance is CPU cores"),
        (
            Surroundings(why_no_gpu="CUDA finds no GPU: no driver"),
            ONNXRUNTIME,
            "auto: CUDA finds no GPU: no driver",
        ),
        (
            Surroundings(why_no_tensorrt="tensorrt is not installed"),
            ONNXRUNTIME_CUDA,
            "auto: tensorrt is not installed",
        ),
        (
            Surroundings(why_no_tensorrt="no tensorrt", why_no_onnxruntime_cuda="no provider"),
            ONNXRUNTIME,
            "auto: a GPU is here, but no tensorrt and no provider",
        ),
    ],
)
def test_auto_takes_what_is_here_and_says_why(here: Surroundings, runtime: str, why: str) -> None:
    chosen = choose(here)

    assert (chosen.runtime, chosen.why) == (runtime, why)


def test_a_model_without_a_runtime_is_auto_and_runs_on_this_machine_without_a_gpu() -> None:
    spec = load_model(DIGITS)
    runner = ModelRunner.load(spec, threads=1)

    about = runner.describe()
    runner.close()

    assert spec.runtime == AUTO
    assert about["runtime"].startswith("onnxruntime 1.")
    assert about["why_runtime"].startswith("auto: ")


def test_what_a_file_says_is_not_changed() -> None:
    assert choice(digits(TENSORRT)).runtime == TENSORRT


def test_an_instance_of_cpu_cores_does_not_look_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_INSTANCE_KEY", "cpu-1234/0")
    monkeypatch.setattr(nvidia, "why_no_gpu", lambda: pytest.fail("it looked"))
    look_around.cache_clear()

    here = look_around()
    look_around.cache_clear()

    assert here.is_cpu_instance


@pytest.mark.parametrize(
    ("runtime", "provider"),
    [
        (ONNXRUNTIME_CUDA, "CUDAExecutionProvider"),
        (ONNXRUNTIME_TENSORRT, "TensorrtExecutionProvider"),
    ],
)
def test_a_provider_that_is_not_here_is_refused_and_the_cpu_does_not_answer(
    runtime: str, provider: str
) -> None:
    with pytest.raises(ConfigError, match=f"no {provider}, only .*CPUExecutionProvider") as raised:
        open_engine(digits(runtime), "fp32", threads=1)

    assert 'Install the extra "worker-gpu"' in str(raised.value)


def test_a_session_that_runs_with_another_provider_than_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine whose onnxruntime has the provider and whose driver does not work."""
    from workers.engines import onnxrt

    monkeypatch.setattr(onnxrt, "why_no_provider", lambda _runtime: "")

    with (
        pytest.warns(UserWarning, match="is not in available provider names"),
        pytest.raises(ConfigError, match="but onnxruntime runs it with CPUExecutionProvider"),
    ):
        open_engine(digits(ONNXRUNTIME_CUDA), "fp32", threads=1)


def test_tensorrt_without_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match='runtime = "tensorrt" needs an NVIDIA GPU'):
        open_engine(digits(TENSORRT), "fp32", threads=1)


def test_half_an_installation_of_tensorrt_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text('raise ImportError("libnvinfer.so.11: not found")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr(nvidia, "why_no_gpu", lambda: "")

    with pytest.raises(ConfigError, match=r"cannot be imported: .*libnvinfer\.so\.11: not found"):
        nvidia.open_nvidia()


@pytest.mark.parametrize("runtime", [TENSORRT, ONNXRUNTIME_CUDA, AUTO, "mine:Engine"])
def test_runtimes_that_a_file_may_name(tmp_path: Path, runtime: str) -> None:
    folder = tmp_path / "my"
    folder.mkdir()
    (folder / "model.onnx").symlink_to(DIGITS / "digits.onnx")
    (folder / "model.toml").write_text(f'runtime = "{runtime}"\n[engines]\nfp32 = "model.onnx"\n')

    assert load_model(folder).runtime == runtime


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA error 719: unspecified launch failure", True),
        ("CUDA failure 2: out of memory ; GPU=0", False),
        ("CUDA failure 9: invalid configuration argument", False),
        ("INVALID_ARGUMENT : Got invalid dimensions for input: 700", False),
    ],
)
def test_errors_of_cuda_that_stay_are_known_by_their_numbers(text: str, lost: bool) -> None:
    assert says_lost(text) is lost
