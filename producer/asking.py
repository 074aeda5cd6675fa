"""What workers say that explains why replies do not come, asked beside an event loop."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from producer.contract.settings import Settings
from producer.contract.standing import standing
from producer.stand_in import stand_in


class Asking:
    """Asks in a thread of its own: those of an event loop are the app's, and may all be busy."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-asking")

    def standing(self) -> Future[str]:
        """Return what is said, soon."""
        return self._thread.submit(self._standing)

    def _standing(self) -> str:
        return standing(self._settings) if stand_in() is None else ""
