"""An app whose prefix is not the fleet's is told so where something would wait for ever."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any

import celery
import numpy as np
import pytest
from celery import Celery, chain, chord, group

from producer.contract.app import make_app
from producer.contract.errors import ConfigError
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.unit.producer.conftest import Worker

pytestmark = pytest.mark.redis

INPUTS = {"image": np.ones((1, 4), np.float32)}
#: Celery 5.4 puts a _ behind every prefix.
SHARED = "app1" if celery.__version__.startswith("5.4.") else "app1:"


@pytest.fixture
def own(settings: Settings) -> Iterator[Celery]:
    own = Celery(broker=settings.broker_url, backend=settings.broker_url, set_as_current=False)
    yield own
    # A result of Celery's own tells the server when it is dropped: while there is a connection.
    gc.collect()
    own.backend.client.connection_pool.disconnect()
    own.close()


def registered(own: Celery, settings: Settings, *, fleet: str, broker: str, results: str) -> Infer:
    """Return `infer` on an app and a fleet with these prefixes; none where it is empty."""
    for setting, prefix in (("broker", broker), ("result_backend", results)):
        if prefix:
            own.conf[f"{setting}_transport_options"] = {"global_keyprefix": prefix}
    return register(own, dataclasses.replace(settings, prefix=fleet))


@pytest.mark.parametrize(
    ("prefixes", "do"),
    [
        (("app1:", ""), r"""Set broker_transport_options = \{"global_keyprefix": 'app1:'\}"""),
        (("", "own:"), r"Take global_keyprefix out.*broker_transport_options.*FLEET_PREFIX=own:"),
        (("app1:", "own:"), "FLEET_PREFIX=own:"),
    ],
)
@pytest.mark.parametrize(
    "follows",
    [
        *("link", "link_error", "chain", "chord"),
        *("a group", "a chord behind it", "behind a job that follows"),
    ],
)
def test_what_follows_a_job_and_would_wait_for_ever_is_refused(
    own: Celery, settings: Settings, follows: str, prefixes: tuple[str, str], do: str
) -> None:
    fleet, broker = prefixes
    infer = registered(own, settings, fleet=fleet, broker=broker, results=fleet)
    theirs, job = own.signature("own.total"), infer.s("digits", INPUTS)
    sends = {
        "link": lambda: job.apply_async(link=theirs),
        "link_error": lambda: job.apply_async(link_error=[theirs]),
        "chain": lambda: chain(job, theirs).apply_async(),
        "chord": lambda: chord([job, job], theirs).apply_async(),
        "a group": lambda: job.apply_async(link=group(job, theirs)),
        "a chord behind it": lambda: job.apply_async(link=chord([job, job], theirs)),
        "behind a job that follows": lambda: chain(job, job.clone().set(link=theirs)).apply_async(),
    }

    with pytest.raises(ConfigError, match=rf"own\.total.*wait for ever.*{do}"):
        sends[follows]()

    infer.publisher.close()


def test_jobs_alone_and_jobs_that_follow_jobs_are_sent_whatever_the_prefix(
    own: Celery, settings: Settings, client: Any
) -> None:
    infer = registered(own, settings, fleet="app1:", broker="own:", results="own:")

    infer.delay("digits", INPUTS)
    chain(infer.s("digits", INPUTS), infer.for_model("digits").s()).apply_async()
    group(infer.s("digits", INPUTS) for _ in range(2)).apply_async()
    chain(infer.s("digits", INPUTS), group(infer.for_model("digits").s())).apply_async()
    chain(infer.s("digits", INPUTS), group([infer.for_model("digits").s()] * 2)).apply_async()
    infer.apply_async(("digits", INPUTS), link=group([infer.s("digits", INPUTS)] * 2))

    assert client.xlen(Keys(prefix="app1:").stream("fleet.digits", Priority.NORMAL)) == 7
    infer.publisher.close()


def test_with_the_same_prefix_everything_is_sent(
    own: Celery, settings: Settings, client: Any
) -> None:
    infer = registered(own, settings, fleet=SHARED, broker=SHARED, results=SHARED)
    theirs, job = own.signature("own.total"), infer.s("digits", INPUTS)

    chain(job, theirs).apply_async(link_error=theirs)
    chord([job, job], theirs).apply_async()

    assert client.xlen(Keys(prefix=SHARED).stream("fleet.digits", Priority.NORMAL)) == 3
    infer.publisher.close()


def test_a_group_or_chord_that_would_be_waited_for_in_vain_is_refused(
    own: Celery, settings: Settings, worker: Worker
) -> None:
    infer = registered(own, settings, fleet="", broker="", results="own:")
    told = r"results' prefix, 'own:_?'.*FLEET_PREFIX, ''.*result_backend_transport_options"
    jobs = group(infer.s("digits", {"i": number}) for number in range(2)).apply_async()

    with pytest.raises(ConfigError, match=told):
        jobs.get(timeout=5)
    with pytest.raises(ConfigError, match=told):
        chord([infer.s("digits", {"i": 1})] * 2, own.signature("own.total")).apply_async()

    assert [job.get(timeout=5) for job in jobs] == [{"i": 0}, {"i": 1}]
    infer.publisher.close()


def test_an_app_under_a_prefix_without_workers_is_told_once(
    settings: Settings,
    client: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Looked again at each job, as in an app that sends one a second.
    monkeypatch.setattr("producer.publisher.FRESH_S", -1.0)
    client.zadd(Keys(prefix="app1:").models, {"digits": time.time() + 60})

    for prefix in ("app1:", "other:"):
        fleet = make_app(dataclasses.replace(settings, prefix=prefix))
        infer = register(fleet)
        for _ in range(2):
            infer.delay("digits", INPUTS)
        infer.publisher.close()
        fleet.close()

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "under FLEET_PREFIX 'other:'" in told[0]
