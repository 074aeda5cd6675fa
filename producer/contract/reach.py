"""Whether a Redis server can be used: asked once at the start, and told in one line if not."""

from __future__ import annotations

from typing import Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.greeting import SUPPORTED, greet, refuse_cluster
from producer.contract.settings import redacted, redis_client

#: A person waits for the answer.
ANSWER_WITHIN_S: Final = 3.0


def reach(url: str, *, variable: str = "FLEET_BROKER_URL") -> redis.Redis:
    """Return a client that was answered, by no cluster; ConfigError says why not, and names
    ``variable``.
    """
    client = redis_client(
        url, socket_timeout=ANSWER_WITHIN_S, socket_connect_timeout=ANSWER_WITHIN_S
    )
    try:
        client.ping()
        refuse_cluster(greet(client), url, variable=variable)
    except ConfigError:
        client.close()
        raise
    except (redis.RedisError, OSError, UnicodeError) as error:
        client.close()
        raise ConfigError(why_not(error, url, variable=variable)) from error
    return client


def why_not(error: Exception, url: str, *, variable: str = "FLEET_BROKER_URL") -> str:
    """Return what ``error`` means for somebody who set ``variable`` to ``url``."""
    where = redacted(url)
    match error:
        case redis.AuthenticationError() | redis.exceptions.NoPermissionError():
            return f"{where} refuses the user or the password ({error}) Check {variable}."
        case redis.TimeoutError():
            return (
                f"{where} does not answer within {ANSWER_WITHIN_S:g} s. Check {variable}, and "
                "whether a firewall lies between."
            )
        case redis.exceptions.BusyLoadingError():
            return f"{where} still loads its file. Try again in a moment."
        case redis.ConnectionError() | OSError():
            return (
                f"There is no Redis at {where} ({error}) Check {variable}, or start a server of "
                "your own with `fleet up`."
            )
        case redis.ResponseError() if "HELLO" in str(error):
            return f"{where} is older than Redis 6.0, or no Redis ({error}) {SUPPORTED}."
        case _:
            return f"{where} cannot be used ({error}) Check {variable}."
