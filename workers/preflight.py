"""What is looked at before a worker starts, so that a mistake is one line within seconds.

Imports no runtime: whether a model can be loaded is found by the instances, which say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import redis
from kombu.exceptions import OperationalError

from producer.contract.errors import ConfigError
from producer.contract.names import Keys
from producer.contract.reach import reach, why_not
from producer.contract.settings import Settings, redacted
from producer.contract.store import Store
from workers import server
from workers.finding import State
from workers.models import load_models
from workers.settings import WorkerSettings

#: How long a worker of the same name has to answer; one that answers does so in milliseconds.
_NAMESAKE_S: Final = 1.0


def check(settings: WorkerSettings, where: Settings | None = None) -> list[str]:
    """Raise ConfigError for the first thing that would keep a worker from doing its job.

    Returns a line for each that may harm it. ``where`` the broker is comes from the environment
    unless it is given.
    """
    where = where or Settings.from_env()
    load_models(settings.config_dir, settings.models or None)
    if where.blob_url:
        _check_store(where.blob_url)
    warnings = list(_check_server(where.broker_url, variable="FLEET_BROKER_URL"))
    if where.result_url != where.broker_url:
        warnings += _check_server(where.result_url, variable="FLEET_RESULT_URL")
    return warnings


def check_name(app: Any, node: str) -> None:
    """Raise ConfigError when a worker called ``node`` runs already.

    The two would overwrite each other's status, and both obey what is meant for one. One that was
    killed, or stands still, does not answer and stops nobody.
    """
    where = Settings.from_env()
    with _reached(where.broker_url, variable="FLEET_BROKER_URL") as client:
        if not client.exists(Keys(prefix=where.prefix).worker(node)):
            return
        with app.connection_for_write() as connection:
            if app.control.ping(destination=[node], timeout=_NAMESAKE_S, connection=connection):
                raise ConfigError(
                    f"a worker called {node} runs already. Give this one a name of its own: "
                    "fleet worker -n another@%h"
                )


@contextlib.contextmanager
def _reached(url: str, *, variable: str) -> Iterator[redis.Redis]:
    """Yield a client of a server that may go away while it is asked."""
    try:
        with reach(url, variable=variable) as client:
            yield client
    except (redis.RedisError, OSError, OperationalError) as error:
        raise ConfigError(why_not(error, url, variable=variable)) from error


def _check_store(url: str) -> None:
    try:
        Store(url).check()
    except OperationalError as error:
        raise ConfigError(str(error)) from None


def _check_server(url: str, *, variable: str) -> Iterator[str]:
    with _reached(url, variable=variable) as client:
        facts = server.read(client, redacted(url))
    found = (
        server.version(facts, check="redis", variable=variable),
        server.policy(facts, check="redis policy"),
    )
    for finding in found:
        if finding.state is State.ERROR:
            raise ConfigError(finding.line)
    yield from (finding.line for finding in found if finding.state is State.WARNING)
