"""A sentence in, its vector out: what surrounds MiniLM, run in each instance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

#: What is longer is cut, as the people who trained the model did.
MOST_TOKENS = 128


class Sentences:
    """Made once in each instance, before its first job."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        self._tokenizer.enable_truncation(MOST_TOKENS)
        # Each sentence as long as it is: padding is the worker's, for those that run together.
        self._tokenizer.no_padding()

    def preprocess(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's inputs for the sentence in ``text``."""
        text = inputs.get("text")
        if not isinstance(text, str):
            raise ValueError('send one sentence, as {"text": "..."}')
        ids = np.array([self._tokenizer.encode(text).ids], np.int64)
        return {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }

    def postprocess(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean over the sentence's own tokens, of length 1."""
        (hidden,) = outputs["last_hidden_state"]
        mean = hidden.mean(axis=0)
        return {"vector": mean / np.linalg.norm(mean)}
