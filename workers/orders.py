"""What the parent tells its instance through standard input, a line each; its end is our end."""

from __future__ import annotations

import json
import os
import sys
import threading
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
        #: Keys of the marks whose jobs are to be ended although they run.
        self._marks: frozenset[str] = frozenset()

    def terminates(self, marks: Iterable[str]) -> bool:
        """Return whether a job that ``marks`` would cancel is to be ended while it runs."""
        return not self._marks.isdisjoint(marks)

    def forget(self) -> None:
        """Forget the marks when a batch has ended: `begin` looks for them in Redis itself.

        A mark is there before its order is given, so no job that is begun later needs the order.
        """
        self._marks = frozenset()

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
                self._marks = self._marks.union([json.loads(rest)])
            elif order == SERVE:
                self.serving.add(json.loads(rest))
            elif order == STOP_SERVING:
                self.serving.remove(json.loads(rest))
        os._exit(1)
