"""Real models of other people: `fleet add` without an option or an edit, then jobs on a worker that
serves all of them; each answer is held against the file's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnxruntime.datasets import get_example

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import register
from tests import onnx_models
from tests.support.adding import added, refused
from tests.support.mlp import write_mlp
from tests.support.real_models import (
    file_types,
    files_of_python,
    light_resnet50,
    sentence_embeddings,
    sentences,
    text_recognition,
    voice_activity,
)
from tests.support.servers import TestServer, running_server
from tests.support.worker import running_worker
from workers.models import load_model
from workers.runner import ModelRunner

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = list[dict[str, Array]]

RNG = np.random.default_rng(1)


class Sample(NamedTuple):
    """A model's file, and rows of what it is made for."""

    file: Path
    rows: Rows


class Served(NamedTuple):
    """A worker that serves what could be added."""

    config: Path
    said: dict[str, dict[str, Any]]
    samples: dict[str, Sample]
    missing: dict[str, str]
    server: TestServer


def split_rows(inputs: Mapping[str, Array]) -> Rows:
    count = len(next(iter(inputs.values())))
    return [{name: array[n : n + 1] for name, array in inputs.items()} for n in range(count)]


def images(count: int) -> dict[str, Array]:
    with np.load(onnx_models.DIGITS / "test.npz") as file:
        return {"image": file["image"][:count]}


def digits(folder: Path) -> Sample:
    return Sample(onnx_models.DIGITS / "digits.onnx", split_rows(images(12)))


def digits_fp16(folder: Path) -> Sample:
    return Sample(onnx_models.DIGITS / "digits_fp16.onnx", split_rows(images(12)))


def digits_fixed(folder: Path) -> Sample:
    file = onnx_models.DIGITS.parent / "digits-fixed1" / "digits_fixed1.onnx"
    return Sample(file, split_rows(images(12)))


def digits_static(folder: Path) -> Sample:
    onnx_models.digits_int8_static(folder / "static.onnx")
    return Sample(folder / "static.onnx", split_rows(images(12)))


def digits_dynamic(folder: Path) -> Sample:
    onnx_models.digits_int8(folder / "dynamic.onnx")
    return Sample(folder / "dynamic.onnx", split_rows(images(12)))


def mlp(folder: Path) -> Sample:
    write_mlp(folder / "mlp.onnx")
    return Sample(folder / "mlp.onnx", split_rows(images(12)))


def magika(folder: Path) -> Sample:
    return Sample(file_types(), split_rows(files_of_python(12, seed=2)))


def minilm(folder: Path) -> Sample:
    return Sample(sentence_embeddings(), split_rows(sentences(slice(0, 12))))


def silero(folder: Path) -> Sample:
    rows: Rows = [
        {
            "input": RNG.normal(0, 0.1, (1, 576)).astype(np.float32),
            "state": RNG.normal(0, 0.5, (2, 1, 128)).astype(np.float32),
            "sr": np.array(16_000, np.int64),
        }
        for _ in range(12)
    ]
    return Sample(voice_activity(), rows)


def ocr(folder: Path) -> Sample:
    lines = RNG.uniform(-1, 1, (6, 3, 48, 160)).astype(np.float32)
    return Sample(text_recognition(), split_rows({"x": lines}))


def resnet50(folder: Path) -> Sample:
    pixels = RNG.random((3, 3, 224, 224), np.float32)
    return Sample(light_resnet50(), split_rows({"gpu_0/data_0": pixels}))


