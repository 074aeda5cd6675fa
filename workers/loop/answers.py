"""An outcome in Celery's result format: through the tracer where a job needs Celery's own care,
else directly.

Both ways leave the same fields; `producer.contract.results` adds ours (`fleet`) from the request.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from celery import Celery, signals, states
from celery.app import trace as celery_trace
from celery.app.task import Context, Task

from producer.contract.blobs import Spilled
from producer.contract.call import shapes_of
from producer.contract.errors import Cancelled, Expired, FleetError
from producer.contract.names import INFER_TASK
from producer.contract.results import FleetBackend, reply_in_json
from producer.contract.watching import is_wrapped, trace_headers
from workers.loop.jobs import CANVAS, Job

logger = logging.getLogger(__name__)

#: Where Celery has its tracer.
_TRACE: Final = "celery.app.trace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one job ended, and what its reply says about the run."""

    job: Job
    #: The model's outputs, or what its `postprocess` returned; None when `error` says what went
    #: wrong.
    outputs: Any = None
    error: FleetError | None = None
    #: Model, precision, batch size, attempts, times, worker: becomes ``meta["fleet"]``.
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def state(self) -> str:
        """Celery's state: REVOKED for what was not to run, FAILURE for every other error."""
        if self.error is None:
            return str(states.SUCCESS)
        if isinstance(self.error, Expired | Cancelled):
            return str(states.REVOKED)
        return str(states.FAILURE)

    @property
    def shapes(self) -> str:
        """Names, types and shapes of the outputs, never a value; of a hook's reply its type."""
        outputs = self.outputs
        if isinstance(outputs, Mapping) and all(
            isinstance(array, np.ndarray) for array in outputs.values()
        ):
            return shapes_of(outputs)
        # A name in a reply may be what the model found.
        return type(outputs).__name__

    @property
    def why_retried(self) -> str:
        """Why its batch was run again, smaller or in another precision, in the same start."""
        out_of_memory = self.about.get("out_of_memory", 0)
        whys = [f"OutOfMemory({out_of_memory}x)"] if out_of_memory else []
        if non_finite := self.about.get("non_finite", 0):
            whys.append(f"NonFinite({non_finite}x)")
        if not whys:
            return ""
        end = "answered" if self.error is None else "last tried"
        return f"{' and '.join(whys)}, {end} in {self.about.get('precision')}"


