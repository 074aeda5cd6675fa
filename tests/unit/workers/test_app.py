"""Which worker options are refused, and which models a worker serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.concurrency.solo import TaskPool as Solo

from producer.contract.errors import ConfigError
from tests.support.worker import SCRIPTED, config_folder
from workers.app import instance_bounds, meaningless_option, models_to_serve
from workers.pool import InstancePool
from workers.settings import WorkerSettings

#: What Celery's command hands on when nothing is given.
DEFAULTS: dict[str, Any] = {
    "pool": InstancePool,
    "prefetch_multiplier": 4,
    "beat": None,
    "purge": False,
    "exclude_queues": [],
    "autoscale": None,
    "time_limit": None,
}
CONF = {"worker_prefetch_multiplier": 4, "worker_disable_prefetch": False}


@pytest.fixture
def settings() -> Iterator[WorkerSettings]:
    with config_folder({name: dict(SCRIPTED) for name in ("a", "b", "c")}) as folder:
        yield WorkerSettings.load(folder, {})


@pytest.mark.parametrize(
    "options", [{}, DEFAULTS, {"pool": "workers.pool:InstancePool"}, {"concurrency": 3}]
)
def test_what_celery_hands_on_by_itself_is_accepted(options: dict[str, Any]) -> None:
    assert meaningless_option(options, CONF) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool": Solo}, "the solo pool"),
        ({"pool": "gevent"}, "the gevent pool"),
        ({"pool": None, "pool_cls": Solo}, "the solo pool"),
        ({"time_limit": 5.0}, "--time-limit"),
        ({"soft_time_limit": 5.0}, "--soft-time-limit"),
        ({"max_tasks_per_child": 1}, "--max-tasks-per-child"),
        ({"max_memory_per_child": 1}, "--max-memory-per-child"),
        ({"prefetch_multiplier": 1}, "--prefetch-multiplier"),
        ({"exclude_queues": ["fleet.a"]}, "--exclude-queues"),
        ({"purge": True}, "--purge"),
        ({"beat": True}, "--beat"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_means_nothing_here_is_named(options: dict[str, Any], says: str) -> None:
    text = meaningless_option({**DEFAULTS, **options}, CONF)

    assert text is not None
    assert says in text
    assert "\n" not in text


def test_disabled_prefetch_is_found_where_celery_puts_it() -> None:
    text = meaningless_option(DEFAULTS, {**CONF, "worker_disable_prefetch": True})

    assert text is not None
    assert "--disable-prefetch" in text


def test_every_model_is_served_unless_some_are_named(settings: WorkerSettings) -> None:
    assert models_to_serve(None, settings) == ("a", "b", "c")
    assert models_to_serve([], settings) == ("a", "b", "c")


def test_queues_on_the_command_line_win_over_the_settings(settings: WorkerSettings) -> None:
    some = WorkerSettings(config_dir=settings.config_dir, models=("a", "b"))

    assert models_to_serve(None, some) == ("a", "b")
    assert models_to_serve(["fleet.c"], some) == ("c",)
    assert models_to_serve(["fleet.c", "fleet.a"], some) == ("a", "c")


@pytest.mark.parametrize("queues", [["celery"], ["fleet.a", "celery"]])
def test_a_queue_of_another_app_is_refused(queues: list[str], settings: WorkerSettings) -> None:
    with pytest.raises(ConfigError, match="-Q celery"):
        models_to_serve(queues, settings)


def test_a_model_that_is_not_there_is_refused_with_those_that_are(
    settings: WorkerSettings, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'nosuch'"):
        models_to_serve(["fleet.nosuch"], settings)


@pytest.mark.parametrize(
    ("concurrency", "autoscale", "least", "bounds"),
    [
        (None, None, 0, (4, 4)),
        (2, None, 0, (2, 2)),
        (9, None, 0, (4, 4)),
        (None, (3, 1), 0, (1, 3)),
        (None, (9, 0), 0, (1, 4)),
        (None, None, 1, (1, 4)),
        (2, None, 3, (2, 2)),
    ],
)
def test_the_number_of_instances_is_bounded_by_slots_options_and_settings(
    concurrency: int | None, autoscale: tuple[int, int] | None, least: int, bounds: tuple[int, int]
) -> None:
    found = instance_bounds(4, concurrency=concurrency, autoscale=autoscale, least=least)

    assert found == bounds


def test_more_than_there_are_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    instance_bounds(4, concurrency=9, autoscale=None, least=0)

    (line,) = capsys.readouterr().err.splitlines()
    assert "-c 9" in line
    assert "4 instance(s)" in line
