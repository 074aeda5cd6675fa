"""What workers say that explains why replies do not come, asked once for many waits that are over
together.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from producer.contract.settings import Settings
from producer.contract.standing import standing
from producer.stand_in import stand_in

#: How long the answer to one is the answer to all.
_FRESH_S: Final = 1.0


class Asking:
    """Asks in a thread of its own: those of an event loop are the app's, and may all be busy."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-asking")
        self._said, self._asked_s = "", -math.inf

    def standing(self) -> Future[str]:
        """Return what is said, soon."""
        return self._thread.submit(self._standing)

    def _standing(self) -> str:
        if stand_in() is not None:
            return ""
        if time.monotonic() - self._asked_s > _FRESH_S:
            self._said = standing(self._settings)
            self._asked_s = time.monotonic()
        return self._said
