"""A chain that begins on an app's own worker, where the app's prefix is not the fleet's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis
from celery import chain

from producer.contract.errors import ConfigError
from producer.contract.names import Keys
from tests.support.app import PREFIX, own_app, running_plain_worker
from tests.support.servers import TestServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


def test_whoever_waits_for_such_a_chain_is_told_at_once(
    server: TestServer, client: redis.Redis, tmp_path: Path
) -> None:
    with (
        running_plain_worker(server, tmp_path / "own.log", {PREFIX: "own:"}),
        own_app(server.url, prefix="own:") as (own, infer),
    ):
        row, total = own.tasks["own.row"], own.tasks["own.total"]
        job = infer.for_model("scripted")
        began_s = time.monotonic()

        for steps in (
            chain(row.s(1), job.s(), total.s()),
            chain(row.s(1), job.s(), job.s(), total.s()),
        ):
            with pytest.raises(ConfigError, match=r"own\.total follows a job.*FLEET_PREFIX=own:"):
                steps.apply_async().get(timeout=60)

        assert time.monotonic() - began_s < 30
        assert not client.exists(*Keys().streams("fleet.scripted"))
    client.flushall()
