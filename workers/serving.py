"""Which models a worker serves: chosen at its start, changed by remote control."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from producer.contract.names import queue_of

#: A model stays known this long after its last worker, so that its queue may wait for the next
#: one.
MODEL_LIFE_S: Final = 86_400


class Serving:
    """The models of one worker; changed by the thread of remote control, read by all others."""

    def __init__(self, models: Iterable[str]) -> None:
        self._models = self._ever = tuple(models)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models that are served now."""
        return self._models

    @property
    def queues(self) -> list[str]:
        """Return the queues that are claimed from."""
        return [queue_of(model) for model in self._models]

    @property
    def held_queues(self) -> list[str]:
        """Return those, and the ones before: an instance may still hold jobs of them."""
        return [queue_of(model) for model in self._ever]

    def add(self, model: str) -> None:
        self._ever = (*(name for name in self._ever if name != model), model)
        self._models = (*(name for name in self._models if name != model), model)

    def remove(self, model: str) -> None:
        self._models = tuple(name for name in self._models if name != model)
