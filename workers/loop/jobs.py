"""One job of a batch, from its stream entry to inputs that the model's runner accepts."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Final

from producer.contract.body import JSON, read_body
from producer.contract.call import parse_call, shapes_of
from producer.contract.errors import (
    ArrayMissing,
    BadMessage,
    BadRequest,
    EngineFailed,
    Expired,
    FleetError,
    OutOfMemory,
    UnknownModel,
)
from producer.contract.message import Message, from_fields
from producer.contract.names import model_of, shadow_of
from workers.delivery.ledger import Entry
from workers.prepared import Prepared
from workers.runner import ModelRunner

#: No batch runs longer; a sender's number may be too large for any float.
_LONGEST_S: Final = 1e9

_GONE: Final = (
    "A large array of this job is gone: the job waited for longer than FLEET_BLOB_TTL_S, Redis "
    "evicted it, its sender has another FLEET_BLOB_URL, or its file there cannot be read (then the "
    "worker's log has blob.unreadable). Send the job again under a new id."
)

#: What a message says when it carries work for Celery's own tracer.
CANVAS: Final = ("callbacks", "errbacks", "chain", "chord")


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """A claimed entry, decoded as far as it could be."""

    entry: Entry
    job_id: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    args: Any = ()
    kwargs: Any = dataclasses.field(default_factory=dict)
    #: Callbacks, errbacks, the rest of a chain, the chord it belongs to.
    embed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: What was sent, for a model with hooks.
    inputs: Mapping[str, Any] | None = None
    #: What the engine gets; None when `fault` says why it gets nothing, or before `preprocess`.
    prepared: Prepared | None = None
    fault: FleetError | None = None
    #: Starts before this one.
    starts: int = 0
    #: Whether it came in JSON, as from a stock app: then its reply and its callbacks are JSON too.
    in_json: bool = False

    @property
    def has_canvas(self) -> bool:
        """Whether something must happen in Celery's name when this job ends."""
        return any(self.embed.get(part) for part in CANVAS)

    @property
    def stamps(self) -> tuple[tuple[str, str], ...]:
        """Each header that its sender stamped it with, and the stamp; Celery's way to name many."""
        stamps = self.headers.get("stamps")
        if not isinstance(stamps, Mapping):
            return ()
        pairs = (
            (header, stamp)
            for header, given in stamps.items()
            for stamp in (given if isinstance(given, list | tuple) else [given])
        )
        return tuple((str(header), str(stamp)) for header, stamp in pairs)

    @property
    def time_limit_s(self) -> float | None:
        """How long its batch may run, by its sender's time limits, Celery's; at least 1 s."""
        limits = self.headers.get("timelimit")
        if not isinstance(limits, list | tuple):
            return None
        given = [each for each in limits if isinstance(each, int | float) and each > 0]
        return max(1.0, float(min(*given, _LONGEST_S))) if given else None

    @property
    def reply_to(self) -> str | None:
        """The client that wants to be told, if one does."""
        client = self.headers.get("fleet_reply_to")
        return client if isinstance(client, str) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A claimed entry that nobody can run: a dead letter at once."""

    entry: Entry
    job_id: str | None
    reply_to: str | None
    error: FleetError


def read_entry(
    entry: Entry, *, queue: str, runner: ModelRunner, blobs: Mapping[str, bytes | None]
) -> Job | Unreadable:
    """Decode one entry and let the model's runner check its inputs; never raises for the job's
    fault.

    ``blobs`` are its large arrays, by id; None for one that is gone.
    """
    message: Message | None = None
    its_blobs = {blob_id: blobs.get(blob_id) for blob_id in entry.named.ids}
    try:
        message = from_fields(entry.fields)
        job = _decode(entry, message, queue=queue, blobs=its_blobs)
    except BadMessage as error:
        client = message.headers.get("fleet_reply_to") if message else None
        return Unreadable(
            entry=entry,
            job_id=entry.job_id,
            reply_to=client if isinstance(client, str) else None,
            error=error,
        )
    try:
        if None in its_blobs.values():
            raise ArrayMissing(_GONE)
        inputs = _inputs(job, queue=queue)
        if runner.hooks is not None:
            job.inputs = inputs
        if runner.hooks is None or not runner.hooks.has_preprocess:
            job.prepared = runner.prepare(inputs)
    except FleetError as error:
        job.fault = error
    except MemoryError:
        job.fault = OutOfMemory("The inputs did not fit in memory while they were read.")
    except Exception as error:  # noqa: BLE001 - it ends this job alone
        job.fault = EngineFailed(f"The inputs could not be read: {type(error).__name__}.")
    return job


def unread(entry: Entry, error: FleetError) -> Unreadable:
    """Return an entry that is not to be opened any more, for the reason that ``error`` says.

    Whoever waits for its reply finds it by the id.
    """
    return Unreadable(entry=entry, job_id=entry.job_id, reply_to=None, error=error)


def expired(job: Job, *, now_unix_s: float) -> Expired | None:
    """Return the error of a job whose sender wanted it started before now."""
    expires = job.headers.get("expires")
    if not expires:
        return None
    try:
        moment = datetime.datetime.fromisoformat(expires)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    if moment.timestamp() > now_unix_s:
        return None
    return Expired(f"The job expired at {moment.isoformat()}, before it was started.")


def _decode(
    entry: Entry, message: Message, *, queue: str, blobs: Mapping[str, bytes | None]
) -> Job:
    job_id, model = entry.job_id, model_of(queue)
    if job_id is None:
        raise BadMessage("The entry has no job id.")
    args, kwargs, embed = read_body(message, blobs)
    if wrong := _wrong_canvas(embed):
        raise BadMessage(f"The message's {wrong} cannot be read.")
    return Job(
        entry=entry,
        job_id=job_id,
        headers={**message.headers, "shadow": message.headers.get("shadow") or shadow_of(model)},
        properties=message.properties,
        args=args,
        kwargs=kwargs,
        embed=embed or {},
        in_json=message.content_type == JSON,
    )


def _wrong_canvas(embed: object) -> str | None:
    """Return which part of a message's canvas Celery's tracer could not follow, if any."""
    if embed is None:
        return None
    if not isinstance(embed, dict):
        return "embed"
    for part in ("callbacks", "errbacks", "chain"):
        signatures = embed.get(part)
        if signatures is not None and not (
            isinstance(signatures, list | tuple)
            and all(isinstance(each, dict) and "task" in each for each in signatures)
        ):
            return part
    chord = embed.get("chord")
    return None if chord is None or (isinstance(chord, dict) and "task" in chord) else "chord"


def shapes_shown(job: Job) -> str:
    """Return a job's arguments for events and logs: the model, names and shapes, never a value.

    Made here and not taken from the message: what a stranger's app put there may show values.
    """
    try:
        call = parse_call(job.args, job.kwargs)
        return f"({call.model!r}, {shapes_of(call.inputs)})"
    except FleetError:
        return ""


def _inputs(job: Job, *, queue: str) -> Mapping[str, Any]:
    call = parse_call(job.args, job.kwargs)
    served = model_of(queue)
    if call.model not in (None, served):
        raise UnknownModel(
            f"Queue {queue} answers for {served!r}, not for {str(call.model)[:80]!r}."
        )
    if not isinstance(call.inputs, Mapping):
        raise BadRequest('Inputs must be a mapping of input name to value, as in {"image": array}.')
    return call.inputs
