"""What only a GPU can show of TensorRT and of ONNX Runtime's CUDA provider. Skipped elsewhere.

The digits through real plans: the same answers as on CPU cores, in every precision and batch size,
and what happens when memory is really taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from producer.contract.errors import ConfigError, OutOfMemory
from tests.onnx_models import DIGITS
from tests.support.building import built, digits_folder
from tests.support.worker import ROOT
from workers.batching.stacking import Array
from workers.build.store import find_variant
from workers.demo.digits import held_out
from workers.engines.base import Engine, open_engine
from workers.engines.nvidia import open_nvidia, why_no_gpu, why_no_tensorrt
from workers.engines.onnxrt import why_no_provider
from workers.models import (
    ONNXRUNTIME,
    ONNXRUNTIME_CUDA,
    TENSORRT,
    ModelSpec,
    load_model,
    load_source,
)
from workers.plans.making import make_plans, workshop_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: The least share of the 540 held-out images that each precision must read right.
LEAST_RIGHT = {"fp32": 0.98, "fp16": 0.98, "int8": 0.965, "fp8": 0.9}


@pytest.fixture(autouse=True)
def gpu() -> None:
    if why := why_no_gpu():
        pytest.skip(why)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if why := why_no_tensorrt():
        pytest.skip(why)
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path


def images() -> tuple[Array, Array]:
    digits = held_out(ROOT / "configs")
    return np.concatenate(digits.images), np.asarray(digits.labels)


def opened(spec: ModelSpec, precision: str) -> Engine:
    spec = dataclasses.replace(spec, engines={precision: spec.engines[precision]}, runtime=TENSORRT)
    make_plans(spec, workshop_of(open_nvidia()), tell=print)
    return open_engine(spec, precision, threads=1)


@pytest.fixture
def engine(cache: Path) -> Iterator[Engine]:
    engine = opened(load_model(DIGITS), "fp32")
    yield engine
    engine.close()


def scores(engine: Engine, rows: Array, *, at_a_time: int = 32) -> Array:
    parts = [rows[start : start + at_a_time] for start in range(0, len(rows), at_a_time)]
    return np.concatenate([engine.run({"image": part})["scores"] for part in parts])


def test_every_batch_size_is_answered_as_on_cpu_cores(engine: Engine) -> None:
    rows, _ = images()
    cpu = open_engine(
        dataclasses.replace(load_model(DIGITS), runtime=ONNXRUNTIME), "fp32", threads=1
    )

    for count in range(1, 33):
        expected = cpu.run({"image": rows[:count]})["scores"]
        found = engine.run({"image": rows[:count]})["scores"]
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "fp8"])
def test_each_precision_reads_the_digits(cache: Path, precision: str) -> None:
    folder = digits_folder(cache)
    source = load_source(folder)
    path = source.engines["fp32"]
    assert path is not None
    if precision != "fp32":
        built(folder, precision)
        path = find_variant(folder, precision, path)
    engine = opened(dataclasses.replace(source, engines={precision: path}), precision)
    rows, labels = images()

    right = float((scores(engine, rows).argmax(axis=1) == labels).mean())
    engine.close()

    print(f"{engine.runtime} on {engine.memory}: {precision} reads {right:.1%} right")
    assert right >= LEAST_RIGHT[precision]


def test_a_second_start_loads_the_plan_and_builds_nothing(engine: Engine) -> None:
    spec = dataclasses.replace(load_model(DIGITS), runtime=TENSORRT)
    spec = dataclasses.replace(spec, engines={"fp32": spec.engines["fp32"]})

    (made,) = make_plans(spec, workshop_of(open_nvidia()), tell=print)

    assert made.why == ""


def test_memory_that_another_has_taken_is_out_of_memory_and_comes_back(engine: Engine) -> None:
    """A ballast takes what is free; the engine's own memory stands, a new one finds none."""
    from cuda.bindings import runtime

    cuda = open_nvidia().cuda
    free, _total = cuda.checked(runtime.cudaMemGetInfo())
    ballast = cuda.device_memory(free - (64 << 20))
    try:
        rows, labels = images()
        assert (scores(engine, rows).argmax(axis=1) == labels).mean() >= 0.98
        with pytest.raises(OutOfMemory, match="were asked for"):
            cuda.device_memory(1 << 30)
    finally:
        cuda.free_device_memory(ballast)

    cuda.free_device_memory(cuda.device_memory(1 << 30))


def test_a_plan_that_was_changed_is_refused(cache: Path) -> None:
    spec = load_model(DIGITS)
    opened(spec, "fp32").close()
    (path,) = (cache / "cache" / "plans" / "digits").glob("fp32-*.plan")
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ConfigError, match="is not as it was written"):
        open_engine(dataclasses.replace(spec, runtime=TENSORRT), "fp32", threads=1)


def test_onnxruntimes_cuda_provider_answers_as_the_cpu_does() -> None:
    if why := why_no_provider(ONNXRUNTIME_CUDA):
        pytest.skip(why)
    rows, labels = images()
    spec = dataclasses.replace(load_model(DIGITS), runtime=ONNXRUNTIME_CUDA)

    engine = open_engine(spec, "fp32", threads=1)
    right = float((scores(engine, rows).argmax(axis=1) == labels).mean())
    engine.close()

    assert right >= 0.98
