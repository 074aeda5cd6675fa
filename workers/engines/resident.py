"""The engines of one model: all open from the start, and opened anew where memory broke one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from producer.contract.errors import ConfigError, FleetError, OutOfMemory
from workers.batching.stacking import Array
from workers.engines.base import Engine, EngineLost, open_engine
from workers.error_text import one_line
from workers.models import ModelSpec

logger = logging.getLogger(__name__)


class ResidentEngines:
    """Every precision of a model in this process."""

    def __init__(self, spec: ModelSpec, *, threads: int) -> None:
        self._spec, self._threads = spec, threads
        self._open: dict[str, Engine] = {}
        #: Engines that were opened anew.
        self.reopened = 0
        try:
            for precision in spec.engines:
                self._open[precision] = open_engine(spec, precision, threads=threads)
            _check_alike(spec, self._open)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._spec.engines)

    def __getitem__(self, precision: str) -> Engine:
        if precision not in self._open:
            self._open[precision] = self._opened_anew(precision)
        return self._open[precision]

    def run(self, precision: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; ``OutOfMemory`` holds nothing of the run that failed."""
        try:
            return self[precision].run(feeds)
        except (OutOfMemory, MemoryError) as error:
            text = str(error) if isinstance(error, FleetError) else one_line(error)
        # Not in the handler: what was caught keeps the engine's frames alive, and with them memory
        # that the next run needs.
        self._close_if_broken(precision)
        raise OutOfMemory(text)

    def close(self) -> None:
        for engine in self._open.values():
            engine.close()
        self._open.clear()

    def _close_if_broken(self, precision: str) -> None:
        """Free at once an engine that cannot run again; it is opened when it is needed."""
        engine = self._open.get(precision)
        if engine is not None and not engine.usable_after_out_of_memory:
            del self._open[precision]
            engine.close()

    def _opened_anew(self, precision: str) -> Engine:
        """Open an engine again; where not even that works, the process has to end."""
        where = {"model": self._spec.name, "precision": precision}
        try:
            engine = open_engine(self._spec, precision, threads=self._threads)
        except FleetError as error:
            raise EngineLost(
                f"{self._spec.name}: {precision} could not be opened again after it had run out "
                f"of memory: {error}"
            ) from error
        self.reopened += 1
        logger.info("engine.reopened", extra=where)
        return engine


def _check_alike(spec: ModelSpec, engines: Mapping[str, Engine]) -> None:
    """Refuse engines that cannot stand in for each other."""
    main = engines[spec.precision]
    for precision, engine in engines.items():
        for side in ("inputs", "outputs"):
            wanted = sorted(tensor.name for tensor in getattr(main, side))
            found = sorted(tensor.name for tensor in getattr(engine, side))
            if wanted != found:
                raise ConfigError(
                    f"{spec.name}: {side} of {precision} are {found}, those of {spec.precision} "
                    f"are {wanted}; both must be the same model."
                )
