"""A worker that looks for one of its own name while Redis goes away is refused in one line."""

from __future__ import annotations

import threading

import pytest

from producer.contract.app import make_app
from producer.contract.errors import ConfigError
from producer.contract.names import Keys
from tests.support.servers import running_server
from workers.preflight import check_name

pytestmark = pytest.mark.redis

NODE = "w@test"


def test_a_server_that_goes_away_while_a_namesake_is_asked_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_server() as server, server.client() as client:
        monkeypatch.setenv("FLEET_BROKER_URL", server.url)
        # As one that was killed a moment ago, for whose answer is waited for a second.
        client.set(Keys().worker(NODE), "{}")
        end = threading.Timer(0.3, server.kill)
        end.start()

        with pytest.raises(ConfigError, match="There is no Redis at"):
            check_name(make_app(), NODE)

        end.join()
