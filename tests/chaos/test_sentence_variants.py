"""Variants of a real sentence transformer with 22 million weights, on 200 sentences.

They are stored as int8 behind Cast and Mul, where a quantiser that does not fold constants sees no
weight at all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.building import built, model_folder
from tests.support.real_models import embeddings, sentence_embeddings, sentences
from tests.support.tensorrt import plan_bytes
from workers.build.store import variants_folder
from workers.engines.base import open_engine
from workers.models import load_source

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

Array = npt.NDArray[Any]

SENTENCES = 200
ALL = ("fp16", "int8", "fp8")
NODES = 48

#: The two that cost int8 most of its likeness: each reads what GELU lets through.
WORST = ("node_MatMul_115", "node_MatMul_182")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model, calibrated with sentences that are not among the 200."""
    source = sentence_embeddings()
    return model_folder(
        tmp_path_factory.mktemp("sentences"),
        lambda path: path.symlink_to(source),
        toml='[build]\ncalibrate = "rows.npz"\n',
        files={"rows.npz": sentences(slice(SENTENCES, SENTENCES + 64))},
    )


def test_sentences_mean_what_they_mean_to_the_original(folder: Path) -> None:
    original = vectors(folder, folder / "model.onnx", "fp32")

    likeness = {}
    for name, precisions, keep in (("all", ALL, ()), ("but two", ("int8",), WORST)):
        for made in built(folder, *precisions, keep_fp32=keep):
            path = variants_folder(folder) / made.manifest["file"]
            found = cosines(original, vectors(folder, path, made.precision))
            likeness[f"{made.precision} {name}"] = found
            assert made.manifest["report"]["converted"] == {"MatMul": NODES - len(keep)}

    for name, found in likeness.items():
        print(f"{name}: mean cosine {found.mean():.4f}, least {found.min():.4f}")
    assert likeness["fp16 all"].mean() >= 0.999
    assert likeness["int8 all"].mean() >= 0.98
    assert likeness["int8 but two"].mean() >= 0.985
    assert likeness["fp8 all"].mean() >= 0.99


@pytest.mark.parametrize("precision", ALL)
def test_every_variant_becomes_a_plan(folder: Path, precision: str) -> None:
    (made,) = built(folder, precision)

    inputs = ("input_ids", "attention_mask", "token_type_ids")
    shapes = dict.fromkeys(inputs, ((1, 8), (8, 32), (8, 64)))
    assert plan_bytes(variants_folder(folder) / made.manifest["file"], shapes) > 0


def vectors(folder: Path, path: Path, precision: str) -> Array:
    """Return the embedding of each of the 200, as the file ``path`` computes it."""
    spec = dataclasses.replace(load_source(folder), engines={precision: path})
    engine = open_engine(spec, precision, threads=1)
    rows = sentences(slice(0, SENTENCES))
    found = []
    for start in range(0, SENTENCES, 32):
        part = {name: value[start : start + 32] for name, value in rows.items()}
        hidden = engine.run(part)["last_hidden_state"]
        found.append(embeddings(hidden, part["attention_mask"]))
    engine.close()
    return np.concatenate(found)


def cosines(left: Array, right: Array) -> Array:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Array = (left * right).sum(axis=1) / lengths
    return found
