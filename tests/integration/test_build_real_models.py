"""Variants of real models, measured on real data against the original."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.building import built, digits_folder, model_folder
from tests.support.mlp import write_mlp
from tests.support.real_models import file_types, files_of_python

ALL = ("fp16", "int8", "fp8")
FILES = 300


@pytest.mark.timeout(180)
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


def test_a_perceptron_reads_the_digits_in_every_precision(tmp_path: Path) -> None:
    digits = digits_folder(tmp_path)
    folder = model_folder(tmp_path, write_mlp)

    made = built(
        folder,
        *ALL,
        calibrate=digits / "calibration.npz",
        test=digits / "test.npz",
        labels={"scores": "labels"},
    )

    shares = {one.precision: one.manifest["report"]["accuracy"]["scores"] for one in made}
    print(f"accuracy of fp32 and of each variant: {shares}")
    assert all(fp32 - variant <= 0.01 for fp32, variant in shares.values())
    assert all(one.manifest["report"]["converted"] == {"Gemm": 3} for one in made)
    assert all(fp32 >= 0.9 for fp32, _ in shares.values())
