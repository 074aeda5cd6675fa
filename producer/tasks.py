"""``infer``: the task an app calls. It is sent from here and run by fleet workers only."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, cast

from celery import Celery, Task
from celery._state import get_current_worker_task
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu import Queue
from kombu.exceptions import EncodeError

from producer.contract import wire
from producer.contract.app import FleetApp, make_app
from producer.contract.call import Call, parse_call
from producer.contract.errors import BadRequest, ConfigError, FleetError, UnknownModel
from producer.contract.names import (
    INFER_TASK,
    PRIORITIES,
    Priority,
    is_model_name,
    is_stream_queue,
    queue_of,
    shadow_of,
)
from producer.contract.results import JobResult
from producer.contract.settings import Settings
from producer.contract.watching import is_watched
from producer.entries import check_size
from producer.envelope import Submission, argsrepr_of, fleet_headers, publish_commands
from producer.host_app import BackendOf, admit, refuse_what_waits_for_ever
from producer.publisher import Publisher
from producer.stand_in import stand_in

#: The options a job may have on the short way to the broker. Whatever else Celery's
#: ``apply_async`` knows goes through Celery and kombu.
_SHORT_OPTIONS: Final = frozenset(
    {"queue", "serializer", "priority", "expires", "headers", "ignore_result"}
)

#: The number Celery's tools show for a named priority.
_NUMBERS: Final = {Priority.HIGH: 0, Priority.NORMAL: 0, Priority.LOW: 9}

_NOT_ONE_BY_ONE: Final = (
    "map, starmap and chunks run a task in your own workers, where infer does not run. Use "
    "group(infer.s(model, inputs) for inputs in many), or Client().submit_many."
)

_OLD_PROTOCOL: Final = (
    "task_protocol is 1: such messages have no headers, and a plain infer.delay(...) alone needs "
    "none. Set task_protocol = 2, Celery's default."
)

_NOT_HERE: Final = (
    "infer runs in fleet workers, not in the process that calls it. Use infer.delay(...) with a "
    "worker running; task_always_eager must be off. In tests, producer.testing answers."
)


class Infer(Task):
    """Sends inference jobs: ``infer.delay("digits", {"image": array}).get(timeout=10)``."""

    abstract = True
    typing = False
    serializer = wire.SERIALIZER
    ignore_result = False
    track_started = False

    #: The fleet's own app: whose broker the jobs go to. None: the app the task is registered on.
    fleet_app: ClassVar[FleetApp | None] = None
    #: One per process and task, made when first used.
    _publisher: Publisher | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if (here := stand_in()) is not None:
            return here.answer(args, kwargs)
        raise ConfigError(_NOT_HERE)

    @property
    def fleet(self) -> FleetApp:
        return self.fleet_app or cast(FleetApp, self._get_app())

    @property
    def publisher(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher(self.fleet.settings)
        return self._publisher

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Send a job.

        ``priority`` is ``"high"``, ``"normal"`` or ``"low"``, or Celery's number. Raises
        BadRequest, UnknownModel, Overloaded, or kombu's OperationalError when the broker
        cannot be reached: within 5 s. The job may have been accepted then; sent again with the same
        ``task_id`` it runs once.
        """
        if stand_in() is not None:
            return self.apply(args, kwargs, **options)
        if self._get_app().conf.task_always_eager:
            raise ConfigError(_NOT_HERE)
        job = self._job(args, kwargs, options, shadow=shadow)
        if self.fleet_app is not None:
            refuse_what_waits_for_ever(self._get_app(), self.fleet_app, options)
        self.publisher.admit()
        short = self._is_short(job.call, options)
        return self._send(job) if short else self.hand_on(job, options)

    def _job(
        self,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: dict[str, Any],
        *,
        shadow: str | None = None,
    ) -> Submission:
        """Return the job that is asked for; of ``options`` it takes id and priority out."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        call = self.check(parse_call(args, kwargs))
        priority, number = priority_and_number(options.pop("priority", None))
        return Submission(
            id=options.pop("task_id", None) or str(uuid.uuid4()),
            args=args,
            kwargs=kwargs,
            call=call,
            priority=priority,
            priority_number=number,
            expires_s=options.get("expires"),
            ignore_result=bool(options.get("ignore_result", self.ignore_result)),
            shadow=shadow or shadow_of(str(call.model)),
            headers=options.get("headers") or {},
        )

    def _send(self, job: Submission) -> JobResult:
        """Send ``job`` the short way."""
        self.publisher.send(*self.commands(job))
        return self._result(job)

    def _result(self, job: Submission) -> JobResult:
        result = self.AsyncResult(job.id)
        result.ignored = job.ignore_result
        return result

    def hand_on(self, job: Submission, options: dict[str, Any]) -> AsyncResult:
        """Send ``job`` through Celery and kombu, which know every option."""
        if self._get_app().conf.task_protocol != 2:
            raise ConfigError(_OLD_PROTOCOL)
        options.update(_way_of(job.call, options.get("queue")))
        options["headers"] = fleet_headers(job.call, job.priority, job.headers)
        options.update(priority=job.priority_number, argsrepr=argsrepr_of(job.call))
        options.update(task_id=job.id, shadow=job.shadow, kwargsrepr="{}")
        try:
            # A group hands over its app's producer, and that app's broker may know no streams.
            given = options.pop("producer", None)
            own = given if self.fleet_app is None else None
            with self.fleet.producer_or_acquire(own) as producer:
                return super().apply_async(job.args, job.kwargs, producer=producer, **options)
        except EncodeError as error:
            # kombu wraps what our own serializer raised.
            if isinstance(error.__context__, FleetError):
                raise error.__context__ from None
            raise

    def AsyncResult(self, task_id: str, **kwargs: Any) -> JobResult:
        """Return the result of the job with this id."""
        return JobResult(task_id, backend=self.backend, app=self._get_app(), **kwargs)

    def commands(self, job: Submission) -> list[Sequence[Any]]:
        """Return the Redis commands that send ``job``; that the last one was taken means it was."""
        blobs = self.publisher.blobs
        return publish_commands(
            self._get_app(),
            job,
            # Whoever stands in for Redis keeps the arrays as well.
            blobs=blobs if stand_in() is None else dataclasses.replace(blobs, url=""),
            max_body_bytes=self.fleet.settings.max_body_bytes,
        )

    def apply(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> JobResult:
        """Have a job answered here, where somebody stands in for the workers."""
        here = stand_in()
        if here is None:
            raise ConfigError(_NOT_HERE)
        job = self._job(args, kwargs, options)
        check_size(len(wire.dumps((job.args, job.kwargs))), self.fleet.settings.max_body_bytes)
        here.apply(self._get_app(), job, super().apply, options)
        return self._result(job)

    def signature(self, args: Any = None, *starargs: Any, **starkwargs: Any) -> Signature:
        """Return a signature that names its queue, for whoever sends it in a chain."""
        made = super().signature(args, *starargs, **starkwargs)
        model = made.kwargs.get("model") or next(iter(made.args), None)
        if is_model_name(model):
            made.options.setdefault("queue", queue_of(str(model)))
            made.options.setdefault("serializer", wire.SERIALIZER)
        return made

    subtask = signature

    def chunks(self, *_: Any) -> NoReturn:
        """Refuse: Celery would call the task in the app's own workers."""
        raise ConfigError(_NOT_ONE_BY_ONE)

    map = starmap = chunks

    def for_model(self, model: str) -> ForModel:
        """Return ``infer`` with the model already given; in a chain the inputs come first."""
        if not is_model_name(model):
            raise BadRequest(_bad_name(model))
        return ForModel(task=self, model=model)

    def check(self, call: Call) -> Call:
        """Return ``call`` when it names a model that can be asked."""
        model = call.model
        if not is_model_name(model):
            raise BadRequest(_bad_name(model))
        known = self.publisher.known_models(str(model))
        if known and model not in known:
            raise UnknownModel(
                f"No worker has served {model!r} within a day, but: {', '.join(sorted(known))}."
            )
        return call

    def _is_short(self, call: Call, options: Mapping[str, Any]) -> bool:
        """Return whether a job with these options needs nothing of Celery's sending."""
        app = self._get_app()
        expires = options.get("expires")
        return (
            options.keys() <= _SHORT_OPTIONS
            and (expires is None or (type(expires) in (int, float) and expires > 0))
            and options.get("queue") in (None, queue_of(str(call.model)))
            and options.get("serializer") in (None, wire.SERIALIZER)
            and not app.conf.task_send_sent_event
            and not is_watched()
            # A parent and a root, and a trail in the parent's result, are Celery's business.
            and get_current_worker_task() is None
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForModel:
    """``infer`` for one model: ``chain(resize.s(), infer.for_model("digits").s())``."""

    task: Infer
    model: str

    def s(self, *args: Any, **options: Any) -> Signature:
        """Return a signature; ``options`` are those of ``apply_async``."""
        return self.task.signature(args, {"model": self.model}, options)

    def si(self, *args: Any, **options: Any) -> Signature:
        """Return a signature that takes nothing from the task before it."""
        return self.task.signature(args, {"model": self.model}, options, immutable=True)

    def delay(self, inputs: Mapping[str, Any]) -> AsyncResult:
        return self.apply_async((inputs,))

    def apply_async(self, args: Sequence[Any], **options: Any) -> AsyncResult:
        return self.task.apply_async(args, {"model": self.model}, **options)


def register(app: Celery, settings: Settings | None = None) -> Infer:
    """Put ``infer`` on ``app`` and return it.

    Jobs go to the fleet's broker, and their results lie with the fleet's, as ``settings`` or the
    environment say; the app's own broker and backend stay what they are. Where the app's results
    are in Redis (``redis://`` or ``rediss://``), its backend reads the fleet's results from now
    on, beside those in the app's own format: groups and chords may hold jobs, if both are in one
    database. With any other backend the answers of jobs are got one by one.
    """
    own = isinstance(app, FleetApp)
    fleet = app if own else make_app(settings)
    if not own:
        admit(app)
    attributes = {"fleet_app": None if own else fleet, "backend": BackendOf(fleet)}
    return cast(
        Infer,
        app.task(name=INFER_TASK, base=Infer, bind=True, shared=False, **attributes)(_run),
    )


def _way_of(call: Call, queue: object) -> dict[str, Any]:
    """Return the options that take a job to its queue, whatever the app's settings say of tasks.

    Routes, and the queue that a whole group is given, are for tasks that the app's workers run. A
    queue as an object is none that the app has to know, and its own workers do not come to consume
    it.
    """
    name = getattr(queue, "name", queue)
    if not (isinstance(name, str) and is_stream_queue(name)):
        name = queue_of(str(call.model))
    anonymous = {"exchange": "", "exchange_type": "direct", "routing_key": ""}
    # There is nothing to declare: a stream is there from its first entry on.
    return {"queue": Queue(name), "declare": [], **anonymous}


def _run(self: Infer, *args: Any, **kwargs: Any) -> Any:
    return Infer.run(self, *args, **kwargs)


def priority_and_number(given: str | int | None) -> tuple[Priority, int]:
    """Return our priority and Celery's number for what the caller gave."""
    if given is None:
        return Priority.NORMAL, 0
    if isinstance(given, int):
        return (Priority.LOW if given > 0 else Priority.NORMAL), given
    if given not in PRIORITIES:
        raise BadRequest(f"priority is {given!r}. It must be one of {', '.join(PRIORITIES)}.")
    priority = Priority(given)
    return priority, _NUMBERS[priority]


def _bad_name(model: object) -> str:
    return (
        f"{model!r} is not a model's name. A name has letters, digits, - and _, at most 64 "
        'of them: infer.delay("digits", {"image": array}).'
    )


#: On an app of its own, for programs that have none; the environment is read when it is used.
infer: Final = register(make_app())
