"""Variants of real models, measured on real data against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.building import built, digits_folder, model_folder
from tests.support.mlp import write_mlp
from tests.support.real_models import (
    embeddings,
    file_types,
    files_of_python,
    sentence_embeddings,
    sentences,
)
from workers.build.store import variants_folder
from workers.engines.base import Engine, open_engine
from workers.models import load_source

FILES = 300
SENTENCES = 200

#: The two that cost int8 most of its likeness: each reads what GELU lets through.
WORST = ("node_MatMul_115", "node_MatMul_182")


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


@pytest.mark.timeout(240)
def test_sentences_mean_what_they_mean_to_the_original(tmp_path: Path) -> None:
    source = sentence_embeddings()
    folder = model_folder(
        tmp_path,
        lambda path: path.symlink_to(source),
        toml='[build]\ncalibrate = "rows.npz"\n',
        files={"rows.npz": sentences(slice(SENTENCES, 264))},
    )
    rows = sentences(slice(0, SENTENCES))
    original = vectors(folder, source, rows)

    likeness = {}
    for name, precision, keep in (
        ("fp16", "fp16", ()),
        ("int8", "int8", ()),
        ("int8 but two", "int8", WORST),
        ("fp8", "fp8", ()),
    ):
        (made,) = built(folder, precision, keep_fp32=keep)
        path = variants_folder(folder) / made.manifest["file"]
        likeness[name] = cosines(original, vectors(folder, path, rows))
        assert made.manifest["report"]["converted"] == {"MatMul": 48 - len(keep)}

    for name, found in likeness.items():
        print(f"{name}: mean cosine {found.mean():.4f}, least {found.min():.4f}")
    assert likeness["fp16"].mean() >= 0.999
    assert likeness["int8"].mean() >= 0.975
    assert likeness["int8 but two"].mean() >= 0.98
    assert likeness["fp8"].mean() >= 0.98


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


ALL = ("fp16", "int8", "fp8")

Array = npt.NDArray[Any]


def vectors(folder: Path, path: Path, rows: dict[str, Array]) -> Array:
    """Return the embedding of each row, as the file ``path`` computes it."""
    engine = opened(folder, path)
    found = []
    for start in range(0, len(rows["input_ids"]), 32):
        part = {name: value[start : start + 32] for name, value in rows.items()}
        hidden = engine.run(part)["last_hidden_state"]
        found.append(embeddings(hidden, part["attention_mask"]))
    engine.close()
    return np.concatenate(found)


def opened(folder: Path, path: Path) -> Engine:
    spec = load_source(folder)
    spec.engines["fp32"] = path  # type: ignore[index]
    return open_engine(spec, "fp32", threads=1)


def cosines(left: Array, right: Array) -> Array:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Array = (left * right).sum(axis=1) / lengths
    return found
