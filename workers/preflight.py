"""What is looked at before a worker starts, so that a mistake is one line within seconds.

Imports no runtime: whether a model can be loaded is found by the instances, which say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from producer.contract.errors import ConfigError
from producer.contract.reach import reach
from producer.contract.settings import Settings, redacted
from workers import server
from workers.finding import State
from workers.models import load_models
from workers.settings import WorkerSettings


def check(settings: WorkerSettings, where: Settings | None = None) -> list[str]:
    """Raise ConfigError for the first thing that would keep a worker from doing its job.

    Returns a line for each that may harm it. ``where`` the broker is comes from the environment
    unless it is given.
    """
    where = where or Settings.from_env()
    load_models(settings.config_dir, settings.models or None)
    warnings = list(_check_server(where.broker_url, variable="FLEET_BROKER_URL"))
    if where.result_url != where.broker_url:
        warnings += _check_server(where.result_url, variable="FLEET_RESULT_URL")
    return warnings


def _check_server(url: str, *, variable: str) -> Iterator[str]:
    with reach(url, variable=variable) as client:
        facts = server.read(client, redacted(url))
    found = (
        server.version(facts, check="redis", variable=variable),
        server.policy(facts, check="redis policy"),
    )
    for finding in found:
        if finding.state is State.ERROR:
            raise ConfigError(finding.line)
    yield from (finding.line for finding in found if finding.state is State.WARNING)
