"""The demo's third act: more jobs at once than one instance should answer, and what the worker
does.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final

from producer import status as fleet_status
from producer.client import Client, Job
from producer.contract.reach import reach
from workers.demo.digits import MODEL, Digits
from workers.up import local

JOBS: Final = 20_000

#: What waits should be answered in this time, or another instance is started.
TARGET_DRAIN_S: Final = 1.0
#: An instance is given up after so long without need of it.
DOWN_AFTER_S: Final = 3.0

_LOOK_EVERY_S: Final = 0.25
#: Far more than it takes: answering, the quiet time, and the end of one process.
_OVER_WITHIN_S: Final = 90.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was to be seen at one moment."""

    at_s: float
    #: Jobs that wait or run.
    queued: int
    instances: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """The whole act."""

    moments: tuple[Moment, ...]
    answered: int
    wall_s: float

    @property
    def most(self) -> int:
        return max(moment.instances for moment in self.moments)

    @property
    def last(self) -> int:
        return self.moments[-1].instances


def play(
    broker: local.Broker, client: Client, digits: Digits, tell: Callable[[Moment], None]
) -> Burst:
    """Send the burst, and look until all is answered and one instance is left again.

    ``tell`` is called when the number of instances changed, and about once a second while jobs
    wait.
    """
    looks = _looks(broker, time.monotonic())
    moments = [next(looks)]
    tell(moments[0])
    images = itertools.islice(itertools.cycle(digits.images), JOBS)
    jobs = client.submit_many(MODEL, ({"image": image} for image in images))
    answered_s = 0.0
    for moment in looks:
        if _worth_telling(moments[-1], moment):
            moments.append(moment)
            tell(moment)
        if not moment.queued and not answered_s:
            answered_s = moment.at_s
        if answered_s and moment.instances == 1:
            break
    return Burst(moments=tuple(moments), answered=_answered(client, jobs), wall_s=answered_s)


def _looks(broker: local.Broker, began_s: float) -> Iterator[Moment]:
    with reach(broker.settings.broker_url) as redis_client:
        while (at_s := time.monotonic() - began_s) < _OVER_WITHIN_S:
            fleet = fleet_status.read(redis_client, broker.keys, now_unix_s=time.time())
            instances = sum(instance["pid"] is not None for instance in fleet.instances())
            yield Moment(at_s=at_s, queued=sum(fleet.queued.values()), instances=instances)
            time.sleep(_LOOK_EVERY_S)


def _worth_telling(last: Moment, moment: Moment) -> bool:
    if last.instances != moment.instances:
        return True
    return bool(moment.queued) and moment.at_s - last.at_s >= 1


def _answered(client: Client, jobs: list[Job]) -> int:
    return sum(1 for job in client.as_completed(jobs, timeout_s=30) if job.reply(0).outputs)
