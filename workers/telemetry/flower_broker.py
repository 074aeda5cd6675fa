"""Flower's broker page over our streams: what waits and what is claimed in each ``fleet.*`` queue.

Loaded by configs/flowerconfig.py into the Flower process; no worker imports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import redis
from flower.utils import broker as stock

from producer.contract import live
from producer.contract.names import Keys, is_stream_queue, queue_of
from producer.contract.queues import Queue, look
from producer.contract.settings import Settings, redis_client
from producer.transport import Channel

#: A page waits for the answer.
_REDIS_TIMEOUT_S: Final = 2.0

#: One row of the page, under the names that its template asks for.
Row = dict[str, Any]


def install() -> None:
    """Make Flower use ours wherever the broker is ``fleet://`` or ``fleets://``."""
    choose_stock = stock.Broker.__new__

    def choose(cls: type, broker_url: str, *args: Any, **options: Any) -> Any:
        if broker_url.startswith(("fleet://", "fleets://")):
            return FleetBroker(Settings.from_env())
        return choose_stock(cls, broker_url, *args, **options)

    # Not the name but the class itself: Flower's pages have imported it by now.
    stock.Broker.__new__ = choose


class FleetBroker:
    """Answers for the queues that are streams, and for the lists of plain workers beside them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def queues(self, names: Iterable[str]) -> list[Row]:
        """Return the rows of ``names`` and of every model's queue that the fleet knows."""
        # In a thread: Flower has one loop for all its pages and for the events.
        return await asyncio.get_running_loop().run_in_executor(None, self.read, set(names))

    def read(self, names: set[str]) -> list[Row]:
        """Do the same at once."""
        keys = Keys(prefix=self._settings.prefix)
        ours = {name for name in names if is_stream_queue(name)}
        with redis_client(
            self._settings.broker_url,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
        ) as client:
            lists = read_lists(client, keys, sorted(names - ours))
            return read_rows(client, keys, ours) + lists


def read_lists(client: redis.Redis, keys: Keys, queues: Sequence[str]) -> list[Row]:
    """Return one row for each of ``queues``, which are lists of kombu's, one a priority."""
    steps = Channel.priority_steps
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            for step in steps:
                pipe.llen(f"{keys.prefix}{queue}{f'{Channel.sep}{step}' if step else ''}")
        lengths = iter(pipe.execute())
    return [{"name": queue, "messages": sum(next(lengths) for _ in steps)} for queue in queues]


def read_rows(client: redis.Redis, keys: Keys, queues: Iterable[str]) -> list[Row]:
    """Return one row for each of ``queues`` and of the models served within the last day.

    Workers that have gone leave queues on which jobs may wait, and Flower, which asks workers for
    their queues, would not name them.
    """
    now_unix_s = time.time()
    known = map(queue_of, live.models(client, keys, now_unix_s=now_unix_s))
    names = sorted({*queues, *known})
    return [_row(queue) for queue in look(client, keys, names, now_unix_s=now_unix_s)]


def _row(queue: Queue) -> Row:
    return {
        "name": queue.name,
        "messages": queue.held.queued,
        "messages_ready": queue.held.waiting,
        "messages_unacknowledged": queue.held.claimed,
        "consumers": queue.served.ready,
    }
