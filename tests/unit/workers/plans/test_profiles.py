"""Which shapes plans are made for, and which profile of a plan a batch takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from tests.onnx_models import linear
from tests.support.building import model_folder
from workers.engines.trt_profiles import PlanProfile, tightest
from workers.models import ModelSpec, load_model
from workers.plans.profiles import Range, profiles, row_counts

DECLARED = "[inputs.x]\nbatch_axis = 0\n{}[outputs.y]\nbatch_axis = 0\n"


def spec(tmp_path: Path, toml: str = "", top: str = "") -> ModelSpec:
    folder = model_folder(tmp_path, linear, toml=toml)
    path = folder / "model.toml"
    path.write_text(f"{top}\n{path.read_text()}")
    return load_model(folder)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (32, (1, 8, 16, 32)), (33, (1, 8, 16, 33))],
)
def test_a_few_batch_sizes_have_kernels_of_their_own(
    tmp_path: Path, most: int, counts: tuple[int, ...]
) -> None:
    assert row_counts(spec(tmp_path, top=f"max_batch_size = {most}")) == counts


def test_where_rows_stand_for_themselves_each_profile_has_one_number_of_rows(
    tmp_path: Path,
) -> None:
    model = spec(tmp_path, DECLARED.format(""), top="max_batch_size = 4")

    made = profiles(model, {"x": (None, 4)}, ["y"])

    assert made == [{"x": Range((rows, 4), (rows, 4), (rows, 4))} for rows in (1, 2, 4)]


@pytest.mark.parametrize("toml", ["", "[inputs.x]\nbatch_axis = 0\n"])
def test_where_rows_may_belong_together_one_profile_takes_any_number(
    tmp_path: Path, toml: str
) -> None:
    model = spec(tmp_path, toml, top="max_batch_size = 4")

    made = profiles(model, {"x": (None, 4)}, ["y"])

    assert made == [{"x": Range((1, 4), (4, 4), (4, 4))}]


def test_a_model_of_fixed_shapes_needs_no_profile(tmp_path: Path) -> None:
    assert profiles(spec(tmp_path), {"x": (1, 4)}, ["y"]) == []


def test_free_axes_have_the_sizes_that_the_file_gives(tmp_path: Path) -> None:
    given = "min_shape = [1, 2]\nmax_shape = [1, 64]\nprobe_shape = [1, 16]\n"
    model = spec(tmp_path, DECLARED.format(given), top="max_batch_size = 2")

    made = profiles(model, {"x": (None, None)}, ["y"])

    assert made[-1] == {"x": Range((2, 2), (2, 16), (2, 64))}


def test_a_padded_axis_has_every_size_up_to_the_largest(tmp_path: Path) -> None:
    given = "pad = { axis = 1, value = 0, to = [16, 64] }\n"
    model = spec(tmp_path, DECLARED.format(given), top="max_batch_size = 2")

    made = profiles(model, {"x": (None, None)}, ["y"])

    assert made[-1] == {"x": Range((2, 1), (2, 64), (2, 64))}


def test_a_free_axis_that_nothing_is_said_of_is_named_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"axis 1 of input 'x' .* write min_shape and max_shape"):
        profiles(spec(tmp_path), {"x": (None, None)}, ["y"])


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("min_shape = [1, 4]\n", "max_shape and min_shape go together"),
        ("min_shape = [1, 8]\nmax_shape = [1, 4]\n", r"min_shape is \[1, 8\], above max_shape"),
        ("min_shape = [0]\nmax_shape = [1]\n", "must list the sizes of one row"),
    ],
)
def test_a_range_that_cannot_be_meant_is_refused(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spec(tmp_path, DECLARED.format(toml))


def test_a_range_that_the_file_of_the_model_contradicts_is_refused(tmp_path: Path) -> None:
    model = spec(tmp_path, DECLARED.format("min_shape = [1, 5]\nmax_shape = [1, 5]\n"))

    with pytest.raises(ConfigError, match=r"has shape \['any', 4\]; a row of \[1, 5\] does not"):
        profiles(model, {"x": (None, 4)}, ["y"])


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("rows = [1, 8]", "rows must end with max_batch_size, which is 32"),
        ("rows = [8, 1]", "rows must list growing batch sizes"),
        ("optimization_level = 6", "optimization_level must be 0 to 5"),
        ("tf32 = 1", "tf32 must be true or false"),
        ("tf_32 = true", "tf_32 is not a known key. Did you mean 'tf32'"),
    ],
)
def test_a_mistake_in_plans_is_one_line(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spec(tmp_path, f"[plans]\n{toml}\n")


def profile(index: int, least: tuple[int, ...], largest: tuple[int, ...]) -> PlanProfile:
    return PlanProfile(index=index, ranges={"x": (least, largest)}, axes={"x": 0}, scratch_bytes=0)


def test_the_tightest_profile_takes_a_batch_and_only_rows_are_padded() -> None:
    known = [profile(0, (8, 2), (8, 64)), profile(1, (2, 2), (2, 64)), profile(2, (1, 2), (1, 64))]

    assert tightest(known, {"x": (3, 10)}) is known[0]
    assert known[0].padded({"x": (3, 10)}) == {"x": (8, 10)}
    assert tightest(known, {"x": (2, 64)}) is known[1]
    assert tightest(known, {"x": (1, 65)}) is None
    assert tightest(known, {"x": (1, 1)}) is None
    assert tightest(known, {"x": (9, 10)}) is None
