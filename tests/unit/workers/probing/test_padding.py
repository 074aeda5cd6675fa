"""Jobs of different lengths: proved at load and padded, or not padded, and told why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.contract.errors import BadRequest, ConfigError
from tests import onnx_models
from tests.support.noting import Shapes, runs
from workers.models import load_model
from workers.runner import ModelRunner, Outcome

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = dict[str, Array]

PAD = "pad = { axis = 1, value = 0, to = [4, 8, 16] }"
LONGEST = "pad = { axis = 1, value = 0 }"


class Loaded:
    """A model that a builder wrote, and what its engine was given for its jobs."""

    def __init__(
        self, folder: Path, build: Callable[[Path], None], pads: Mapping[str, str], top: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        build(folder / "model.onnx")
        self._log = folder / "log"
        tables = "".join(f"[inputs.{name}]\n{lines}\n" for name, lines in pads.items())
        (folder / "model.toml").write_text(
            f'runtime = "tests.support.noting:Noting"\n{top}\n[engines]\nfp32 = "model.onnx"\n'
            f'[options]\nlog = "{self._log}"\n{tables}'
        )
        self.runner = ModelRunner.load(load_model(folder), threads=1)
        self._alone = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
        )

    def answers(self, jobs: list[Arrays]) -> tuple[list[Outcome], list[Shapes]]:
        """Run the jobs, each of which must be answered as alone; return the runs as well."""
        before = len(runs(self._log))
        outcomes = self.runner.run([self.runner.prepare(job) for job in jobs])
        names = [output.name for output in self._alone.get_outputs()]
        for job, outcome in zip(jobs, outcomes, strict=True):
            assert outcome.error is None
            for name, expected in zip(names, self._alone.run(names, job), strict=True):
                found = outcome.outputs[name]
                assert found.shape == expected.shape
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        return outcomes, runs(self._log)[before:]


Load: TypeAlias = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(
        build: Callable[[Path], None], pads: Mapping[str, str], *, top: str = "", name: str = "own"
    ) -> Loaded:
        return Loaded(tmp_path / name, build, pads, top)

    return loaded


def sentence(length: int, *, rows: int = 1, seed: int = 0) -> Arrays:
    ids = np.random.default_rng(seed + length).integers(1, 10, (rows, length))
    return {"ids": ids, "mask": np.ones_like(ids)}


def both(pad: str) -> dict[str, str]:
    return {"ids": pad, "mask": pad}


def test_jobs_padded_to_one_size_share_a_run_and_their_answers_are_cut_back(load: Load) -> None:
    loaded = load(onnx_models.sentences, both(PAD))

    outcomes, given_to_engine = loaded.answers([sentence(n) for n in (3, 9, 4, 16, 1, 11)])

    assert loaded.runner.why == ""
    assert [run["ids"] for run in given_to_engine] == [(3, 4), (3, 16)]
    assert outcomes[0].outputs["pairs"].shape == (1, 3, 3)
    assert [outcome.batch_size for outcome in outcomes] == [3] * 6


def test_a_job_longer_than_every_size_runs_at_its_own_length(load: Load) -> None:
    loaded = load(onnx_models.sentences, both(PAD))

    _, given_to_engine = loaded.answers([sentence(n) for n in (17, 16, 17, 40)])

    assert [run["ids"] for run in given_to_engine] == [(2, 17), (1, 16), (1, 40)]


def test_without_sizes_a_run_is_as_long_as_its_longest_job(load: Load) -> None:
    loaded = load(onnx_models.sentences, both(LONGEST))

    _, given_to_engine = loaded.answers([sentence(n) for n in (5, 7, 6)])

    assert [run["ids"] for run in given_to_engine] == [(3, 7)]


def test_without_sizes_no_run_is_more_than_half_padding(load: Load) -> None:
    loaded = load(onnx_models.sentences, both(LONGEST))

    _, given_to_engine = loaded.answers([*(sentence(3, seed=n) for n in range(31)), sentence(100)])

    assert [run["ids"] for run in given_to_engine] == [(2, 100), (30, 3)]


@pytest.mark.parametrize("pad", [PAD, LONGEST])
def test_no_run_has_more_elements_than_the_limit_but_one_row_alone(load: Load, pad: str) -> None:
    loaded = load(onnx_models.sentences, both(pad), top="max_batch_elements = 64")

    _, given_to_engine = loaded.answers([sentence(16, seed=n) for n in range(9)])
    _, alone = loaded.answers([sentence(100), sentence(100, seed=1)])

    assert [run["ids"] for run in given_to_engine] == [(4, 16), (4, 16), (1, 16)]
    assert [run["ids"] for run in alone] == [(1, 100), (1, 100)]


def test_the_limit_in_elements_holds_without_padding(load: Load) -> None:
    loaded = load(onnx_models.sentences, {}, top="max_batch_elements = 30")

    _, given_to_engine = loaded.answers([sentence(5, rows=10), *(sentence(6) for _ in range(6))])

    assert [run["ids"] for run in given_to_engine] == [(6, 5), (4, 5), (5, 6), (1, 6)]


def test_a_limit_in_bytes_counts_the_padding(load: Load) -> None:
    row_bytes = 2 * 16 * 8
    loaded = load(onnx_models.sentences, both(PAD), top=f"max_batch_bytes = {3 * row_bytes}")

    _, given_to_engine = loaded.answers([sentence(9, seed=n) for n in range(5)])

    assert [run["ids"] for run in given_to_engine] == [(3, 16), (2, 16)]


def test_inputs_that_belong_together_must_be_equally_long(load: Load) -> None:
    loaded = load(onnx_models.sentences, both(PAD))

    with pytest.raises(BadRequest, match="must be equally long: ids 3, mask 4"):
        loaded.runner.prepare({**sentence(3), "mask": sentence(4)["mask"]})


@pytest.mark.parametrize(
    "shapes", [("", ""), ("\nprobe_shape = [1, 16]", "\nprobe_shape = [1, 11]")]
)
def test_inputs_of_lengths_of_their_own_are_told_apart(load: Load, shapes: tuple[str, str]) -> None:
    pads = {"query": f"{PAD}{shapes[0]}", "passage": f"{PAD}{shapes[1]}"}
    loaded = load(onnx_models.pair, pads)
    lengths = [(3, 9), (4, 16), (2, 13)]

    jobs = [
        {"query": np.ones((1, q), np.float32), "passage": np.ones((1, p), np.float32)}
        for q, p in lengths
    ]
    _, given_to_engine = loaded.answers(jobs)

    assert loaded.runner.why == ""
    assert given_to_engine == [{"query": (3, 4), "passage": (3, 16)}]


def test_two_texts_with_a_mask_each_are_two_groups_of_equal_lengths(load: Load) -> None:
    names = ("query", "passage", "query_mask", "passage_mask")
    loaded = load(onnx_models.two_texts, dict.fromkeys(names, PAD))
    rng = np.random.default_rng(1)

    def job(query: int, passage: int) -> Arrays:
        texts = {"query": rng.random((1, query)), "passage": rng.random((1, passage))}
        arrays = {name: text.astype(np.float32) for name, text in texts.items()}
        return arrays | {f"{name}_mask": np.ones_like(text) for name, text in arrays.items()}

    _, given_to_engine = loaded.answers([job(3, 9), job(4, 16)])

    assert loaded.runner.why == ""
    assert [(run["query"], run["passage"]) for run in given_to_engine] == [((2, 4), (2, 16))]
    with pytest.raises(BadRequest, match="must be equally long: query 3, query_mask 4"):
        loaded.runner.prepare(job(3, 9) | {"query_mask": np.ones((1, 4), np.float32)})


def reduced(how: str) -> Callable[[Path], None]:
    return functools.partial(onnx_models.reduced, how=how)


def test_a_value_that_adds_nothing_is_proved(load: Load) -> None:
    loaded = load(reduced("ReduceSum"), {"x": PAD})

    steps = [np.random.default_rng(n).standard_normal((2, n, 3), np.float32) for n in (1, 4, 3)]
    _, given_to_engine = loaded.answers([{"x": x} for x in steps])

    assert loaded.runner.describe()["padding"] == {"x": "axis 1 to 4, 8, 16, with 0"}
    assert [run["x"] for run in given_to_engine] == [(6, 4, 3)]


@pytest.mark.parametrize(
    ("build", "pads", "why"),
    [
        (reduced("ReduceMean"), {"x": PAD}, "padding changes answers: output 'y' changes by more"),
        # Of zeros, as long as every number is above them, a largest value shows nothing.
        (reduced("ReduceMax"), {"x": PAD}, "padding changes answers: output 'y' changes by more"),
        (
            reduced("ReduceSum"),
            {"x": "pad = { axis = 1, value = 0.01 }"},
            "padding changes answers: output 'y' changes by more",
        ),
        (
            onnx_models.every_second,
            {"x": "pad = { axis = 2, value = 0, to = [8, 16] }"},
            "output 'y' has 8 on axis 2 padded and 5 as it is: no input's length",
        ),
        (onnx_models.sentences, {"ids": PAD}, "shorter rows are refused as they are"),
        (
            onnx_models.sentences,
            {"ids": PAD, "mask": "pad = { axis = 1, value = 1, to = [4, 8, 16] }"},
            "padding changes answers: output 'mean' changes",
        ),
        (
            onnx_models.sentences,
            {"ids": PAD, "mask": "pad = { axis = 1, value = 0, to = [5] }"},
            "padded rows are refused",
        ),
        (
            onnx_models.sentences,
            both("pad = { axis = 1, value = 0, to = [1] }"),
            "no made-up row is shorter",
        ),
        (
            onnx_models.roots,
            {"x": f"batch_axis = 0\nprobe_min = 0\n{PAD}"},
            "made-up rows are answered with nothing but NaN",
        ),
        (onnx_models.linear, {"x": PAD}, "axis 1 of input 'x' takes one size alone"),
        (onnx_models.running_sum, {"x": PAD}, "rows may belong together"),
    ],
)
def test_a_model_that_padding_would_change_is_not_padded_and_says_why(
    load: Load, build: Callable[[Path], None], pads: Mapping[str, str], why: str
) -> None:
    runner = load(build, pads).runner

    assert why in runner.why.partition("no padding: ")[2]
    assert runner.describe()["padding"] == {}


def test_what_is_not_padded_shares_runs_by_length_as_before(load: Load) -> None:
    loaded = load(reduced("ReduceMean"), {"x": PAD})

    steps = [np.random.default_rng(n).random((1, n, 3), np.float32) for n in (3, 4, 3)]
    _, given_to_engine = loaded.answers([{"x": x} for x in steps])

    assert [run["x"] for run in given_to_engine] == [(2, 3, 3), (1, 4, 3)]


def test_dynamic_int8_is_neither_batched_nor_padded(load: Load) -> None:
    runner = load(onnx_models.steps_int8, {"x": f"batch_axis = 0\n{PAD}"}).runner

    assert runner.max_rows == 1
    assert "rows influence each other" in runner.why
    assert "no padding: padding changes answers" in runner.why


@pytest.mark.parametrize(
    ("pads", "says"),
    [
        ({"ids": "pad = { value = 0 }"}, "axis must be the axis that is padded"),
        ({"ids": "pad = { axis = 1 }"}, "value must be what an input is filled with"),
        ({"ids": "pad = { axis = 1, value = 0, to = [8, 4] }"}, "to must list growing sizes"),
        ({"ids": "pad = { axis = 1, value = 0, two = 1 }"}, "two is not a known key"),
        ({"ids": "pad = { axis = 0, value = 0 }"}, "another axis beside the one that counts rows"),
        ({"ids": "pad = { axis = 2, value = 0 }"}, "has 2 axes; pad names axis 2"),
        ({"ids": "pad = { axis = 1, value = 0.5 }"}, "is int64; it cannot hold 0.5"),
        ({"id": PAD}, "the model has no input 'id'. Did you mean 'ids'?"),
    ],
)
def test_a_mistake_in_the_file_is_named(load: Load, pads: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match="own") as told:
        load(onnx_models.sentences, pads)

    assert says in str(told.value)


JOBS = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), min_size=1, max_size=12)


@pytest.fixture(scope="module", params=[PAD, LONGEST])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Load one model for all examples: at most 8 rows a run, and 60 elements."""
    top = "max_batch_size = 8\nmax_batch_elements = 60"
    return Loaded(tmp_path_factory.mktemp("own"), onnx_models.sentences, both(request.param), top)


@settings(max_examples=30, deadline=None)
@given(sizes=JOBS)
def test_whatever_comes_is_answered_as_alone_within_the_limits(
    limited: Loaded, sizes: list[tuple[int, int]]
) -> None:
    jobs = [sentence(length, rows=rows, seed=n) for n, (length, rows) in enumerate(sizes)]

    _, given_to_engine = limited.answers(jobs)

    shapes = [run["ids"] for run in given_to_engine]
    assert sum(rows for rows, _ in shapes) == sum(rows for _, rows in sizes)
    assert all(rows == 1 or (rows <= 8 and rows * length <= 60) for rows, length in shapes)
