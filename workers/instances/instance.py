"""What one process may own: a GPU, a MIG slice of one, or a slot of CPU cores. Plain data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

#: Variables by which the libraries below a runtime choose their number of threads.
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Kind(enum.StrEnum):
    """What an instance computes on."""

    GPU = "gpu"
    MIG = "mig"
    CPU = "cpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One of the things on a host that a process may own alone."""

    kind: Kind
    #: As NVML writes it, ``GPU-...`` or ``MIG-...``; of CPU cores it is a name of ours, which no
    #: other host has.
    uuid: str
    #: Several processes may share a GPU; they are told apart by this.
    slot: int = 0
    #: The product's name.
    name: str = ""
    #: All of its memory; None where nobody says.
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    #: The GPU that a MIG slice is cut from.
    parent_uuid: str = ""

    @property
    def key(self) -> str:
        """Its name in Redis, in `fleet status` and for ``--instances``."""
        return f"{self.uuid}/{self.slot}"

    def environ(self, *, threads: int) -> dict[str, str]:
        """Return the variables that must stand before its process imports anything.

        One UUID as it is, never an index: a process sees this one device, as its number 0.
        """
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        # For what runs within: an engine or a hook may want to say where it is.
        variables["FLEET_INSTANCE_KEY"] = self.key
        if self.kind is Kind.CPU:
            return variables
        return {
            **variables,
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def about(self) -> Mapping[str, Any]:
        """Return what people want to know of it, fit for JSON."""
        capability = self.compute_capability
        return {
            "instance": self.key,
            "kind": str(self.kind),
            "device": self.name,
            "memory_bytes": self.memory_bytes,
            "compute_capability": ".".join(map(str, capability)) if capability else None,
        }
