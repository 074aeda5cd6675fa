"""What TensorRT said: it raises nothing, returns None or False, and tells a log and a recorder.

One journal a process: TensorRT keeps the first logger it is given, and calls it from threads.
"""

from __future__ import annotations

import collections
import threading
from typing import Any, Final

_KEPT: Final = 64

#: Characters of a text that an error carries.
_LONGEST: Final = 1000


class Journal:
    """A logger and an error recorder for TensorRT, and what they heard since it was cleared.

    ``trt`` is the module `tensorrt`, or one that has the names used here.
    """

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self.logger = self._make_logger()
        self.recorder = self._make_recorder()

    def clear(self) -> None:
        """Forget what was said; call it before what may fail."""
        with self._lock:
            self._lines.clear()

    def text(self) -> str:
        """Return errors and warnings since `clear`, the first first, in one line."""
        with self._lock:
            lines = list(dict.fromkeys(self._lines))
        return " ".join("; ".join(lines).split())[:_LONGEST] or "TensorRT said nothing"

    def create(self, kind: Any) -> Any:
        """Return a builder or a runtime that tells this journal; None where there is none."""
        self.clear()
        try:
            return kind(self.logger)
        except TypeError as error:
            # What the bindings make of a null pointer.
            self.heard(str(error))
            return None

    def heard(self, text: str) -> None:
        """Note a line. It is called by TensorRT, which nothing may be raised through."""
        with self._lock:
            self._lines.append(text)

    def _make_logger(self) -> Any:
        trt, heard = self._trt, self.heard
        worth_it = (
            trt.ILogger.Severity.INTERNAL_ERROR,
            trt.ILogger.Severity.ERROR,
            trt.ILogger.Severity.WARNING,
        )

        class Logger(trt.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                if severity in worth_it:
                    heard(msg)

        return Logger()

    def _make_recorder(self) -> Any:
        trt, heard = self._trt, self.heard

        class Recorder(trt.IErrorRecorder):  # type: ignore[name-defined]
            """Passes errors on; it holds none, so TensorRT never finds it full."""

            def __init__(self) -> None:
                trt.IErrorRecorder.__init__(self)

            def report_error(self, code: Any, description: str) -> bool:
                heard(f"{code.name}: {description}")
                return False

            def num_errors(self) -> int:
                return 0

            def get_error_code(self, _index: int) -> Any:
                return trt.ErrorCodeTRT.SUCCESS

            def get_error_desc(self, _index: int) -> str:
                return ""

            def has_overflowed(self) -> bool:
                return False

            def clear(self) -> None:
                """There is nothing to clear."""

        return Recorder()
