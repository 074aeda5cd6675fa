"""The life of one instance process: connect, load the engines, run the claim loop, drain, exit 0.

The parent (`workers.pool`) speaks to it through standard input: one line that says who it is, then
orders; the end of standard input means that the parent is dead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Final

import redis
from celery import Celery

from producer.contract.blobs import Blobs
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client
from workers.delivery.ledger import Ledger, renew
from workers.delivery.scripts import Call, send
from workers.hello import Hello, Lease
from workers.instances.leases import Leases
from workers.instances.lives import life_of
from workers.loading import Loading
from workers.loop.answers import Answers
from workers.loop.claiming import Claiming
from workers.loop.claimloop import ClaimLoop
from workers.loop.endings import Endings
from workers.loop.large_arrays import LargeArrays
from workers.memory.shared_ceilings import SharedCeilings
from workers.orders import Orders
from workers.serving import Serving
from workers.settings import WorkerSettings
from workers.status import Reporter, Status
from workers.telemetry import logs
from workers.telemetry.events import TaskEvents

logger = logging.getLogger(__name__)

#: After a renewal that failed the next one comes so soon.
_AGAIN_S: Final = 1.0


def run(hello: Hello) -> None:
    """Be the instance that ``hello`` describes; returns when it has drained."""
    # An engine may start processes of its own; none may hold the pipe open that tells of our end.
    os.set_inheritable(hello.report_fd, False)
    logs.configure(hello.log_level, who=f"instance-{hello.slot}")
    settings, worker_settings = Settings.from_env(), WorkerSettings.load()
    status = Status()
    orders = Orders(hello.models)
    reporter = Reporter(status, hello.report_fd)
    reporter.start()
    threading.Thread(target=orders.listen, args=(status,), daemon=True, name="ears").start()

    ledger = _ledger(hello, settings, worker_settings)
    client = redis_client(settings.broker_url)
    renewing = Renewing(ledger=ledger, serving=orders.serving, lease=hello.lease)
    renewing.begin(client)
    every_s = min(worker_settings.claim_ttl_s, hello.lease.ttl_s) / 3
    _start_renewer(settings, renewing, every_s=every_s)
    ceilings = SharedCeilings(client, ledger.keys)
    loading = Loading(worker_settings, hello.models, status, ceilings)
    app = _app()
    _loop(
        app,
        settings,
        client=client,
        ledger=ledger,
        loading=loading,
        events=TaskEvents(app, node=hello.node, enabled=worker_settings.events),
        status=status,
        orders=orders,
        worker=f"{hello.node}/{hello.slot}",
    ).serve()
    loading.close()
    reporter.send()
    _leave_no_thread()


def _loop(
    app: Celery,
    settings: Settings,
    *,
    client: redis.Redis,
    ledger: Ledger,
    loading: Loading,
    events: TaskEvents,
    status: Status,
    orders: Orders,
    worker: str,
) -> ClaimLoop:
    """Put the parts of the claim loop together."""
    results = None if settings.one_server else redis_client(settings.result_url)
    arrays = LargeArrays(Blobs.of(settings), ledger, client=client, results=results)
    claiming = Claiming(client=client, ledger=ledger, loading=loading, status=status, orders=orders)
    endings = Endings(
        client=client,
        results=results,
        ledger=ledger,
        answers=Answers(app),
        arrays=arrays,
        events=events,
        status=status,
        worker=worker,
    )
    return ClaimLoop(
        client=client,
        ledger=ledger,
        loading=loading,
        claiming=claiming,
        endings=endings,
        events=events,
        status=status,
        orders=orders,
        arrays=arrays,
    )


def _app() -> Celery:
    from workers.app import app

    # As Celery's own pool does: the steps of a chain that is sent from here look for it.
    app.set_current()
    app.set_default()
    return app


def _ledger(hello: Hello, settings: Settings, worker_settings: WorkerSettings) -> Ledger:
    return Ledger(
        keys=Keys(prefix=settings.prefix),
        consumer=hello.consumer,
        result_ttl_s=int(worker_settings.result_ttl_s),
        max_attempts=worker_settings.max_attempts,
        apart=not settings.one_server,
        blob_ttl_s=settings.blob_ttl_s,
    )


def _leave_no_thread() -> None:
    """End the process here, where a thread of a model's code would hold it until the parent loses
    patience: nothing is in hand any more, and no engine open.
    """
    main = threading.main_thread()
    if any(each is not main and not each.daemon for each in threading.enumerate()):
        logging.shutdown()
        os._exit(0)


def _start_renewer(settings: Settings, renewing: Renewing, *, every_s: float) -> None:
    """Renew from a thread with a connection of its own, whatever the loop does."""
    client = redis_client(settings.broker_url)

    def renew_for_ever() -> None:
        while True:
            time.sleep(every_s)
            while not renewing.try_once(client):
                time.sleep(min(every_s, _AGAIN_S))

    threading.Thread(target=renew_for_ever, daemon=True, name="renewer").start()


class Renewing:
    """Renews this process's claims and the lease of its instance; the parent does the same, and
    either is enough.
    """

    def __init__(self, *, ledger: Ledger, serving: Serving, lease: Lease) -> None:
        self._ledger, self._serving, self._instance = ledger, serving, lease.instance
        leases = Leases(keys=ledger.keys, host=lease.host, token=lease.token, ttl_s=lease.ttl_s)
        self._keep = leases.keep(lease.instance, life_of(os.getpid()))

    def begin(self, client: redis.Redis) -> None:
        """Return when Redis knows which process lives on the instance now.

        Nothing may be loaded before: a worker that sees our parent dead takes the instance at once,
        and looks only for the process that it knows of.
        """
        while not self._told(client, self._keep):
            time.sleep(_AGAIN_S)

    def try_once(self, client: redis.Redis) -> bool:
        """Return whether Redis has heard of it; end the process when its instance is another's.

        Cut off from Redis for longer than the lease lasts, and another worker was not.
        """
        queues, consumer = self._serving.held_queues, self._ledger.consumer
        return self._told(client, self._keep, renew(self._ledger.keys, queues, [consumer]))

    def _told(self, client: redis.Redis, *calls: Call[Any]) -> bool:
        try:
            ours, *_ = send(client, *calls)
        except redis.RedisError as error:
            logger.warning("renew.failed", extra={"error": logs.said(error)})
            return False
        if not ours:
            logger.error("instance.lease_lost", extra={"instance": self._instance})
            os._exit(1)
        return True
