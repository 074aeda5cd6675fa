"""An app that asks again and again while there is no server goes on when there is one."""

from __future__ import annotations

import pytest
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.names import Keys, Priority, queue_of
from producer.contract.settings import Settings
from tests.support.engines import row
from tests.support.servers import running_server

pytestmark = pytest.mark.redis

#: More than redis-py's own bound for one pool.
TRIES = 150


def test_a_client_that_was_refused_many_times_sends_when_the_server_is_back() -> None:
    with running_server() as server, Client(Settings(broker_url=server.url)) as client:
        server.kill()
        for _ in range(TRIES):
            with pytest.raises(OperationalError, match="refused"):
                client.submit("m", {"x": row()})
        server.start()

        client.submit("m", {"x": row()})

        with server.client() as redis:
            assert redis.xlen(Keys().stream(queue_of("m"), Priority.NORMAL)) == 1
