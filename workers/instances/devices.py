"""Whether the GPUs of this worker are still there, asked in a thread: a driver may take its time.

A GPU can fall off the bus, and a container can lose its right to one while it runs. Its slot then
stops and says so; the others go on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from workers.instances.discovery import Inventory

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 5.0

#: Errors that may pass are believed when they came so often in a row.
_BELIEVED: Final = 3


class Devices(threading.Thread):
    """Looks at every device of an inventory; there is nothing to look at without GPUs."""

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(name="devices", daemon=True)
        self._inventory = inventory
        self._failures: dict[str, int] = {}
        self._lost: Mapping[str, str] = {}
        self._readings: Mapping[str, Any] = {}

    def start(self) -> None:
        """Begin to look, where there is anything to look at."""
        if self._inventory.nvml is not None:
            super().start()

    def lost(self) -> Mapping[str, str]:
        """Return why a device cannot be used, by the key of each instance on one."""
        return self._lost

    def readings(self) -> Mapping[str, Any]:
        """Return what each device said last of its memory, load and power, fit for JSON."""
        return self._readings

    def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                logger.exception("devices.failed")
            time.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Ask for every device once."""
        nvml = self._inventory.nvml
        assert nvml is not None
        lost = {}
        for instance in self._inventory.instances:
            why, certain = nvml.why_lost(instance)
            seen = self._failures.get(instance.key, 0) + 1 if why else 0
            self._failures[instance.key] = _BELIEVED if why and certain else seen
            if self._failures[instance.key] >= _BELIEVED:
                lost[instance.key] = why
        self._lost = lost
        self._readings = {
            instance.key: dataclasses.asdict(nvml.read(instance))
            for instance in self._inventory.instances
        }
