"""A worker, an app and the commands over TLS: they work, and what is not verified is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.app import fleet_app
from tests.support.commands import CELERY, FLEET, run_command
from tests.support.engines import row
from tests.support.servers import TestServer
from tests.support.tls import make_certificate, tls_before
from tests.support.worker import running_worker

pytest.importorskip("flower")
from workers.telemetry.flower_broker import FleetBroker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is reached by TLS, without a scheme, and the certificates that may be trusted."""

    right: str
    wrong_name: str
    plain: str
    trusted: str

    def wrong_url(self, case: str) -> str:
        """Return a URL that nobody may talk to."""
        return (
            "rediss://"
            + {
                "unknown authority": self.right,
                "wrong name": self.wrong_name,
                "plain text": self.plain,
                "missing file": f"{self.right}?ssl_ca_certs=/nowhere/ca.pem",
            }[case]
        )


@pytest.fixture
def place(server: TestServer, client: redis.Redis, tmp_path: Path) -> Iterator[Place]:
    """Put TLS before the server, with a certificate for `localhost` and for another host."""
    (tmp_path / "other").mkdir()
    here = make_certificate(tmp_path, "DNS:localhost")
    other = make_certificate(tmp_path / "other", "DNS:example.org")
    with tls_before(server.port, here) as port, tls_before(server.port, other) as other_port:
        yield Place(
            right=f"localhost:{port}/0",
            wrong_name=f"localhost:{other_port}/0?ssl_ca_certs={other.path}",
            plain=f"localhost:{server.port}/0?ssl_ca_certs={here.path}",
            trusted=f"?ssl_ca_certs={here.path}",
        )


@pytest.mark.parametrize("scheme", ["rediss", "fleets"])
def test_everybody_works_over_tls(
    place: Place, server: TestServer, config: Path, scheme: str
) -> None:
    url = f"{scheme}://{place.right}{place.trusted}"
    settings = Settings(broker_url=url)

    with (
        running_worker(server, config, environ={"FLEET_BROKER_URL": url}),
        Client(settings) as client,
        fleet_app(settings) as (_, infer),
    ):
        answer = infer.delay("scripted", {"x": row()}).get(timeout=20)
        reply = client.submit("scripted", {"x": row()}).reply(timeout_s=20)
        status = run_command(*FLEET, "status", FLEET_BROKER_URL=url)
        # Named, it ends with the answer; a busy machine may need longer than the second by default.
        asked = (*CELERY, "inspect", "-d", "w1@test", "-t", "10", "ping")
        ping = run_command(*asked, FLEET_BROKER_URL=url)
        page = FleetBroker(settings).read({"celery"})

    assert np.array_equal(answer["y"], reply.outputs["y"])
    assert "w1@test" in status.stdout, status.stderr
    assert "pong" in ping.stdout, ping.stderr
    assert {line["name"] for line in page} == {"fleet.scripted", "celery"}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("unknown authority", "self-signed certificate"),
        ("wrong name", "Hostname mismatch"),
        ("plain text", "Does it speak TLS"),
        ("missing file", "/nowhere/ca.pem"),
    ],
)
def test_a_worker_and_a_command_refuse_what_is_not_verified_in_one_line(
    place: Place, case: str, says: str
) -> None:
    url = place.wrong_url(case)

    worker = run_command(*CELERY, "worker", "-n", "w1@test", FLEET_BROKER_URL=url)
    status = run_command(*FLEET, "status", FLEET_BROKER_URL=url)

    for ended in (worker, status):
        assert ended.returncode == 2
        assert len(ended.stderr.splitlines()) == 1
        assert says in ended.stderr


@pytest.mark.parametrize("case", ["unknown authority", "wrong name", "plain text"])
def test_an_app_refuses_what_is_not_verified_in_one_line(place: Place, case: str) -> None:
    settings = Settings(broker_url=place.wrong_url(case))

    with fleet_app(settings) as (_, infer), pytest.raises(OperationalError) as refused:
        infer.delay("scripted", {"x": row()})

    assert "FLEET_BROKER_URL" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_every_way_to_the_server_refuses_an_unknown_authority(place: Place) -> None:
    settings = Settings(broker_url=place.wrong_url("unknown authority"))

    with fleet_app(settings) as (app, _):
        with pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
            app.send_task("plain", serializer="json")
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            app.backend.client.get("x")
