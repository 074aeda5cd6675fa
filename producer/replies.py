"""What comes back for a job: a ``Reply``, or the error it ended with, read from Celery's format."""

from __future__ import annotations

import dataclasses
from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError

from producer.contract.errors import BadMessage, BadRequest, FleetError
from producer.contract.results import FleetBackend, revoked_elsewhere


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one job, and how it came about."""

    #: By output name; or what the model's postprocess hook returned.
    outputs: Any
    model: str = ""
    #: What ran the model, with its version: ``onnxruntime 1.32.0``, ``tensorrt 11.4.0`` ...
    runtime: str = ""
    #: Of the engine that answered: ``fp32``, ``fp16``, ``int8`` ...
    precision: str = ""
    #: Rows that ran together, of all jobs in the batch.
    batch_size: int = 0
    attempts: int = 1
    queue_s: float = 0.0
    compute_s: float = 0.0
    worker: str = ""
    #: How often the batch ran out of memory before this answer.
    out_of_memory: int = 0
    #: How often a smaller precision answered with NaN or infinity before this answer.
    non_finite: int = 0

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "outputs"
        )
        return f"Reply({shown})"


_FIELDS = frozenset(field.name for field in dataclasses.fields(Reply)) - {"outputs"}

Outcome = Reply | BaseException


def read_meta(backend: FleetBackend, payload: bytes) -> dict[str, Any] | None:
    """Return the stored result, decoded; None while it is not final."""
    meta: dict[str, Any] = backend.decode_result(payload)
    return meta if meta["status"] in states.READY_STATES else None


def outcome_of(meta: dict[str, Any]) -> Outcome:
    """Return the reply or the error in a decoded result; BadMessage for one without sense."""
    try:
        return _outcome_of(meta)
    except Exception as error:  # noqa: BLE001  whatever was stored there, its job must end
        return BadMessage(f"The result cannot be understood: {type(error).__name__}: {error}")


def answered_before(job_id: str) -> BadRequest:
    """Return the error of a job whose id was used before, and its reply read."""
    return BadRequest(
        f"Job {job_id} was answered before, and its reply was read and deleted. "
        "A job id runs once: send a new job under a new id."
    )


def _outcome_of(meta: dict[str, Any]) -> Outcome:
    result = meta["result"]
    if meta["status"] == states.SUCCESS:
        facts = meta.get("fleet") or {}
        return Reply(outputs=result, **{name: facts[name] for name in _FIELDS & facts.keys()})
    if isinstance(result, FleetError):
        return result
    if isinstance(result, TaskRevokedError) or meta["status"] == states.REVOKED:
        return revoked_elsewhere(result)
    # Not BaseException: a stored SystemExit must not end the program that asks for its reply.
    if isinstance(result, Exception):
        return result
    return BadMessage(f"The result has state {meta['status']} and no error that we can read.")
