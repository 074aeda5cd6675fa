"""The end of an instance process: why, and what that means for its jobs."""

from __future__ import annotations

import dataclasses
import enum

from workers.error_text import signal_name
from workers.parent.process import InstanceProcess


class Cause(enum.StrEnum):
    """Why an instance ended, as far as its jobs are concerned."""

    #: Its jobs may be the reason.
    DIED = "died"
    #: It was our doing: the starts of its jobs are taken back.
    OURS = "ours"
    #: Its batch ran for longer than it may.
    TIMEOUT = "timeout"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """An instance that is gone."""

    consumer: str
    cause: Cause
    #: The stream and entry id of the job that ran alone for longer than it may.
    alone: str = ""


def death_of(dead: InstanceProcess) -> Death:
    """Return what is to be told of ``dead``."""
    return Death(consumer=dead.consumer, cause=_cause(dead), alone=dead.timed_out_alone)


def how_it_ended(status: int) -> str:
    """Return an exit status, negative for a signal, in words."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal_name(-status)}"


def _cause(dead: InstanceProcess) -> Cause:
    if dead.ended_by_us:
        return Cause.OURS
    return Cause.TIMEOUT if dead.timed_out else Cause.DIED
