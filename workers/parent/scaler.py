"""The thread that lets the number of instances follow the queues: look, decide, say what is
wanted.

The decision is `workers.autoscale`; the processes are started by the watcher. Celery's own
scaler looks at requests that the parent never holds; `CeleryAutoscaler` stands in its place.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis

from producer.contract import live, queues
from producer.contract.counters import add_counters
from producer.contract.names import Keys
from workers import autoscale
from workers.autoscale import Policy, Seen
from workers.parent.processes import Processes
from workers.serving import Serving
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0


class Scaler(threading.Thread):
    """Looks once a second and tells the processes how many there should be."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        keys: Keys,
        serving: Serving,
        policy: Policy,
        processes: Processes,
        share: Callable[[], int],
    ) -> None:
        super().__init__(name="scaler", daemon=True)
        self._client, self._keys, self._serving = client, keys, serving
        self._processes, self._share = processes, share
        self._stopping = threading.Event()
        self._looked = _Work(at_s=time.monotonic(), rows=0, jobs=0, busy_s=0.0)
        self.policy = policy
        self.scale = autoscale.begin(policy, now_s=time.monotonic())

    def stop(self) -> None:
        """Change nothing more."""
        self._stopping.set()

    def set_bounds(self, least: int, most: int) -> None:
        """Keep between ``least`` and ``most`` instances from the next look on."""
        self.policy = dataclasses.replace(self.policy, min=least, max=most)

    def run(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            try:
                self._turn()
            except Exception:
                logger.exception("scaler.failed")

    def _turn(self) -> None:
        most = min(self.policy.max, self._share())
        if self.policy.min == self.policy.max or most == 0:
            return
        policy = dataclasses.replace(self.policy, min=min(self.policy.min, most), max=most)
        # Remote control may have changed the number meanwhile.
        here = self._processes.wanted
        scale = dataclasses.replace(self.scale, instances=here)
        self.scale = autoscale.decide(policy, scale, self._look(), now_s=time.monotonic())
        if self.scale.instances != here:
            logger.info("scaler.changed", extra={"before": here, "wanted": self.scale.instances})
            self._processes.want(self.scale.instances)

    def _look(self) -> Seen | None:
        """Return what is to be seen; None when Redis does not answer."""
        work = _work(self._processes.report(), now_s=time.monotonic())
        last, self._looked = self._looked, work
        try:
            held = queues.count(self._client, self._keys, self._serving.queues)
            workers = self._workers()
        except redis.RedisError as error:
            logger.warning("scaler.blind", extra={"error": said(error)})
            return None
        elapsed_s = max(work.at_s - last.at_s, 1e-3) * max(1, self.scale.instances)
        jobs = sum(queue.waiting for queue in held.values())
        return Seen(
            waiting_rows=jobs * (work.rows / work.jobs if work.jobs else 1.0),
            rows_per_s=work.rows / work.busy_s if work.busy_s else None,
            busy=min(1.0, max(0.0, work.busy_s - last.busy_s) / elapsed_s),
            workers=workers,
        )

    def _workers(self) -> int:
        """Return how many live workers serve one of our models; at least this one.

        One that waits for an instance serves none.
        """
        said = live.workers(self._client, self._keys, now_unix_s=time.time())
        served = (worker.get("models", []) for worker in said if not worker.get("waiting"))
        ours = set(self._serving.models)
        return max(1, sum(not ours.isdisjoint(models) for models in served))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What this worker's instances have done until a moment."""

    at_s: float
    rows: int
    jobs: int
    busy_s: float


def _work(instances: Sequence[Mapping[str, Any]], *, now_s: float) -> _Work:
    total: dict[str, Any] = {}
    for instance in instances:
        for counters in instance["counters"].values():
            total = add_counters(total, counters)
    # A long batch counts while it runs, not only when it has ended.
    running_s = sum(float(instance["batch_s"]) for instance in instances)
    return _Work(
        at_s=now_s,
        rows=int(total.get("rows", 0)),
        jobs=int(total.get("jobs", 0)),
        busy_s=float(total.get("busy_s", 0.0)) + running_s,
    )


class CeleryAutoscaler:
    """What ``--autoscale`` and ``celery control autoscale`` reach: our bounds, Celery's names."""

    #: Celery's timer calls `maybe_scale` this often; there is nothing to do.
    keepalive = 30.0

    def __init__(self, pool: Any, max_concurrency: int, min_concurrency: int = 0, **_: Any) -> None:
        self._pool = pool

    def maybe_scale(self, *_: Any, **__: Any) -> None:
        """Do nothing: the scaler's thread looks by itself."""

    def update(self, max: int | None = None, min: int | None = None) -> tuple[int, int]:  # noqa: A002
        """Set new bounds and return them as Celery does: most, least."""
        bounds: tuple[int, int] = self._pool.set_bounds(least=min, most=max)
        return bounds

    def info(self) -> dict[str, Any]:
        policy = self._pool.scaler.policy
        return {"max": policy.max, "min": policy.min, "current": self._pool.wanted}

    def start(self) -> None:
        """Celery starts what it made; the pool has started the scaler."""

    def stop(self) -> None:
        """The pool stops the scaler."""
