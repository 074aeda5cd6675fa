"""The errors of a job and of the fleet: one tree, a stable code on each class.

They travel in a result as class name and message, so every class takes the message alone
and the client gets back the class that the worker raised.
"""

from __future__ import annotations

from typing import ClassVar


class FleetError(Exception):
    """The root of everything the fleet raises on purpose."""

    #: What a program may compare; never changes once released.
    code: ClassVar[str] = "ENGINE_FAILED"
    #: What a web service answers with: 4xx where other inputs help, 5xx where the caller is not at
    #: fault, and of these 503 where asking again may help.
    http_status: ClassVar[int] = 500


class BadRequest(FleetError):
    """The job's inputs do not fit the model."""

    code = "BAD_REQUEST"
    http_status = 422


class UnknownModel(FleetError):
    """No worker serves a model of this name."""

    code = "UNKNOWN_MODEL"
    http_status = 503


class OutOfMemory(FleetError):
    """One row did not fit in memory, in any precision the model has."""

    code = "OUT_OF_MEMORY"


class NonFinite(FleetError):
    """The model answered with NaN or infinity where it may not."""

    code = "NON_FINITE"


class WorkerLost(FleetError):
    """The job was started as often as allowed and its process died each time."""

    code = "WORKER_LOST"


class JobTimeout(FleetError, TimeoutError):
    """The job took longer than its limit, or no reply came in the time the caller gave."""

    code = "TIMEOUT"
    http_status = 504


class Expired(FleetError):
    """The job was not started before the time its sender set."""

    code = "EXPIRED"
    http_status = 504


class Cancelled(FleetError):
    """The job was cancelled before it started."""

    code = "CANCELLED"
    http_status = 503


class Overloaded(FleetError):
    """The queue takes no more jobs at the moment."""

    code = "OVERLOADED"
    http_status = 503


class EngineFailed(FleetError):
    """The runtime refused or failed for a reason that is none of the others."""

    code = "ENGINE_FAILED"


class ModelCodeFailed(FleetError):
    """The Python code beside the model raised something other than ValueError."""

    code = "MODEL_CODE_FAILED"


class ArrayMissing(FleetError):
    """A large array that the job or its reply refers to is not there any more."""

    code = "ARRAY_MISSING"
    http_status = 503


class BadMessage(FleetError):
    """The message cannot be read: its format, version or content type is not one we know."""

    code = "BAD_MESSAGE"


class ConfigError(FleetError):
    """A file or a setting is wrong; the message says which and what to write instead."""

    code = "BAD_CONFIG"

    def __init__(self, problem: str, do: str = "") -> None:
        super().__init__(f"{problem} {do}".rstrip())
        self.problem, self.do = problem, do
