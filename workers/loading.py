"""Which models this process holds, and when one that could not be loaded is tried again."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from producer.contract.errors import EngineFailed, FleetError, OutOfMemory
from workers.engines.choice import choice
from workers.engines.nvidia import open_nvidia
from workers.engines.weights import largest_first
from workers.hooks import load_hooks
from workers.memory.shared_ceilings import SharedCeilings
from workers.models import TENSORRT, ModelSpec, load_models
from workers.plans.making import make_plans, workshop_of
from workers.runner import ModelRunner
from workers.settings import WorkerSettings
from workers.status import State, Status

logger = logging.getLogger(__name__)


def retry_gap_s(failures: int) -> float:
    """Return the seconds between a failed load and the next try: 2, 4, 8 up to 60."""
    return float(min(60, 2**failures))


#: Where others wait for the tries of a model that stays broken, they take one part in so many of
#: the time.
_TRIES_SHARE: Final = 21


def load_gap_s(failures: int, *, took_s: float, others_wait: bool) -> float:
    """Return the seconds until a model is tried again whose load has failed after ``took_s``.

    ``others_wait``: this process serves other models, which stand still meanwhile. Then the gaps
    grow until tries are a few percent of the time; else a try costs nobody anything.
    """
    least_s = took_s * min(_TRIES_SHARE - 1, 2**failures) if others_wait else 0.0
    return max(retry_gap_s(failures), least_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A model that could not be loaded."""

    text: str
    failures: int
    #: Monotonic clock.
    retry_at_s: float


