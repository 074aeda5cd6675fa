"""Flower's broker page over our streams: what waits and what is claimed in each ``fleet.*`` queue.

Loaded by configs/flowerconfig.py into the Flower process; no worker imports it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import redis
from flower.utils import broker as stock

from producer.contract.names import FREE, GROUP, Keys, is_stream_queue, model_of, queue_of
from producer.contract.settings import Settings, redis_client

#: URLs of our transport, which Flower does not know, and what it calls the same server.
_SCHEMES: Final = {"fleet": "redis", "fleets": "rediss"}

#: A page waits for the answer.
_REDIS_TIMEOUT_S: Final = 2.0

#: One row of the page, under the names that its template asks for.
Row = dict[str, Any]


def install() -> None:
    """Make Flower use ours wherever the broker is ``fleet://`` or ``fleets://``."""
    choose_stock = stock.Broker.__new__

    def choose(cls: type, broker_url: str, *args: Any, **options: Any) -> Any:
        scheme, _, place = broker_url.partition("://")
        if scheme not in _SCHEMES:
            return choose_stock(cls, broker_url, *args, **options)
        lists = choose_stock(cls, f"{_SCHEMES[scheme]}://{place}", *args, **options)
        return FleetBroker(Settings.from_env(), lists=lists)

    # Not the name but the class itself: Flower's pages have imported it by now.
    stock.Broker.__new__ = choose


class FleetBroker:
    """Answers for the queues that are streams and leaves lists to Flower's own class."""

    def __init__(self, settings: Settings, *, lists: Any) -> None:
        self._settings, self._lists = settings, lists

    async def queues(self, names: Iterable[str]) -> list[Row]:
        """Return the rows of ``names`` and of every model's queue that the fleet knows."""
        given = set(names)
        ours = {name for name in given if is_stream_queue(name)}
        # In a thread: Flower has one loop for all its pages and for the events.
        rows = await asyncio.get_running_loop().run_in_executor(None, self._read, ours)
        if others := sorted(given - ours):
            rows += await self._lists.queues(others)
        return rows

    def _read(self, ours: set[str]) -> list[Row]:
        with redis_client(
            self._settings.broker_url,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
        ) as client:
            return read_rows(client, Keys(prefix=self._settings.prefix), ours)


def read_rows(client: redis.Redis, keys: Keys, queues: Iterable[str]) -> list[Row]:
    """Return one row for each of ``queues`` and of the models served within the last day.

    Workers that have gone leave queues on which jobs may wait, and Flower, which asks workers for
    their queues, would not name them.
    """
    models = cast("list[bytes]", client.zrange(keys.models, 0, -1))
    ready = _ready_instances(client, keys)
    return [
        _row(client, keys, queue, consumers=ready.get(model_of(queue), 0))
        for queue in sorted({*queues, *(queue_of(model.decode()) for model in models)})
    ]


def _row(client: redis.Redis, keys: Keys, queue: str, *, consumers: int) -> Row:
    streams = keys.streams(queue)
    # At one moment: a claim between two answers would count its jobs twice or not at all.
    with client.pipeline(transaction=True) as pipe:
        for stream in streams:
            pipe.xlen(stream)
            pipe.xpending(stream, GROUP)
        # A stream that nobody ever served has no group, and that is an answer too.
        answers = pipe.execute(raise_on_error=False)
    total = sum(map(_length, answers[::2]))
    claimed = min(total, sum(map(_claimed, answers[1::2])))
    return {
        "name": queue,
        "messages": total,
        "messages_ready": total - claimed,
        "messages_unacknowledged": claimed,
        "consumers": consumers,
    }


def _length(answer: int | Exception) -> int:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _claimed(answer: Mapping[str, Any] | Exception) -> int:
    """Return the entries that instances hold; what was given back waits again."""
    if isinstance(answer, Exception):
        if str(answer).startswith("NOGROUP"):
            return 0
        raise answer
    free = FREE.encode()
    return sum(
        int(consumer["pending"]) for consumer in answer["consumers"] if consumer["name"] != free
    )


def _ready_instances(client: redis.Redis, keys: Keys) -> dict[str, int]:
    """Return, for each model, how many instances of live workers are ready to run it."""
    found: dict[str, int] = {}
    for instance in _instances(client, keys):
        if instance.get("state") == "ready":
            for model in instance.get("models", ()):
                found[model] = found.get(model, 0) + 1
    return found


def _instances(client: redis.Redis, keys: Keys) -> Iterator[Mapping[str, Any]]:
    nodes = cast("list[bytes]", client.zrangebyscore(keys.workers, time.time(), "+inf"))
    texts = client.mget([keys.worker(node.decode()) for node in nodes]) if nodes else []
    for text in texts:
        if text is not None:
            yield from json.loads(text).get("instances", ())
