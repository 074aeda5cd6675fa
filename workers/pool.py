"""InstancePool: what Celery sees of the instance processes. It takes no tasks: instances claim
their own.

Celery starts it, asks it for numbers, closes and stops it; the work is done by `processes` and
`keeper` of `workers.parent`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, Final

import redis
from celery.concurrency.base import BasePool
from celery.worker import state as celery_state

from producer.contract.counters import add_counters
from producer.contract.names import INFER_TASK, Keys
from producer.contract.reach import why_not
from producer.contract.settings import Settings, redis_client
from workers.autoscale import Policy
from workers.instances import leasing
from workers.instances.devices import Devices
from workers.instances.discovery import Inventory
from workers.instances.host import host_id
from workers.instances.leases import Leases, token_of
from workers.instances.leasing import Leasing
from workers.instances.lives import life_of
from workers.models import config_words
from workers.parent.deaths import Death
from workers.parent.keeper import Keeper
from workers.parent.processes import Processes, pids
from workers.parent.rates import Rates
from workers.parent.scaler import Scaler
from workers.serving import Serving
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

#: How long the last release may take once every instance is gone.
_LAST_RELEASE_S: Final = 2.0


def drain_time_s(grace_s: float) -> float:
    """Return how much of the grace is for what runs: the rest is for giving it back."""
    return max(grace_s - _LAST_RELEASE_S, grace_s / 2)


class InstancePool(BasePool):
    """One process for each instance, each claiming its own batches."""

    def __init__(self, limit: int | None = None, **options: Any) -> None:
        super().__init__(limit=limit, **options)
        self.node: str = options["initargs"][1]
        self.settings = WorkerSettings.load()
        self.serving = Serving(self.app.conf.fleet_models)
        self._began_unix_s = time.time()
        self._drain_deadline_s: float | None = None
        self._drain_began = threading.Event()
        self._rates = Rates()
        least, self.limit = self.app.conf.fleet_bounds
        where = Settings.from_env()
        self._url = where.broker_url
        self.keys = Keys(prefix=where.prefix)
        inventory: Inventory = self.app.conf.fleet_inventory
        leases = Leases(
            keys=self.keys,
            host=host_id(),
            token=token_of(self.node, os.getpid(), life_of(os.getpid())),
            ttl_s=self.settings.lease_ttl_s,
        )
        self.processes = self._make_processes(inventory, leases)
        self.devices = Devices(inventory)
        # One connection: both are used by the keeper's thread alone.
        client = redis_client(where.broker_url)
        self.leasing = Leasing(
            client=client,
            leases=leases,
            instances=inventory.instances,
            slots=self.processes,
            losses=self.devices,
            since_unix_s=self._began_unix_s,
        )
        self.keeper = self._make_keeper(client)
        self.scaler = self._make_scaler(redis_client(where.broker_url), least)
        self.processes.want(least)

    def _make_processes(self, inventory: Inventory, leases: Leases) -> Processes:
        return Processes(
            node=self.node,
            serving=self.serving,
            instances=inventory.instances,
            lease_of=leases.to_process,
            threads=self.settings.threads,
            silent_limit_s=self.settings.claim_ttl_s,
            log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
            on_death=self._died,
            on_change=self._changed,
        )

    def _make_keeper(self, client: redis.Redis) -> Keeper:
        return Keeper(
            client=client,
            keys=self.keys,
            node=self.node,
            serving=self.serving,
            claim_ttl_s=self.settings.claim_ttl_s,
            consumers=lambda: [running.consumer for running in self.processes.alive()],
            status=self.status,
            leasing=self.leasing,
        )

    def _make_scaler(self, client: redis.Redis, least: int) -> Scaler:
        return Scaler(
            client=client,
            keys=self.keys,
            serving=self.serving,
            policy=Policy(
                min=least,
                max=self.limit,
                target_drain_s=self.settings.target_drain_s,
                down_after_s=self.settings.down_after_s,
            ),
            processes=self.processes,
            share=lambda: self.leasing.share,
        )

    # -- Celery's hooks, in the order it calls them

    def on_start(self) -> None:
        """Start every instance before the first job can reach any."""
        self._take_signals()
        threading.Thread(target=self._enforce_grace, daemon=True, name="grace").start()
        try:
            self.keeper.prepare()
        except redis.RedisError as error:
            # What preflight could not see: a right that the user lacks, a replica. Celery would end
            # in a traceback.
            sys.stderr.write(f"fleet: {why_not(error, self._url)}\n")
            raise SystemExit(2) from None
        self.devices.start()
        self.keeper.start()
        self.processes.start()
        self.scaler.start()

    def on_close(self) -> None:
        self.drain()

    def on_stop(self) -> None:
        """Wait for the drain, at most for the rest of the grace time; a cold shutdown waits for
        nothing.
        """
        self.drain()
        # Celery's own test: the exit status 0 is an order to end, too.
        cold = celery_state.should_terminate is not None
        cold = cold and celery_state.should_terminate is not False
        rest_s = 0.0 if cold else (self._drain_deadline_s or 0.0) - time.monotonic()
        if not self.processes.wait_gone(rest_s):
            self._end_now()
        self.keeper.stop(_LAST_RELEASE_S)

    def on_terminate(self) -> None:
        self._end_now()
        self.keeper.stop(_LAST_RELEASE_S)

    def _died(self, death: Death) -> None:
        self.keeper.died(death)

    def _changed(self) -> None:
        self.keeper.changed()

    # -- numbers

    @property
    def num_processes(self) -> int:
        return len(self.processes.alive())

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "max-concurrency": self.limit,
            "processes": pids(self.processes.alive()),
            "models": list(self.serving.models),
            "instances": self._instances(),
            "devices": self.devices.readings(),
            **leasing.status(self.leasing),
        }

    def status(self) -> dict[str, Any]:
        """Return what `fleet status` shows of this worker, and bring Celery's own totals up to
        date.
        """
        instances = self._instances()
        self._count_for_celery(instances)
        return {
            "node": self.node,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_unix_s": self._began_unix_s,
            "state": "draining" if self._drain_deadline_s is not None else "running",
            "models": list(self.serving.models),
            "config": config_words(self.settings.config_dir),
            "wanted": self.wanted,
            **leasing.status(self.leasing),
            "answered_per_s": self._rates.look(instances, now_s=time.monotonic()),
            "instances": instances,
        }

    def _instances(self) -> list[dict[str, Any]]:
        """Return every instance that this worker runs on, or ran on, each with its holder."""
        holders = self.leasing.holders
        return [
            {**each, "holder": holders.get(each["instance"], "")}
            for each in self.processes.report()
        ]

    @property
    def wanted(self) -> int:
        """How many instances should run here: no more than this worker's share of its host."""
        return min(self.processes.wanted, self.leasing.share)

    def running(self) -> int:
        """Return how many jobs the instances run at the moment, as they said last."""
        return sum(instance["running"] for instance in self.processes.report())

    # -- how many instances

    def grow(self, count: int) -> int:
        """Run ``count`` more instances, as far as there are slots; returns how many will run."""
        return self.processes.want(self.processes.wanted + count)

    def shrink(self, count: int) -> int:
        """Let ``count`` instances finish and end; at least one stays."""
        return self.processes.want(max(1, self.processes.wanted - count))

    @property
    def scales(self) -> bool:
        """Whether the queues decide how many instances run."""
        return self.scaler.policy.min < self.scaler.policy.max

    def set_bounds(self, *, least: int | None, most: int | None) -> tuple[int, int]:
        """Keep between ``least`` and ``most`` instances; returns what is possible, most first."""
        policy = self.scaler.policy
        most = min(policy.max if most is None else max(1, most), self.limit)
        least = min(policy.min if least is None else max(1, least), most)
        self.scaler.set_bounds(least, most)
        self.processes.want(min(max(self.processes.wanted, least), most))
        return most, least

    # -- the end

    def drain(self) -> None:
        """Claim nothing more; the grace time runs from the first call."""
        if self._drain_deadline_s is None:
            self._drain_deadline_s = time.monotonic() + drain_time_s(self.settings.grace_s)
            self._drain_began.set()
            self.scaler.stop()
            self.leasing.drain()
            logger.info("pool.drain", extra={"grace_s": self.settings.grace_s})
            self.processes.drain()

    def _enforce_grace(self) -> None:
        """End everything when the grace is over, whatever the main thread waits for.

        Celery says goodbye to the broker before it stops the pool; where that stands still, it
        waits for it.
        """
        self._drain_began.wait()
        time.sleep(max(0.0, (self._drain_deadline_s or 0.0) - time.monotonic()))
        self._end_now()
        self.keeper.stop(_LAST_RELEASE_S)
        os._exit(0)

    def _end_now(self) -> None:
        self.processes.kill()
        self.processes.wait_gone(_LAST_RELEASE_S)

    def _take_signals(self) -> None:
        """Drain at the first signal, before Celery's loop hears of it; end at once at the second.

        Celery has installed its handlers by now; its own would leave with an error at SIGINT and
        ignore a second SIGTERM.
        """
        celery_handler = signal.getsignal(signal.SIGTERM)

        def first_or_second(signum: int, frame: FrameType | None) -> None:
            if self._drain_deadline_s is not None:
                at_once(signum, frame)
            self.drain()
            if callable(celery_handler):
                celery_handler(signal.SIGTERM, frame)

        def at_once(signum: int, frame: FrameType | None) -> None:
            self._drain_deadline_s = time.monotonic()
            self._end_now()
            self.keeper.stop(_LAST_RELEASE_S)
            os._exit(0)

        signal.signal(signal.SIGTERM, first_or_second)
        signal.signal(signal.SIGINT, first_or_second)
        # Celery would start itself anew, by a path that `python -m celery` does not have.
        signal.signal(signal.SIGHUP, first_or_second)
        signal.signal(signal.SIGQUIT, at_once)

    def _count_for_celery(self, instances: list[dict[str, Any]]) -> None:
        total: dict[str, Any] = {}
        for instance in instances:
            for counters in instance["counters"].values():
                total = add_counters(total, counters)
        jobs = int(total.get("jobs", 0))
        celery_state.total_count[INFER_TASK] = jobs
        celery_state.all_total_count[0] = jobs
