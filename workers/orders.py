"""What the parent tells its instance through standard input, a line each; its end is our end."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final

from workers.serving import Serving
from workers.status import State, Status

DRAIN: Final = "drain"
TERMINATE: Final = "terminate"
SERVE: Final = "serve"
STOP_SERVING: Final = "stop-serving"


def terminate_line(mark: str) -> str:
    """Return the order to end the jobs that ``mark`` cancels, though they run."""
    return f"{TERMINATE} {json.dumps(mark)}"


def serve_line(model: str) -> str:
    """Return the order to load ``model`` and claim its jobs."""
    return f"{SERVE} {json.dumps(model)}"


def stop_serving_line(model: str) -> str:
    """Return the order to claim no more jobs of ``model`` and free its engines."""
    return f"{STOP_SERVING} {json.dumps(model)}"


class Orders:
    """The orders that stand; written by the thread that listens, read by the claim loop."""

    def __init__(self, models: Iterable[str]) -> None:
        self.draining = threading.Event()
        self.serving = Serving(models)
        #: When each mark was ordered whose jobs are to be ended although they run. Monotonic clock.
        self._marks: dict[str, float] = {}
        self._changing = threading.Lock()

    def terminates(self, marks: Iterable[str]) -> bool:
        """Return whether a job that ``marks`` would cancel is to be ended while it runs."""
        return not self._marks.keys().isdisjoint(marks)

    def forget(self, *, before_s: float) -> None:
        """Forget the marks that were ordered before the oldest batch in hand was begun, at
        ``before_s``: `begin` looks for them in Redis itself.

        A mark is there before its order is given, so no job that is begun later needs the order.
        """
        if self._marks:
            with self._changing:
                self._marks = {mark: at_s for mark, at_s in self._marks.items() if at_s > before_s}

    def listen(self, status: Status) -> None:
        """Take orders until the parent is gone; then end, where the kernel did not see to that."""
        for line in sys.stdin:
            order, _, rest = line.strip().partition(" ")
            if order == DRAIN:
                self.draining.set()
                if status.state in (State.STARTING, State.LOADING):
                    # Nothing is held while engines load, and a load cannot be interrupted.
                    os._exit(0)
            elif order == TERMINATE:
                with self._changing:
                    self._marks = {**self._marks, json.loads(rest): time.monotonic()}
            elif order == SERVE:
                self.serving.add(json.loads(rest))
            elif order == STOP_SERVING:
                self.serving.remove(json.loads(rest))
        os._exit(1)
