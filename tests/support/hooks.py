"""Hooks that do what their inputs say, plugged in as ``code = "tests.support.hooks:Told"``.

``before`` and ``behind`` say what `preprocess` and `postprocess` do: a word, and an argument behind
it. Every start of a hook is a line of the file that ``log`` names: which one, ``job``, and when.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.engines import row


class Told:
    """Around `tests.support.engines.Scripted`: bytes or text in, whatever is asked for out."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(0).bytes(1 << 16)

    def preprocess(self, inputs: Mapping[str, Any]) -> Any:
        return self._told("before", inputs, otherwise={"x": row(job=inputs.get("job", 0))})

    def postprocess(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        reply = {"read": inputs.get("data"), "rows": len(outputs["y"])}
        return self._told("behind", inputs, otherwise=reply)

    def _told(self, when: str, inputs: Mapping[str, Any], *, otherwise: Any) -> Any:
        if "log" in inputs:
            line = f"{when} {inputs.get('job', 0)} {time.time():.6f}\n"
            with open(inputs["log"], "a", encoding="utf-8") as log:
                log.write(line)
        word, _, argument = inputs.get(when, "").partition(" ")
        match word:
            case "sleep":
                time.sleep(float(argument))
            case "while":
                while os.path.exists(argument):
                    time.sleep(0.02)
            case "work":
                self._work(float(argument))
            case "kill":
                time.sleep(float(argument or 0))
                os.kill(os.getpid(), signal.SIGKILL)
            case "refuse":
                raise ValueError(argument)
            case "fail":
                raise KeyError(argument)
            case "exit":
                raise SystemExit(argument)
            case "shape":
                return {"x": np.zeros((1, 7), np.float32)}
            case "kind":
                return object()
            case "answer":
                return argument
        return otherwise

    def _work(self, for_s: float) -> None:
        """Compress for so long, by the time that this thread itself has computed."""
        until_s = time.thread_time() + for_s
        while time.thread_time() < until_s:
            zlib.compress(self._noise)


class Through:
    """Passes on what it gets, and takes a moment for it."""

    def preprocess(self, inputs: Mapping[str, Any]) -> Any:
        time.sleep(0.005)
        return inputs

    def postprocess(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        time.sleep(0.002)
        return outputs
