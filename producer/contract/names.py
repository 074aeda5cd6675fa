"""Every name that both sides must spell alike: task, queues, priorities and Redis keys."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Final

#: Name of the one Celery task; its kind is chosen by the model's queue.
INFER_TASK: Final = "fleet.infer"

#: Queues that start with this are Redis streams; all others stay Celery's own lists.
QUEUE_PREFIX: Final = "fleet."

#: The consumer group of every stream.
GROUP: Final = "fleet"

#: The consumer that holds entries which were given back and wait to be claimed again.
FREE: Final = "free"

#: What kombu puts behind a queue's name for the lists of its other priorities; 0, the first that it
#: reads, is the name alone.
_LIST_SUFFIXES: Final = ("", *(f"\x06\x16{number}" for number in (3, 6, 9)))

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Priority(enum.StrEnum):
    """The order in which a queue's streams are claimed from."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


#: From the first claimed to the last.
PRIORITIES: Final = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class Field(enum.StrEnum):
    """The fields of a stream entry, in the order they are written.

    A script reads ``ID``, ``ROWS`` and ``BLOBS`` without opening the others.
    """

    ID = "id"
    ROWS = "rows"
    ENVELOPE = "env"
    BODY = "body"
    #: The arrays that are not in the body: how many bytes, where, and their ids.
    BLOBS = "blobs"
    #: In place of envelope and body: a whole message as a stock app put it into a list.
    RAW = "raw"


def is_model_name(name: object) -> bool:
    """Return whether ``name`` may name a model: letters, digits, ``_`` and ``-``, at most 64."""
    return isinstance(name, str) and _MODEL_NAME.fullmatch(name) is not None


def queue_of(model: str) -> str:
    """Return the queue whose jobs ``model`` answers."""
    return QUEUE_PREFIX + model


def model_of(queue: str) -> str:
    """Return the model that answers the jobs of ``queue``."""
    return queue.removeprefix(QUEUE_PREFIX)


def shadow_of(model: str) -> str:
    """Return the name under which Flower and logs show the jobs of ``model``."""
    return f"{INFER_TASK}.{model}"


def is_stream_queue(queue: object) -> bool:
    """Return whether ``queue`` is one of ours, and therefore a stream."""
    return isinstance(queue, str) and queue.startswith(QUEUE_PREFIX)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The Redis keys of one fleet.

    | key | type | holds |
    |---|---|---|
    | ``stream(queue, priority)`` | stream | the jobs that wait or are claimed |
    | ``lists(queue)`` | lists | messages of stock Celery apps, until a worker moves them |
    | ``journal(queue)`` | hash | jobs begun and not ended: ``stream entry starts why consumer`` |
    | ``dead(queue)`` | stream | dead letters with their reason and the original entry |
    | ``delayed(queue)`` | sorted set | packed entries by the time they are due |
    | ``result(job)`` | string | the outcome, in Celery's own format, under Celery's name for it |
    | ``fence(job)`` | string | stands for a result that its client read and deleted |
    | ``blob(id)`` | string | the elements of one large array, of a job or of a reply |
    | ``kept_blob(id)`` | string | a mark: a dead letter needs this large array |
    | ``cancelled(job)`` | string | a mark: do not begin this job |
    | ``cancelled_stamp(header, stamp)`` | string | a mark: do not begin jobs with this stamp |
    | ``models`` | sorted set | models that live workers serve, by the time the entry is stale |
    | ``workers`` | sorted set | node names of workers, by the time the entry is stale |
    | ``worker(node)`` | string | the last status of one worker, as JSON |
    | ``ceilings(model, kind)`` | hash | the largest batches that fit in one kind of instance |
    | ``host(host)`` | hash | the live workers of one host: until when, and what they may use |
    | ``lease(instance)`` | string | until when an instance is held, by which worker and process |
    | ``replies(client)`` | channel | job ids of that client whose results were stored |
    """

    #: Put before every key and channel.
    prefix: str = ""

    def stream(self, queue: str, priority: Priority) -> str:
        return f"{self.prefix}fleet:stream:{queue}:{priority}"

    def streams(self, queue: str) -> tuple[str, ...]:
        """Return the queue's streams from the first claimed to the last."""
        return tuple(self.stream(queue, priority) for priority in PRIORITIES)

    def lists(self, queue: str) -> tuple[str, ...]:
        """Return where a stock app puts its messages, from the first read to the last."""
        return tuple(f"{self.prefix}{queue}{suffix}" for suffix in _LIST_SUFFIXES)

    def journal(self, queue: str) -> str:
        return f"{self.prefix}fleet:journal:{queue}"

    def dead(self, queue: str) -> str:
        return f"{self.prefix}fleet:dead:{queue}"

    def delayed(self, queue: str) -> str:
        return f"{self.prefix}fleet:delayed:{queue}"

    def queue_in(self, key: str) -> str | None:
        """Return the queue whose stream, delayed set or dead letters ``key`` names, if it does."""
        for start, end in (
            (f"{self.prefix}fleet:stream:", f":(?:{'|'.join(PRIORITIES)})"),
            (self.delayed(""), ""),
            (self.dead(""), ""),
        ):
            if found := re.fullmatch(f"{re.escape(start)}({re.escape(QUEUE_PREFIX)}.+?){end}", key):
                return found[1]
        return None

    def result(self, job_id: str) -> str:
        return f"{self.result_prefix}celery-task-meta-{job_id}"

    @property
    def result_prefix(self) -> str:
        """What is before Celery's names: as the option `global_keyprefix` of Celery 5.7 has it."""
        return self.prefix if not self.prefix or self.prefix[-1] in ":_-." else f"{self.prefix}_"

    def fence(self, job_id: str) -> str:
        return f"{self.prefix}fleet:fence:{job_id}"

    def blob(self, blob_id: str) -> str:
        return f"{self.prefix}fleet:blob:{blob_id}"

    def kept_blob(self, blob_id: str) -> str:
        return f"{self.prefix}fleet:blob-kept:{blob_id}"

    def cancelled(self, job_id: str) -> str:
        return f"{self.prefix}fleet:cancelled:{job_id}"

    def cancelled_stamp(self, header: str, stamp: str) -> str:
        return f"{self.prefix}fleet:cancelled-stamp:{header}={stamp}"

    @property
    def models(self) -> str:
        return f"{self.prefix}fleet:models"

    @property
    def workers(self) -> str:
        return f"{self.prefix}fleet:workers"

    def worker(self, node: str) -> str:
        return f"{self.prefix}fleet:worker:{node}"

    def ceilings(self, model: str, kind: str) -> str:
        return f"{self.prefix}fleet:ceilings:{model}:{kind}"

    def host(self, host: str) -> str:
        return f"{self.prefix}fleet:host:{host}"

    def lease(self, instance: str) -> str:
        return f"{self.prefix}fleet:lease:{instance}"

    def replies(self, client: str) -> str:
        return f"{self.prefix}fleet:replies:{client}"