class Answers:
    """Packs answers for one app; knows which of them the tracer must store."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._backend: FleetBackend = app.backend
        self._task: Task = app.tasks[INFER_TASK]
        # The tracer's line on a success shows what the task returned; payloads are never logged.
        logging.getLogger("celery.app.trace").setLevel(logging.WARNING)

    def needs_tracer(self, job: Job) -> bool:
        """Whether callbacks, a chord, a signal's receiver or a watcher of Celery wait for this
        job's end.
        """
        return job.has_canvas or is_wrapped(celery_trace.build_tracer, _TRACE) or _is_heard()

    def pack(self, answer: Answer) -> Spilled:
        """Return what Celery's backend would store under the job's result key, its large arrays
        beside it.
        """
        result: Any = _reply_of(answer)
        if answer.error is not None:
            result = self._backend.prepare_exception(answer.error)
        meta = self._backend._get_result_meta(
            result=result,
            state=answer.state,
            traceback=None,
            # Without them Celery looks for those that are not its own, and nobody reads them here.
            request=self._request(answer, headers={}),
        )
        meta["task_id"] = answer.job.job_id
        return self._backend.pack(meta)

    def pack_failure(self, job_id: str, error: FleetError, about: Mapping[str, Any]) -> Spilled:
        """Like `pack`, for a job of which nothing but its id could be read."""
        meta = self._backend._get_result_meta(
            result=self._backend.prepare_exception(error),
            state=states.FAILURE,
            traceback=None,
            request=Context({"fleet": dict(about)}),
        )
        meta["task_id"] = job_id
        return self._backend.pack(meta)

    def trace(self, answer: Answer) -> bool:
        """Let Celery end the job: store, fire callbacks, count the chord. False on an internal
        error.

        The outcome is known; the task's body only hands it over. Callbacks go out before the
        result is stored, so a process that dies in between sends them again: links fire at least
        once.
        """
        job = answer.job
        request = self._request(answer)
        if isinstance(answer.error, Expired | Cancelled):
            # Celery's `mark_as_revoked`, with our error in place of its own, and its signal.
            signals.task_revoked.send(
                sender=self._task,
                request=request,
                terminated=False,
                signum=None,
                expired=isinstance(answer.error, Expired),
            )
            self._backend.store_result(job.job_id, answer.error, answer.state, request=request)
            if request.chord:
                self._backend.on_chord_part_return(request, answer.state, answer.error)
            return True
        if self._task.__trace__ is None:
            self._task.__trace__ = celery_trace.build_tracer(INFER_TASK, self._task, app=self._app)
        self._task.outcome = answer
        outcome = self._task.__trace__(job.job_id, job.args, job.kwargs, vars(request))
        internal = bool(getattr(outcome.retval, "internal", False))
        if internal:
            logger.error("tracer.failed", extra={"job_id": job.job_id})
        return not internal

    def _request(self, answer: Answer, **more: Any) -> Context:
        job = answer.job
        return Context(
            {
                **{name: value for name, value in job.headers.items() if _is_plain(name)},
                **_canvas_of(job),
                "delivery_info": job.properties.get("delivery_info") or {},
                "correlation_id": job.properties.get("correlation_id"),
                "reply_to": job.properties.get("reply_to"),
                "hostname": answer.about.get("worker"),
                "fleet": dict(answer.about),
                **more,
            }
        )


def _reply_of(answer: Answer) -> Any:
    """Return the outputs in the form in which the job's app can read them."""
    return reply_in_json(answer.outputs) if answer.job.in_json else answer.outputs


def _is_heard() -> bool:
    """Return whether somebody listens to the signals of a task that runs."""
    return any(
        signal.receivers
        for signal in (
            signals.task_prerun,
            signals.task_postrun,
            signals.task_success,
            signals.task_failure,
            signals.task_revoked,
        )
    )


def _canvas_of(job: Job) -> dict[str, Any]:
    """Return what Celery calls when the job ends, told in the form in which the job came, and as
    part of its trace.
    """
    canvas = {part: job.embed.get(part) for part in CANVAS}
    if not any(canvas.values()):
        return canvas
    options: dict[str, Any] = {"serializer": "json"} if job.in_json else {}
    trace = trace_headers(job.headers)
    if not options and not trace:
        return canvas
    for part, called in canvas.items():
        if isinstance(called, list | tuple):
            canvas[part] = [_sent_with(signature, options, trace) for signature in called]
        elif called:
            canvas[part] = _sent_with(called, options, trace)
    return canvas


def _sent_with(
    signature: Mapping[str, Any], options: Mapping[str, Any], headers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``signature`` with what it does not say itself."""
    own = signature.get("options") or {}
    options = {**options, **own}
    if headers:
        options["headers"] = {**headers, **(own.get("headers") or {})}
    return {**signature, "options": options}


@functools.lru_cache(maxsize=1024)
def _is_plain(name: object) -> bool:
    """Return whether a header may become an attribute of Celery's request: a sender chose it."""
    return (
        isinstance(name, str) and name != "children" and not callable(getattr(Context, name, None))
    )


def register_infer(app: Celery) -> None:
    """Put the worker's half of the task on ``app``: its body hands over an outcome already
    known.
    """

    class Infer(Task):
        """Answers through `Answers.trace` only; never runs a model itself."""

        name = INFER_TASK
        typing = False
        throws = (FleetError,)
        outcome: Answer

        def run(self, *args: Any, **kwargs: Any) -> Any:
            if self.outcome.error is not None:
                raise self.outcome.error
            return _reply_of(self.outcome)

    app.register_task(Infer())