class Loading:
    """The engines of one process: each is loaded once, or tried again with growing gaps."""

    def __init__(
        self,
        settings: WorkerSettings,
        names: Sequence[str],
        status: Status,
        ceilings: SharedCeilings,
    ) -> None:
        self._settings, self._names, self._status = settings, tuple(names), status
        self._ceilings = ceilings
        self.runners: dict[str, ModelRunner] = {}
        self._broken: dict[str, Broken] = {}

    def is_behind(self, names: Sequence[str]) -> bool:
        """Return whether ``names`` are not what is held, or is to be loaded."""
        return set(names) != set(self._names)

    def follow(self, names: Sequence[str]) -> None:
        """Hold ``names`` from now on: those that are new are due, all others are freed."""
        self._names = tuple(names)
        for name in [name for name in self.runners if name not in names]:
            self.runners.pop(name).close()
            logger.info("model.freed", extra={"model": name})
        self._broken = {name: broken for name, broken in self._broken.items() if name in names}
        self._tell()

    def due(self) -> list[str]:
        """Return the models that are to be loaded now."""
        now_s = time.monotonic()
        return [
            name
            for name in self._names
            if name not in self.runners
            and (name not in self._broken or self._broken[name].retry_at_s <= now_s)
        ]

    def load(self, names: Sequence[str]) -> None:
        """Load ``names`` from their files as they are now; a failure is kept, not raised."""
        if not names:
            return
        self._status.become(State.LOADING, ", ".join(names))
        for name in names:
            began_s = time.monotonic()
            try:
                self.runners[name] = self._open(name)
            except FleetError as error:
                self._failed(name, str(error), began_s=began_s)
            except Exception as error:  # noqa: BLE001 - other models go on
                self._failed(name, f"{type(error).__name__}: {error}", began_s=began_s)
            else:
                self._broken.pop(name, None)
                self._status.loads += 1
                logger.info("model.loaded", extra={"model": name})
        self._tell()

    def share_ceilings(self, name: str) -> None:
        """Exchange what is known of a model's largest batches, if it learned anything."""
        runner = self.runners[name]
        if runner.ceilings.has_news:
            self._ceilings.exchange(name, runner.memory_kind, runner.ceilings)
            self._status.models = {**self._status.models, name: _ready(runner)}

    def time_limit_s(self, name: str) -> float:
        """Return how long a batch of a model may run."""
        return self.runners[name].spec.time_limit_s or self._settings.batch_timeout_s

    def close(self) -> None:
        """Free every engine."""
        for runner in self.runners.values():
            runner.close()
        self.runners.clear()

    def _open(self, name: str) -> ModelRunner:
        spec = load_models(self._settings.config_dir, [name])[name]
        spec = _with_limits(spec, self._settings, self._names)
        hooks = load_hooks(spec)
        chosen = choice(spec)
        said = {"model": name, "runtime": chosen.runtime, "reason": chosen.why}
        logger.info("runtime.chosen", extra=said)
        if chosen.runtime == TENSORRT:
            self._make_plans(spec)
        runner = ModelRunner.load(spec, threads=self._settings.threads)
        runner.hooks = hooks
        if spec.memory_shared_by:
            self._leave_room(runner)
        self._ceilings.exchange(name, runner.memory_kind, runner.ceilings)
        if spec.find_ceiling:
            runner.find_ceilings()
            self._ceilings.exchange(name, runner.memory_kind, runner.ceilings)
        return runner

    def _leave_room(self, fresh: ModelRunner) -> None:
        """Refuse a model whose weights leave too little for a row of those that were loaded."""
        for name, runner in self.runners.items():
            try:
                runner.run_one_row()
            except OutOfMemory as error:
                taken: dict[str, int] = {}
                for each in (fresh, *self.runners.values()):
                    taken |= each.weights_bytes
                fresh.close()
                raise EngineFailed(
                    f"one row of {name} no longer fits beside it in memory_limit_bytes "
                    f"({fresh.spec.memory_limit_bytes}), which all models of this worker share. "
                    f"Their weights take {sum(taken.values())}, {largest_first(taken)}: {error}"
                ) from error

    def _make_plans(self, spec: ModelSpec) -> None:
        """Build the plans that are missing on this host; the status says how far that is."""

        def tell(text: str) -> None:
            self._status.become(State.LOADING, f"{spec.name}: {text}")

        make_plans(spec, workshop_of(open_nvidia()), tell=tell)

    def _failed(self, name: str, text: str, *, began_s: float) -> None:
        text = text.removeprefix(f"{name}: ")
        failures = self._broken[name].failures + 1 if name in self._broken else 1
        now_s = time.monotonic()
        gap_s = load_gap_s(failures, took_s=now_s - began_s, others_wait=bool(self.runners))
        self._broken[name] = Broken(
            text=" ".join(text.split()), failures=failures, retry_at_s=now_s + gap_s
        )
        said = {"model": name, "reason": text, "retry_in_s": round(gap_s, 1)}
        logger.error("model.broken", extra=said)

    def _tell(self) -> None:
        self._status.models = {
            **{name: {"state": "broken", "text": b.text} for name, b in self._broken.items()},
            **{name: _ready(runner) for name, runner in self.runners.items()},
        }
        text = "; ".join(f"{name}: {broken.text}" for name, broken in self._broken.items())
        only_broken = self._broken and not self.runners
        self._status.become(State.BROKEN if only_broken else State.READY, text)


def _ready(runner: ModelRunner) -> Mapping[str, Any]:
    return {"state": "ready", **runner.describe()}


def _with_limits(spec: ModelSpec, settings: WorkerSettings, names: Sequence[str]) -> ModelSpec:
    """Return ``spec`` with the worker's memory limits where the worker sets any."""
    if settings.memory_limit_bytes is not None:
        shared_by = tuple(sorted(names))
        limit_bytes = settings.memory_limit_bytes
        spec = dataclasses.replace(spec, memory_limit_bytes=limit_bytes, memory_shared_by=shared_by)
    if settings.memory_first_chunk_bytes is not None:
        first_bytes = settings.memory_first_chunk_bytes
        spec = dataclasses.replace(spec, memory_first_chunk_bytes=first_bytes)
    return spec
