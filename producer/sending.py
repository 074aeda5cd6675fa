"""Jobs on their way out: packed into Redis commands, many of them sent in one round trip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from producer.contract.call import parse_call
from producer.contract.names import Priority, shadow_of
from producer.contract.watching import is_watched
from producer.envelope import Submission
from producer.job import Job
from producer.stand_in import stand_in
from producer.tasks import Infer, priority_and_number
from producer.watched import CelerysWay

#: One round trip takes this many jobs, or this many bytes.
_SEND_AT_ONCE: Final = 128
_SEND_AT_ONCE_BYTES: Final = 4 * 1024 * 1024


class Packed(NamedTuple):
    """A job and the Redis commands that send it, the one that does so last."""

    job: Job
    commands: list[Sequence[Any]]

    @property
    def size_bytes(self) -> int:
        return sum(
            len(part)
            for command in self.commands
            for part in command
            if isinstance(part, bytes | memoryview)
        )


def in_parts(jobs: Iterable[Packed]) -> Iterator[list[Packed]]:
    """Yield ``jobs`` in parts for one round trip each.

    Where one cannot be packed, those before it are a part as well: who watches Celery was told of
    them.
    """
    part: list[Packed] = []
    size_bytes = 0
    try:
        for packed in jobs:
            part.append(packed)
            size_bytes += packed.size_bytes
            if len(part) >= _SEND_AT_ONCE or size_bytes >= _SEND_AT_ONCE_BYTES:
                yield part
                part, size_bytes = [], 0
    except Exception:
        if part:
            yield part
        raise
    if part:
        yield part


class Sending:
    """Sends jobs whose replies are told on one channel."""

    def __init__(self, infer: Infer, reply_to: str) -> None:
        self._infer, self._reply_to = infer, reply_to
        self._celerys_way = CelerysWay(infer)

    def check(self, model: str, inputs: Mapping[str, Any]) -> None:
        """Raise what speaks against a job before it is packed; may ask Redis which models are."""
        self._infer.check(parse_call((model, inputs), {}))
        self._infer.publisher.admit()

    def pack(
        self,
        job: Job,
        model: str,
        inputs: Mapping[str, Any],
        *,
        priority: str = Priority.NORMAL,
        expires_s: float | None = None,
    ) -> Packed:
        named, number = priority_and_number(priority)
        submission = Submission(
            id=job.id,
            args=(model, inputs),
            kwargs={},
            call=parse_call((model, inputs), {}),
            priority=named,
            priority_number=number,
            expires_s=expires_s,
            shadow=shadow_of(model),
            headers={"fleet_reply_to": self._reply_to},
        )
        if is_watched() and stand_in() is None:
            return Packed(job, self._celerys_way.commands(submission))
        return Packed(job, self._infer.commands(submission))

    def send(self, part: Sequence[Packed]) -> list[Any]:
        """Send ``part`` in one round trip; an error stands where a job was refused.

        Raises when nothing was accepted, or nobody knows what was.
        """
        self._infer.publisher.admit()
        commands = [command for packed in part for command in packed.commands]
        replies = iter(self._infer.publisher.replies(commands))
        # The last one sends the job; it is refused where one before it was. There is none where
        # somebody's code around Celery's kept it back.
        return [[None, *islice(replies, len(packed.commands))][-1] for packed in part]