MODELS = [
    digits,
    digits_fp16,
    digits_fixed,
    digits_static,
    digits_dynamic,
    mlp,
    magika,
    minilm,
    silero,
    ocr,
    resnet50,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Add every model whose package is installed, and run one worker for all of them."""
    folder, config = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("config")
    said, samples, missing = {}, {}, {}
    for make in MODELS:
        name = make.__name__
        try:
            samples[name] = make(folder)
        except pytest.skip.Exception as why:
            missing[name] = str(why)
            continue
        said[name] = added(config, samples[name].file, "--name", name)
    with running_server() as server, running_worker(server, config) as worker:
        worker.wait_ready(timeout_s=60)
        yield Served(config, said, samples, missing, server)


@pytest.fixture
def sample(served: Served, request: pytest.FixtureRequest) -> Sample:
    name = request.getfixturevalue("name")
    if name in served.missing:
        pytest.skip(served.missing[name])
    return served.samples[name]


def assert_as_alone(
    served: Served, name: str, rows: Rows, answers: Sequence[Mapping[str, Array]]
) -> float:
    """Compare with the file row by row; return the largest difference, as a share of the scale."""
    spec = load_model(served.config / "models" / name)
    path = served.samples[name].file
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = [session.run(names, row) for row in rows]
    # The light resnet50's weights are constants, and so are its answers.
    if len(rows) > 1 and name != resnet50.__name__:
        first, second = expected[0][0], expected[1][0]
        assert first.shape != second.shape or not np.allclose(first, second, atol=0, rtol=0.01)
    tolerance = spec.tolerance * (1 if spec.precision == "fp32" else 10)
    worst = 0.0
    for number, output in enumerate(names):
        scale = max(float(np.abs(values[number]).max()) for values in expected)
        for values, answer in zip(expected, answers, strict=True):
            assert answer[output].shape == values[number].shape
            off = float(np.abs(answer[output] - values[number]).max()) / scale
            assert off <= tolerance
            worst = max(worst, off)
    return worst


@pytest.mark.parametrize("name", [make.__name__ for make in MODELS])
def test_one_delay_and_jobs_together_are_answered_as_by_the_file(
    served: Served, sample: Sample, name: str
) -> None:
    settings = Settings(broker_url=served.server.url)
    infer = register(make_app(settings))

    single = infer.delay(name, sample.rows[0]).get(timeout=60)
    with Client(settings) as fleet:
        jobs = fleet.submit_many(name, sample.rows)
        replies = [job.reply(60) for job in jobs]

    said = served.said[name]
    alone = assert_as_alone(served, name, sample.rows[:1], [single])
    together = assert_as_alone(served, name, sample.rows, [reply.outputs for reply in replies])
    sizes = [reply.batch_size for reply in replies]
    print(
        f"{name}: batches {said['batches']}, max_batch_size {said['max_batch_size']}, largest "
        f"batch {max(sizes)}, off by {alone:.1e} alone and {together:.1e} together"
    )
    assert max(sizes) <= said["max_batch_size"]
    if said["max_batch_size"] > 1:
        assert max(sizes) > 1


def test_the_rows_of_one_job_are_answered_as_each_alone(served: Served) -> None:
    """Where a job is cut; an uncut one is the model's own business."""
    with Client(Settings(broker_url=served.server.url)) as fleet:
        for name in ("digits", "digits_fixed", "digits_static", "mlp", "magika", "minilm"):
            if name in served.missing:
                continue
            rows = served.samples[name].rows
            inputs = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
            outputs = fleet.submit(name, inputs).reply(60).outputs
            answers = [
                {key: array[n : n + 1] for key, array in outputs.items()} for n in range(len(rows))
            ]
            assert_as_alone(served, name, rows, answers)


def padded(config: Path, name: str, pads: Mapping[str, str]) -> ModelRunner:
    """Load an added model with ``pads`` below its inputs."""
    file = config / "models" / name / "model.toml"
    before = text = file.read_text(encoding="utf-8")
    for given, pad in pads.items():
        text, changed = re.subn(rf"(\[inputs\.{given}\].*\n)", rf"\1pad = {pad}\n", text)
        assert changed == 1
    file.write_text(text, encoding="utf-8")
    try:
        return ModelRunner.load(load_model(file.parent), threads=1)
    finally:
        file.write_text(before, encoding="utf-8")


def short_sentences(rows: Rows) -> Rows:
    """Return each sentence at its own length: in the file all are as long as the longest."""
    lengths = [int(row["attention_mask"].sum()) for row in rows]
    assert len(set(lengths)) > 3
    return [
        {key: array[:, :length] for key, array in row.items()}
        for row, length in zip(rows, lengths, strict=True)
    ]


class Padding(NamedTuple):
    """How the inputs with a free axis may be padded, and what comes of it."""

    pads: dict[str, str]
    #: Why it is refused; empty where it is not.
    why: str = ""
    #: What makes rows of unlike lengths of those there are.
    shorten: Callable[[Rows], Rows] = list


#: Models that are missing here have no free axis beside their rows.
PADDING = {
    minilm.__name__: Padding(
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "{ axis = 1, value = 0 }"),
        shorten=short_sentences,
    ),
    silero.__name__: Padding(
        {"input": "{ axis = 1, value = 0 }"},
        why="no padding: padding changes answers: output 'output' changes by more",
    ),
    ocr.__name__: Padding(
        {"x": "{ axis = 3, value = 0 }"},
        why="no padding: padding changes answers: output 'fetch_name_0' changes by more",
    ),
}


@pytest.mark.parametrize("name", [make.__name__ for make in MODELS])
def test_a_model_is_padded_and_answers_as_alone_or_says_why_not_or_has_nothing_to_pad(
    served: Served, sample: Sample, name: str
) -> None:
    free = {
        port["name"]
        for port in served.said[name]["inputs"]
        for axis, size in enumerate(port["sizes"])
        if isinstance(size, str) and axis != port["batch_axis"]
    }
    padding = PADDING.get(name, Padding({}))
    assert free == set(padding.pads)
    if not free:
        print(f"{name}: nothing to pad")
        return

    runner = padded(served.config, name, padding.pads)
    print(f"{name}: loaded in {runner.describe()['load_s']} s. {runner.why}")
    assert (runner.describe()["padding"] == {}) is (padding.why != "")
    assert padding.why in runner.why
    if padding.why:
        return
    rows = padding.shorten(sample.rows)
    outcomes = runner.run([runner.prepare(row) for row in rows])
    off = assert_as_alone(served, name, rows, [outcome.outputs for outcome in outcomes])
    print(f"{name}: padded, off by {off:.1e}")
    of_one_length = Counter(tuple(array.shape for array in row.values()) for row in rows)
    assert max(outcome.batch_size for outcome in outcomes) > max(of_one_length.values())


def test_iris_that_ends_in_a_zipmap_is_refused_with_the_way_out(tmp_path: Path) -> None:
    line = refused(tmp_path, Path(get_example("logreg_iris.onnx")))

    assert "a sequence of maps, not a tensor" in line
    assert "options={'zipmap': False}" in line
    assert list(tmp_path.glob("models/*")) == []
