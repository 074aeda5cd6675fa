"""What the demo asks of the fleet, as an app would: send every digit, collect every answer."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from producer.client import Client, Job, Reply
from producer.tasks import Infer
from workers.demo.digits import MODEL, Digits

#: Long enough for the slowest machine; no answer by then is a fault to be told.
_ANSWERED_WITHIN_S: Final = 60.0

#: Called after each answer with how many there are.
Tell = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The replies to all digits, in the order of the digits."""

    replies: tuple[Reply, ...]
    latencies_s: npt.NDArray[np.float64]
    wall_s: float
    labels: npt.NDArray[np.int64]

    @property
    def digits(self) -> npt.NDArray[np.int64]:
        """Return what each image was taken for."""
        scores = [next(iter(reply.outputs.values())) for reply in self.replies]
        taken: npt.NDArray[np.int64] = np.concatenate(scores).argmax(axis=1)
        return taken

    @property
    def accuracy(self) -> float:
        return float((self.digits == self.labels).mean())

    @property
    def mean_batch(self) -> float:
        """Return jobs per batch: a batch of n rows is named by n replies."""
        return len(self.replies) / sum(1 / reply.batch_size for reply in self.replies)

    def by_precision(self) -> list[tuple[str, int, int]]:
        """Return how many answers came from each precision and size of batch."""
        count = collections.Counter((reply.precision, reply.batch_size) for reply in self.replies)
        return [(precision, batch, jobs) for (precision, batch), jobs in sorted(count.items())]

    def out_of_memory(self) -> list[Reply]:
        """Return the replies whose first batch did not fit in memory."""
        return [reply for reply in self.replies if reply.out_of_memory]


def by_delay(infer: Infer, client: Client, digits: Digits, tell: Tell) -> Answers:
    """Send each image with ``infer.delay`` and collect the answers as they come."""
    began_s = time.monotonic()
    sent_s: dict[str, float] = {}
    for image in digits.images:
        before_s = time.monotonic()
        sent_s[infer.delay(MODEL, {"image": image}).id] = before_s
    jobs = client.as_completed(list(sent_s), timeout_s=_ANSWERED_WITHIN_S)
    return _collected(jobs, sent_s, digits, began_s, tell)


def by_client(jobs: Sequence[Job], client: Client, digits: Digits, tell: Tell) -> Answers:
    """Collect the answers to ``jobs``, which `Client.submit_many` sent while nobody worked."""
    began_s = time.monotonic()
    sent_s = {job.id: began_s for job in jobs}
    completed = client.as_completed(jobs, timeout_s=_ANSWERED_WITHIN_S)
    return _collected(completed, sent_s, digits, began_s, tell)


def _collected(
    completed: Iterator[Job], sent_s: dict[str, float], digits: Digits, began_s: float, tell: Tell
) -> Answers:
    replies: dict[str, Reply] = {}
    latencies_s: list[float] = []
    for job in completed:
        latencies_s.append(time.monotonic() - sent_s[job.id])
        replies[job.id] = job.reply(timeout_s=0)
        tell(len(replies))
    return Answers(
        replies=tuple(replies[job_id] for job_id in sent_s),
        latencies_s=np.asarray(latencies_s),
        wall_s=time.monotonic() - began_s,
        labels=digits.labels,
    )


def loads(words: Any) -> list[int]:
    """Return how many engines each process of a worker has loaded."""
    return [instance["loads"] for instance in words["instances"]]
