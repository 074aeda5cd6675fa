"""A worker's start with TensorRT: plans are built first, and the status says how far that is.

The builder is the real one. The device is made up, so a plan is never run.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import redis

from producer.contract.names import Keys
from tests.onnx_models import linear
from tests.support.building import model_folder
from tests.support.cuda_on_host import CudaOnHost
from tests.support.tensorrt_builder import QUIET, journal, tensorrt_rtx
from workers import loading as loading_module
from workers.engines import trt
from workers.engines.nvidia import Nvidia
from workers.loading import Loading
from workers.memory.shared_ceilings import SharedCeilings
from workers.plans.store import plans_folder
from workers.settings import WorkerSettings
from workers.status import State, Status

pytestmark = pytest.mark.filterwarnings(QUIET)


class Seen(Status):
    """A status that keeps every state it was in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[State, str]] = []

    def become(self, state: State, text: str = "") -> None:
        super().become(state, text)
        self.seen.append((state, text))


def test_missing_plans_are_built_while_the_instance_loads_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvidia = Nvidia(tensorrt_rtx(), CudaOnHost())
    nvidia.journal = journal()
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading_module, "open_nvidia", lambda: nvidia)
    monkeypatch.setattr(trt, "open_nvidia", lambda: nvidia)
    folder = model_folder(tmp_path, linear)
    (folder / "model.toml").write_text('runtime = "tensorrt"\n[engines]\nfp32 = "model.onnx"\n')
    status = Seen()
    unused = SharedCeilings(redis.Redis(), Keys())
    loading = Loading(WorkerSettings(config_dir=tmp_path), ["my"], status, unused)

    with caplog.at_level(logging.INFO, "workers"):
        loading.load(["my"])

    building = [text for state, text in status.seen if state is State.LOADING]
    assert building[1] == "my: building the plan of fp32, 0%"
    assert len(building) > 2
    assert [path.suffix for path in sorted(plans_folder(folder).glob("fp32-*"))] == [
        ".json",
        ".plan",
    ]
    events = [record.message for record in caplog.records]
    assert events[:3] == ["runtime.chosen", "plan.building", "plan.built"]
    # No driver is here, so the plan is not loaded: that is told as well, and nothing else runs.
    assert status.state is State.BROKEN
    assert "its plan cannot be loaded" in status.text
