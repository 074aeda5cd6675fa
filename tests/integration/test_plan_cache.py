"""Plans are built once per host, appear whole or not at all, and only ours are loaded."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.contract.errors import ConfigError
from tests.onnx_models import linear
from tests.support.building import model_folder
from tests.support.tensorrt_builder import DEVICE, QUIET, tensorrt_rtx, workshop
from tests.support.worker import ROOT
from workers.models import ModelSpec, load_model
from workers.plans.making import Made, make_plans, plan_of
from workers.plans.store import plans_folder

pytestmark = pytest.mark.filterwarnings(QUIET)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    tensorrt_rtx()
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    return load_model(model_folder(tmp_path, linear))


@pytest.fixture
def maker(spec: ModelSpec) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.plan_maker", str(spec.folder), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> Any:
    """Return what a maker printed last."""
    output, _ = process.communicate(timeout=50)
    return json.loads(output.splitlines()[-1])


def make(spec: ModelSpec, **device: Any) -> list[Made]:
    made = workshop(dataclasses.replace(DEVICE, **device))
    return make_plans(spec, made, tell=lambda _text: None)


def files(spec: ModelSpec) -> list[str]:
    folder = plans_folder(spec.folder)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_of_four_processes_that_start_together_one_builds(spec: ModelSpec, maker: Any) -> None:
    makers = [maker() for _ in range(4)]

    for process in makers:
        go(process)
    made = [said(process)[0] for process in makers]

    assert sum(bool(each["why"]) for each in made) == 1
    assert len({each["path"] for each in made}) == 1
    assert [name for name in files(spec) if name.endswith((".plan", ".json"))] == [
        f"{Path(made[0]['path']).stem}.json",
        f"{Path(made[0]['path']).stem}.plan",
    ]


def test_a_plan_that_is_there_is_loaded_and_not_built(spec: ModelSpec) -> None:
    (built,) = make(spec)

    (again,) = make(spec)

    assert built.why == "no plan of fp32 was built for NVIDIA L4"
    assert again.why == ""
    assert plan_of(spec, workshop(), "fp32") == built.path.read_bytes()


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ({"compute_capability": "10.3"}, "compute_capability was 8.9, is 10.3"),
        ({"driver": "13.1"}, "driver was 13.0, is 13.1"),
        ({"name": "NVIDIA B300"}, "device was NVIDIA L4, is NVIDIA B300"),
        ({"multiprocessors": 16}, "multiprocessors was 58, is 16"),
    ],
)
def test_a_plan_of_another_device_is_never_tried(
    spec: ModelSpec, device: dict[str, Any], why: str
) -> None:
    (first,) = make(spec)
    other = workshop(dataclasses.replace(DEVICE, **device))

    with pytest.raises(ConfigError, match=f"{why}. Build it: fleet build my --plans"):
        plan_of(spec, other, "fp32")
    (second,) = make(spec, **device)

    assert why in second.why
    assert second.path != first.path
    assert make(spec)[0].why == ""


def test_a_plan_of_another_version_of_tensorrt_is_rebuilt_with_the_reason(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = make(spec)
    sidecar = first.path.with_suffix(".json")
    told = json.loads(sidecar.read_text())
    told["facts"]["tensorrt"] = "10.3.0"
    sidecar.write_text(json.dumps(told))

    with caplog.at_level(logging.INFO, "workers.plans"):
        (second,) = make(spec)

    version = tensorrt_rtx().__version__
    assert f"tensorrt was 10.3.0, is {version}" in second.why
    assert caplog.records[0].message == "plan.building"
    assert caplog.records[0].__dict__["reason"] == second.why


def test_another_file_makes_another_plan(spec: ModelSpec) -> None:
    make(spec)
    path = spec.engines["fp32"]
    assert path is not None
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)

    with pytest.raises(ConfigError, match="onnx changed"):
        plan_of(spec, workshop(), "fp32")


def test_a_plan_that_was_changed_is_not_loaded_but_built_anew(spec: ModelSpec) -> None:
    (first,) = make(spec)
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    with pytest.raises(ConfigError, match="is not as it was written"):
        plan_of(spec, workshop(), "fp32")
    (second,) = make(spec)

    assert "is not as it was written" in second.why
    assert plan_of(spec, workshop(), "fp32") == second.path.read_bytes()


def test_a_plan_that_nobody_wrote_a_hash_of_is_not_loaded(spec: ModelSpec) -> None:
    (first,) = make(spec)
    first.path.with_suffix(".json").unlink()

    with pytest.raises(ConfigError, match="no plan of fp32 was built for NVIDIA L4"):
        plan_of(spec, workshop(), "fp32")


def test_a_full_disk_is_one_error_and_leaves_nothing(spec: ModelSpec, maker: Any) -> None:
    process = maker("1000")

    go(process)

    error = said(process)["error"]
    assert "File too large" in error
    assert "no plan was changed" in error
    assert [name for name in files(spec) if name != ".lock"] == []


def test_a_folder_that_cannot_be_written_is_named(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(ConfigError, match="Set FLEET_CACHE to a folder"):
        make(spec)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_and_the_next_one_builds(
    spec: ModelSpec, maker: Any, signum: signal.Signals
) -> None:
    process = maker("hold")
    go(process)
    assert process.stdout.readline() == "building the plan of fp32, 0%\n"
    assert process.stdout.readline().startswith("building the plan of fp32, ")

    process.send_signal(signum)
    process.communicate(timeout=50)

    assert process.returncode != 0
    assert [name for name in files(spec) if name != ".lock"] == []
    assert make(spec)[0].why


def test_what_a_killed_process_left_half_written_is_removed(spec: ModelSpec) -> None:
    folder = plans_folder(spec.folder)
    folder.mkdir(parents=True)
    (folder / ".half-abc").write_bytes(b"x")

    make(spec)

    assert not (folder / ".half-abc").exists()
