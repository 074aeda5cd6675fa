"""The users that docs/redis.md describes, with exactly the rights it gives them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import redis

from tests.support.servers import TestServer
from tests.support.worker import ROOT

_USER = re.compile(r"^```\nuser (fleet-\w+) (.*?)^```", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def documented_users(server: TestServer, client: redis.Redis) -> Iterator[dict[str, str]]:
    """Make the documented users for the length of the block; returns each one's URL."""
    rules = documented_rules()
    for name, words in rules.items():
        known = [word for word in words if not (is_old(client) and word == "+client|setinfo")]
        client.execute_command("ACL", "SETUSER", name, "reset", *known)
    client.acl_log_reset()
    yield {name: f"redis://{name}:change-me@127.0.0.1:{server.port}/0" for name in rules}
    client.acl_deluser(*rules)


def documented_rules() -> dict[str, list[str]]:
    """Return the rules of each user of docs/redis.md."""
    text = (ROOT / "docs" / "redis.md").read_text(encoding="utf-8")
    rules = {name: words.split() for name, words in _USER.findall(text)}
    # As the page says of them.
    rules["fleet-people"] = rules["fleet-worker"] + rules["fleet-people"]
    return rules


def is_old(client: redis.Redis) -> bool:
    """Return whether the server is older than Redis 7.2."""
    version: Any = client.info("server")["redis_version"]
    return tuple(map(int, version.split(".")[:2])) < (7, 2)


def refusals(client: redis.Redis) -> list[str]:
    """Return what users were refused."""
    log: Any = client.acl_log(128)
    refused = ["{username}: {reason} {object} ({context})".format(**entry) for entry in log]
    # The right to say its name to an old server, as redis-py tries, cannot be given.
    unknown = ": command client (" if is_old(client) else None
    return [text for text in refused if not (unknown and unknown in text)]
