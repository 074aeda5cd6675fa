"""The Celery application that both sides build: broker, serializer, results."""

from __future__ import annotations

import datetime
import functools
import time
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery
from celery.app.control import Control
from kombu.transport import TRANSPORT_ALIASES

from producer.contract import live, wire
from producer.contract.blobs import Blobs
from producer.contract.names import INFER_TASK, Keys, queue_of
from producer.contract.reach import reach
from producer.contract.results import BACKEND
from producer.contract.settings import (
    CONNECT_TIMEOUT_S,
    HEALTH_CHECK_INTERVAL_S,
    SOCKET_TIMEOUT_S,
    Server,
    Settings,
)

_ALIASES: Final = {
    "fleet": "producer.transport:Transport",
    "fleets": "producer.transport:TlsTransport",
}

#: Commands about the queues that a worker takes jobs from.
_OF_SERVING: Final = frozenset({"add_consumer", "cancel_consumer"})


def register_transport() -> None:
    """Make ``fleet://`` and ``fleets://`` known to kombu."""
    TRANSPORT_ALIASES.update(_ALIASES)


class FleetControl(Control):
    """Remote control in JSON, which every worker and every app on the same Redis reads.

    Celery takes the format of tasks: a stock worker that starts asks all others for their news, and
    an answer in our format would end it.
    """

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.mailbox.serializer = "json"

    def broadcast(
        self,
        command: str,
        arguments: Any = None,
        destination: Any = None,
        *args: Any,
        reply: bool = False,
        **options: Any,
    ) -> Any:
        """Send ``command``; what to serve is asked of fleet workers alone, unless some are named.

        An app's own worker on the same Redis would do as it is told: read the list of the queue,
        and fail the jobs that wait there for the fleet.
        """
        if command in _OF_SERVING and not destination:
            destination = self._fleet_nodes()
            if not destination:
                return [] if reply else None
        return super().broadcast(command, arguments, destination, *args, reply=reply, **options)

    def _fleet_nodes(self) -> list[str]:
        settings = self.app.settings
        with reach(settings.broker_url) as client:
            found = live.workers(client, Keys(prefix=settings.prefix), now_unix_s=time.time())
        return [worker["node"] for worker in found]


class FleetApp(Celery):
    """A Celery application whose broker, results and settings are the fleet's."""

    control_cls = FleetControl

    #: What the environment says is read when this is first used, not when the app is made.
    given_settings: Settings | None = None

    @functools.cached_property
    def settings(self) -> Settings:
        return self.given_settings or Settings.from_env()

    def now(self) -> datetime.datetime:
        """Return what Celery's own returns, seven times as fast: it is asked for every result."""
        return datetime.datetime.now(self.timezone)


def make_app(settings: Settings | None = None) -> FleetApp:
    """Return a Celery application for the fleet, as ``settings`` or the environment say."""
    register_transport()
    wire.register()
    # Not the current app: the process may have an app of its own, and tasks that look for it.
    app = FleetApp("fleet", set_as_current=False)
    app.given_settings = settings
    app.add_defaults(lambda: celery_conf(app.settings))
    return app


def celery_url(url: str, *, scheme: str) -> str:
    """Return ``url`` as Celery and kombu can read it: under ``scheme``, without options.

    Of several Sentinels it names the first: where the master is asked for is no part of it.
    """
    server = Server.from_url(url)
    place = url.partition("://")[2].partition("?")[0]
    if server.sentinels is not None:
        user, at, _ = urlsplit(url).netloc.rpartition("@")
        host = f"[{server.host}]" if ":" in server.host else server.host
        place = f"{user}{at}{host}:{server.port}/{server.db}"
    return f"{scheme}{'s' if server.tls else ''}://{place}"


def celery_conf(settings: Settings) -> dict[str, Any]:
    """Return the Celery configuration that both sides share."""
    broker, results = map(Server.from_url, (settings.broker_url, settings.result_url))
    return {
        "broker_url": celery_url(settings.broker_url, scheme="fleet"),
        **({"broker_use_ssl": broker.tls_options} if broker.tls else {}),
        "broker_transport_options": {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": HEALTH_CHECK_INTERVAL_S,
            # kombu 5.4 tries on by itself for so long, with pauses, before each of the tries below.
            "connect_retries_timeout": 1.0,
            "global_keyprefix": settings.prefix,
            "fleet_max_body_bytes": settings.max_body_bytes,
            "fleet_sentinels": broker.sentinels,
            "fleet_blobs": Blobs.of(settings),
        },
        "broker_connection_retry_on_startup": True,
        # For ever: a worker outlives any outage of its Redis.
        "broker_connection_max_retries": None,
        # READONLY, LOADING and MISCONF are answers of a Redis that will be well again.
        "broker_channel_error_retry": True,
        # Two tries and no pause: an absent broker is reported in seconds.
        "task_publish_retry_policy": {"max_retries": 1, "interval_start": 0, "interval_max": 0},
        "result_backend": f"{BACKEND}+{celery_url(settings.result_url, scheme='redis')}",
        **({"redis_backend_use_ssl": results.tls_options} if results.tls else {}),
        "result_backend_transport_options": {
            "fleet_keyprefix": settings.prefix,
            "fleet_sentinels": results.sentinels,
        },
        "result_expires": settings.result_ttl_s,
        "redis_backend_health_check_interval": HEALTH_CHECK_INTERVAL_S,
        "task_serializer": wire.SERIALIZER,
        "result_serializer": wire.SERIALIZER,
        # Never pickle.
        "accept_content": [wire.SERIALIZER, "json"],
        "task_routes": (route,),
        # A state that is stored before the outcome would pass for one.
        "task_track_started": False,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "enable_utc": True,
    }


def route(
    name: str, args: Any, kwargs: Any, options: dict[str, Any], task: Any = None, **_: Any
) -> dict[str, str] | None:
    """Send ``fleet.infer`` to its model's queue when the caller has not named one."""
    if name != INFER_TASK or options.get("queue"):
        return None
    model = (kwargs or {}).get("model") or next(iter(args or ()), None)
    return {"queue": queue_of(model)} if isinstance(model, str) else None
