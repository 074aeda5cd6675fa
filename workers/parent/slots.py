"""Room for the process of one instance, and what a worker says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set
from typing import Any

from producer.contract.counters import add_counters
from workers.instances.instance import Instance
from workers.parent.process import InstanceProcess


@dataclasses.dataclass(slots=True, kw_only=True)
class Slot:
    """Room for the process of one instance, with what is known of those that were there before."""

    number: int
    instance: Instance
    #: A process may be started until then, by `workers.instances.clock`; 0: not at all.
    leased_until_s: float = 0.0
    #: Why its device cannot be used, where it is gone.
    lost: str = ""
    process: InstanceProcess | None = None
    #: Deaths in a row before the instance was ready.
    failures: int = 0
    #: Times in a row that no process could be started at all.
    refusals: int = 0
    #: Not started again before this. Monotonic clock.
    retry_at_s: float = 0.0
    text: str = ""
    #: Processes started in this slot.
    starts: int = 0
    #: Totals of the processes that are gone.
    counters: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    loads: int = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last process died before it was ready, and none was since."""
        return self.failures > 0 and not (self.process and self.process.was_ready)


def first_models(
    slot: Slot, slots: Iterable[Slot], models: tuple[str, ...], loadable: Set[str]
) -> tuple[str, ...]:
    """Return those of ``models`` that a new process in ``slot`` loads: all of them.

    While loads end the processes of another slot, only those that are ``loadable``, for they were
    loaded before: the model that does so is among the others, and would end this one as well.
    """
    if not any(other.is_failing for other in slots if other is not slot):
        return models
    return tuple(model for model in models if model in loadable) or models


def _state(slot: Slot) -> str:
    """Return the state of a slot in the words of an instance, ``stopped`` for one that is not
    leased, and ``lost`` for one that cannot be used.
    """
    running = slot.process
    if running is None and not slot.leased_until_s:
        return "lost" if slot.lost else "stopped"
    state = running.state if running else "starting"
    # Tried again after a death: until it is ready, the reason of that death is what people need.
    if (slot.failures or slot.refusals) and state == "starting":
        return "broken"
    return state


def _text(slot: Slot) -> str:
    """Return why a slot is as it is; what its last process died of is over once one was ready."""
    running = slot.process
    if running is not None and (running.said.get("text") or running.was_ready):
        return str(running.said.get("text") or slot.lost)
    return slot.text or slot.lost


def report(slot: Slot) -> dict[str, Any]:
    """Return what is known of a slot, fit for JSON."""
    running = slot.process
    said = dict(running.said) if running else {}
    counters = dict(slot.counters)
    for model, its in said.get("counters", {}).items():
        counters[model] = add_counters(counters.get(model, {}), its)
    return {
        "slot": slot.number,
        **slot.instance.about(),
        "pid": running.pid if running else None,
        "state": _state(slot),
        "text": _text(slot),
        "for_s": said.get("for_s", 0.0),
        "starts": slot.starts,
        "loads": slot.loads + int(said.get("loads", 0)),
        "running": int(said.get("running", 0)),
        "batch_s": float(said.get("batch_s", 0.0)),
        "batch_model": str(said.get("batch_model", "")),
        "models": said.get("models", {}),
        "counters": counters,
    }
