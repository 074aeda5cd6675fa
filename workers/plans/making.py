"""The plans of a model, made where they are missing: once per host, whoever else starts with us."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from producer.contract.errors import ConfigError
from workers.build.store import locked
from workers.engines.cuda import Device
from workers.engines.nvidia import Nvidia
from workers.engines.trt_journal import Journal
from workers.models import ModelSpec
from workers.plans import store
from workers.plans.builder import build
from workers.plans.recipe import Recipe, recipe
from workers.plans.store import Missing

logger = logging.getLogger(__name__)

#: Told in words what is going on.
Tell = Callable[[str], None]

#: Seconds between two lines of the log about one build.
_LOG_EVERY_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What plans are made with, and for: TensorRT, and the device of this process."""

    trt: Any
    journal: Journal
    device: Device

    def recipe(self, spec: ModelSpec, precision: str) -> Recipe:
        """Return the recipe of one precision of ``spec`` for this device."""
        onnx = spec.engines[precision]
        if onnx is None:
            raise ConfigError(f"{spec.name}: tensorrt needs a file for {precision}.")
        version = str(self.trt.__version__)
        return recipe(spec, precision, onnx, tensorrt=version, device=self.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What became of one precision."""

    precision: str
    path: Path
    #: Why it was built; empty when it was there.
    why: str
    build_s: float


def workshop_of(nvidia: Nvidia) -> Workshop:
    """Return the workshop for the GPU of this process."""
    return Workshop(trt=nvidia.trt, journal=nvidia.journal, device=nvidia.device)


def make_plans(spec: ModelSpec, workshop: Workshop, *, tell: Tell) -> list[Made]:
    """Make the plan of every precision of ``spec`` that is not there as it should be."""
    folder = store.plans_folder(spec.folder)
    wanted = [workshop.recipe(spec, precision) for precision in spec.engines]
    if all(isinstance(store.load_plan(folder, each), bytes) for each in wanted):
        return [_there(folder, each) for each in wanted]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, waiting=lambda: tell("another process builds its plans")):
            store.remove_leftovers(folder)
            return [_made(spec, workshop, folder, each, tell=tell) for each in wanted]
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}; plans cannot be kept there. Set "
            "FLEET_CACHE to a folder that this user may write."
        ) from error


def _made(spec: ModelSpec, workshop: Workshop, folder: Path, wanted: Recipe, *, tell: Tell) -> Made:
    found = store.load_plan(folder, wanted)
    if isinstance(found, bytes):
        return _there(folder, wanted)
    where = {"model": spec.name, "precision": wanted.precision}
    logger.info("plan.building", extra={**where, "reason": found.why})
    progress = _Progress(wanted.precision, tell, where)
    progress(0.0)
    began_s = time.monotonic()
    built = build(
        workshop.trt,
        workshop.journal,
        spec,
        wanted.onnx,
        timing_cache=store.read_timing_cache(folder, wanted),
        tell=progress,
    )
    build_s = time.monotonic() - began_s
    path = store.publish(folder, wanted, built.plan, build_s=build_s)
    if built.timing_cache:
        store.write_timing_cache(folder, wanted, built.timing_cache)
    logger.info("plan.built", extra={**where, "seconds": round(build_s, 1), "path": str(path)})
    return Made(precision=wanted.precision, path=path, why=found.why, build_s=build_s)


def _there(folder: Path, wanted: Recipe) -> Made:
    path = folder / f"{wanted.name}.plan"
    return Made(precision=wanted.precision, path=path, why="", build_s=0.0)


class _Progress:
    """Tells a build's progress on, and logs it now and then."""

    def __init__(self, precision: str, tell: Tell, where: dict[str, str]) -> None:
        self._precision, self._tell, self._where = precision, tell, where
        self._logged_s = time.monotonic()

    def __call__(self, done: float) -> None:
        self._tell(f"building the plan of {self._precision}, {done:.0%}")
        if time.monotonic() - self._logged_s > _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            logger.info("plan.progress", extra={**self._where, "done": round(done, 2)})


def plan_of(spec: ModelSpec, workshop: Workshop, precision: str) -> bytes:
    """Return the plan of one precision; ConfigError says why there is none."""
    found = store.load_plan(store.plans_folder(spec.folder), workshop.recipe(spec, precision))
    if isinstance(found, Missing):
        raise ConfigError(f"{spec.name}: {found.why}. Build it: fleet build {spec.name} --plans")
    return found
