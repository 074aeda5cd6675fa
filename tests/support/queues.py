"""One queue as Redis counts it, and what must be true of it when every job has ended."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from producer.contract.names import FREE, GROUP, Keys, queue_of
from tests.support.servers import TestServer
from tests.support.waiting import wait_until

_KEYS: Final = Keys()


class Tally(NamedTuple):
    """The jobs of one queue, by where they are."""

    #: In a stream and nobody's.
    waiting: int = 0
    #: Claimed once and given back; whoever claims next gets them first.
    given_back: int = 0
    #: Held by an instance.
    claimed: int = 0
    #: With a start that has no outcome.
    begun: int = 0
    delayed: int = 0
    dead: int = 0

    @property
    def unfinished(self) -> int:
        return self.waiting + self.given_back + self.claimed


def tally(server: TestServer, model: str) -> Tally:
    """Count the jobs of ``model``'s queue; the streams must have their groups."""
    queue = queue_of(model)
    with server.client() as client:
        pipe = client.pipeline(transaction=False)
        for stream in _KEYS.streams(queue):
            pipe.xlen(stream)
            pipe.xpending(stream, GROUP)
        pipe.hlen(_KEYS.journal(queue))
        pipe.zcard(_KEYS.delayed(queue))
        pipe.xlen(_KEYS.dead(queue))
        *streams, begun, delayed, dead = pipe.execute()
    entries, pending = sum(streams[::2]), sum(p["pending"] for p in streams[1::2])
    holders: list[Any] = [holder for p in streams[1::2] for holder in p["consumers"]]
    free = sum(int(h["pending"]) for h in holders if h["name"] == FREE.encode())
    return Tally(entries - pending, free, pending - free, begun, delayed, dead)


def oldest_claim_s(server: TestServer, model: str) -> float:
    """Return how long ago the claim was renewed that waits for it the longest."""
    with server.client() as client:
        ages: list[int] = []
        for stream in _KEYS.streams(queue_of(model)):
            found: Any = client.xpending_range(stream, GROUP, "-", "+", 1000)
            ages += [
                pending["time_since_delivered"]
                for pending in found
                if pending["consumer"] != FREE.encode()
            ]
    return max(ages, default=0) / 1000


def consumers(server: TestServer, model: str) -> set[str]:
    """Return the names of all consumers but the one of given-back entries."""
    with server.client() as client:
        found: list[Any] = [
            consumer
            for stream in _KEYS.streams(queue_of(model))
            for consumer in client.xinfo_consumers(stream, GROUP)
        ]
    return {consumer["name"].decode() for consumer in found} - {FREE}


def assert_all_ended(server: TestServer, model: str, *, dead: int = 0) -> None:
    """No job waits, is held, begun or delayed; ``dead`` are dead letters."""
    # With results on another server an answer can be read a moment before its job is acked.
    wait_until(
        lambda: tally(server, model) == Tally(dead=dead),
        what=f"every job to have ended ({dead} dead); {tally(server, model)}",
        timeout_s=5,
    )
