"""Bytes of a file in, its type out: what surrounds magika's model, run in each instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Written by the people who trained the model: what it looks at, and what its scores stand for.
CONFIG = json.loads(Path(__file__).with_name("config.min.json").read_text(encoding="utf-8"))


class FileTypes:
    """Made once in each instance, before its first job."""

    def __init__(self) -> None:
        self._labels: list[str] = CONFIG["target_labels_space"]

    def preprocess(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's input for the file in ``content``: its two ends, without blanks."""
        content = inputs.get("content")
        if not isinstance(content, bytes):
            raise ValueError('send the file\'s bytes, as {"content": path.read_bytes()}')
        first = np.frombuffer(content[: CONFIG["block_size"]].lstrip(), np.uint8)
        last = np.frombuffer(content[-CONFIG["block_size"] :].rstrip(), np.uint8)
        if len(first) < CONFIG["min_file_size_for_dl"]:
            raise ValueError("a file of so few bytes has no type that could be told")
        row = np.full((1, CONFIG["beg_size"] + CONFIG["end_size"]), CONFIG["padding_token"])
        first, last = first[: CONFIG["beg_size"]], last[-CONFIG["end_size"] :]
        row[0, : len(first)] = first
        row[0, row.size - len(last) :] = last
        return {"bytes": row.astype(np.int32)}

    def postprocess(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the likeliest type, which is all that the sender wants to know."""
        (scores,) = outputs["target_label"]
        best = int(scores.argmax())
        return {"label": self._labels[best], "score": round(float(scores[best]), 4)}
