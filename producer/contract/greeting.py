"""What a server says of itself when it is greeted: its name, its version, whether it is a cluster.

HELLO is answered to every user, where INFO may be refused to one; Redis 6.0 and all that came later
know it.
"""

from __future__ import annotations

from typing import Any, Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.settings import redacted

#: What the scripts are tested on.
SUPPORTED: Final = "Redis 6.2, 7 and 8 and Valkey 8 and 9 are supported"

HELLO: Final = ("HELLO",)


def read_greeting(reply: Any) -> dict[str, str]:
    """Return the texts of a reply to HELLO, in either protocol; empty for anything else."""
    if isinstance(reply, list):
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    if not isinstance(reply, dict):
        return {}
    return {
        name.decode(): value.decode() for name, value in reply.items() if isinstance(value, bytes)
    }


def greet(client: redis.Redis) -> dict[str, str]:
    """Return what the server says of itself; empty when it knows no greeting."""
    try:
        return read_greeting(client.execute_command(*HELLO))
    except redis.ResponseError:
        return {}


def refuse_cluster(
    greeting: dict[str, str], url: str, *, variable: str = "FLEET_BROKER_URL"
) -> None:
    """Raise ConfigError for a Redis Cluster."""
    if greeting.get("mode") == "cluster":
        raise ConfigError(
            f"{redacted(url)} is a Redis Cluster. The keys of one queue would lie on several of "
            f"its nodes, and no script can change them together. Let {variable} name a single "
            "server."
        )
