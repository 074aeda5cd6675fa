"""ONNX Runtime that notes what it was given, as ``runtime = "tests.support.noting:Noting"``.

The file that ``options.log`` names has a line of JSON for each run: the shape of each input.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from workers.engines.onnxrt import OnnxRuntimeEngine
from workers.models import ONNXRUNTIME, ModelSpec

Shapes: TypeAlias = dict[str, tuple[int, ...]]


class Noting(OnnxRuntimeEngine):
    """Options: ``log`` (file)."""

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        self._log = Path(str(spec.options["log"]))
        plain = dataclasses.replace(spec, runtime=ONNXRUNTIME, options={})
        super().__init__(plain, precision, threads=threads)

    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({name: array.shape for name, array in feeds.items()}) + "\n")
        return super().run(feeds)


def runs(log: Path) -> list[Shapes]:
    """Return the shapes of each run, the probe's too, in order."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return [{name: tuple(shape) for name, shape in json.loads(line).items()} for line in lines]
