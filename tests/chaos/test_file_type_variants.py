"""Variants of a real model of file types, on 300 real files, which it takes one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.building import built, model_folder
from tests.support.real_models import file_types, files_of_python
from tests.support.tensorrt import plan_bytes
from workers.build.store import variants_folder

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

ALL = ("fp16", "int8", "fp8")
FILES = 300


def test_file_types_are_told_as_by_the_original(tmp_path: Path) -> None:
    source = file_types()
    rows = {"calibrate": files_of_python(100, seed=2), "test": files_of_python(FILES, seed=1)}
    folder = model_folder(
        tmp_path,
        lambda path: path.symlink_to(source),
        toml='[build]\ncalibrate = "calibrate.npz"\ntest = "test.npz"\n',
        files={f"{name}.npz": arrays for name, arrays in rows.items()},
    )

    reports = {made.precision: made.manifest["report"] for made in built(folder, *ALL)}

    agreement = {
        precision: report["outputs"]["target_label"]["top1_agreement"]
        for precision, report in reports.items()
    }
    print(f"same type for {FILES} files of this Python: {agreement}")
    assert all(report["converted"] == {"Conv": 1, "MatMul": 2} for report in reports.values())
    assert agreement["fp16"] >= 0.99
    assert agreement["int8"] >= 0.97
    assert agreement["fp8"] >= 0.97


@pytest.mark.parametrize("precision", ALL)
def test_every_variant_becomes_a_plan(tmp_path: Path, precision: str) -> None:
    source = file_types()
    folder = model_folder(
        tmp_path,
        lambda path: path.symlink_to(source),
        files={"rows.npz": files_of_python(16, seed=3)},
    )

    built(folder, precision, calibrate=folder / "rows.npz")

    (path,) = variants_folder(folder).glob(f"{precision}-*.onnx")
    assert plan_bytes(path, {"bytes": ((1, 2048), (8, 2048), (8, 2048))}) > 0
