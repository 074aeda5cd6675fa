"""``answering``: an app's own tests run without workers and without Redis.

Jobs are answered where they are sent, by functions that stand for the models. What goes in and out
is packed and unpacked as on its way to a worker and back, so that what cannot be sent fails here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from celery import Celery, states
from celery.app.task import Context
from celery.canvas import maybe_signature
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from producer.contract import wire
from producer.contract.app import FleetApp, make_app
from producer.contract.blobs import Named, unguarded
from producer.contract.call import Call, parse_call, rows_of
from producer.contract.errors import (
    BadMessage,
    BadRequest,
    Cancelled,
    ConfigError,
    Expired,
    FleetError,
    ModelCodeFailed,
    UnknownModel,
)
from producer.contract.message import from_fields
from producer.contract.names import Field
from producer.contract.results import FleetBackend
from producer.contract.settings import DEFAULT_BROKER_URL, Settings
from producer.contract.waiter import leaves_of
from producer.envelope import Submission
from producer.inbox import Awaited
from producer.results import Found, Results
from producer.stand_in import standing_in
from producer.tasks import infer

__all__ = ["answering", "fixture"]

#: Takes a job's inputs as a worker sees them; returns the outputs, or raises.
Model = Callable[[dict[str, Any]], Any]

#: By job id: the stored result; None once it was read and deleted, which is what a fence says.
_Stored = dict[str, bytes | None]

#: By id: the large arrays of jobs and results.
_Large = dict[str, bytes]

_NOT_EAGER: Final = (
    "infer is a member of a chord whose app is not eager, and there is no Redis to count them in. "
    "Set task_always_eager in your tests."
)


@contextlib.contextmanager
def answering(models: Mapping[str, Model]) -> Iterator[None]:
    """Answer jobs with ``models`` for the length of the block, in all threads of this process.

    ``with answering({"digits": lambda inputs: {"scores": inputs["image"].sum(axis=(1, 2, 3))}}):``
    A job is answered before ``delay`` or ``submit`` returns. Any other model is unknown. Blocks may
    be nested: the inner one answers.
    """
    if not models:
        raise ValueError('answering() needs a model at least: answering({"digits": function}).')
    with standing_in(_Answers(models)), _eager(infer.app):
        yield


def fixture(models: Mapping[str, Model], **options: Any) -> Any:
    """Return `answering` as a pytest fixture: ``fleet = fixture({"digits": f}, autouse=True)``."""
    import pytest

    @pytest.fixture(**options)
    def fleet() -> Iterator[None]:
        with answering(models):
            yield

    return fleet


@contextlib.contextmanager
def _eager(app: Celery) -> Iterator[None]:
    """Have Celery run chains and groups of ``app`` in place, whoever's the other tasks are."""
    before = app.conf.task_always_eager
    app.conf.task_always_eager = True
    try:
        yield
    finally:
        app.conf.task_always_eager = before


class _Backend(FleetBackend):
    """The fleet's result backend, with a dict in place of Redis."""

    #: Celery's native one waits on Redis.
    supports_native_join = False

    def __init__(self, app: FleetApp, stored: _Stored, large: _Large) -> None:
        super().__init__(app=app, url=app.conf.result_backend.partition("+")[2])
        self.stored, self.large = stored, large

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        payload = self.stored.get(task_id)
        if payload is None:
            return {"status": states.PENDING, "result": None}
        meta: dict[str, Any] = self.decode_result(payload)
        return meta

    def read_blobs(self, named: Sequence[Named]) -> Mapping[str, bytes | None]:
        """Return the large arrays of a result."""
        return {blob_id: self.large.get(blob_id) for each in named for blob_id in each.ids}

    def _store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **_: Any,
    ) -> Any:
        meta = self._get_result_meta(result, state, traceback, request)
        spilled = self.pack({**meta, "task_id": task_id})
        self.large |= {blob_id: bytes(data) for blob_id, data in spilled.blobs.items()}
        self.stored[task_id] = spilled.body
        return result

    def _forget(self, task_id: str) -> None:
        self.stored.pop(task_id, None)

    def _wait_for_pending(self, result: Any, *_: Any, **__: Any) -> Iterator[None]:
        for leaf in leaves_of(result):
            if not leaf.ready():
                raise CeleryTimeoutError(
                    f"No job {leaf.id} was sent while answering() holds: nothing is to come."
                )
        return iter(())


class _Results(Results):
    """Reads and deletes what is in the dict."""

    def __init__(self, app: FleetApp, backend: _Backend) -> None:
        super().__init__(app)
        self._backend = backend
        self._stored, self._large = backend.stored, backend.large

    def _fetch(
        self, job_ids: Sequence[str], late: Sequence[str]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        fences = [job_id in self._stored for job_id in late]
        return [self._stored.get(job_id) for job_id in job_ids], fences

    def forget(self, read: Sequence[Found]) -> None:
        for found in read:
            self._stored[found.job_id] = None
            for blob_id in (each for named in found.named for each in named.ids):
                self._large.pop(blob_id, None)


class _Answers:
    """Stands in for broker, workers and results."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = frozenset(models)
        self._models = dict(models)
        # Of its own: nothing of the environment is read, and nobody's eager setting counts.
        app = make_app(Settings(broker_url=DEFAULT_BROKER_URL))
        self._stored: _Stored = {}
        self._large: _Large = {}
        self.backend = _Backend(app, self._stored, self._large)
        self.results = _Results(app, self.backend)
        self._awaited: weakref.WeakValueDictionary[str, Awaited] = weakref.WeakValueDictionary()

    def expect(self, jobs: Iterable[Awaited]) -> None:
        self._awaited.update({job.id: job for job in jobs})

    def take(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        for command in map(unguarded, commands):
            # Any other cancels a job, which comes too late.
            if command[0] == "XADD":
                self._take(dict(zip(command[3::2], command[4::2], strict=True)))
            elif command[0] == "SET":
                self._large[command[1].rpartition(":")[2]] = bytes(command[2])
        return [b"OK"] * len(commands)

    def _take(self, fields: Mapping[str, Any]) -> None:
        """Answer the job in a stream's entry, once, and tell whoever waits for it."""
        message = from_fields({name.encode(): value for name, value in fields.items()})
        job_id = str(message.headers["id"])
        named = Named.read(fields.get(str(Field.BLOBS), "").encode())
        inputs = {blob_id: self._large.pop(blob_id) for blob_id in named.ids}
        if job_id not in self._stored:
            args, kwargs, _ = wire.loads(message.body, inputs)
            call = parse_call(args, kwargs)
            try:
                self._keep(job_id, call, self._reply(call), states.SUCCESS)
            except FleetError as error:
                self._keep(job_id, call, error, states.FAILURE)
        job = self._awaited.pop(job_id, None)
        if job is not None:
            for found in self.results.read([job_id], overdue=[job_id]):
                self.results.forget([found])
                job.settle(found.meta)

    def apply(
        self, app: Celery, job: Submission, run: Callable[..., AsyncResult], options: dict[str, Any]
    ) -> None:
        if options.get("chord"):
            raise ConfigError(_NOT_EAGER)
        # What comes after in a chain whose app is not eager: a worker would send it.
        chain = options.pop("chain", None)
        options.pop("producer", None)
        if job.id in self._stored:
            return
        done = run(job.args, job.kwargs, task_id=job.id, **options)
        self._keep(job.id, job.call, done.result, done.state)
        if chain and done.successful():
            following = maybe_signature(chain.pop(), app=app)
            following.apply_async((done.result,), chain=chain, parent_id=job.id)

    def answer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._reply(parse_call(*wire.loads(wire.dumps((args, kwargs)))))

    def _reply(self, call: Call) -> Any:
        """Return what the model's function returns, as it comes back from a worker."""
        name = str(call.model)
        if name not in self._models:
            raise UnknownModel(f"answering() has no model {name!r}.")
        try:
            outputs = self._models[name](dict(call.inputs))
        except Exception as error:
            raise self._told(_typed(name, error)) from error
        try:
            return wire.loads(wire.dumps(outputs))
        except (BadRequest, BadMessage) as error:
            raise ModelCodeFailed(
                f"{name} must return arrays or values as JSON has them; "
                f"it returned a {type(outputs).__name__} that is not."
            ) from error

    def _told(self, error: FleetError) -> BaseException:
        """Return ``error`` as it is rebuilt from a stored result."""
        told: BaseException = self.backend.exception_to_python(
            self.backend.prepare_exception(error)
        )
        return told

    def _keep(self, job_id: str, call: Call, result: Any, state: str) -> None:
        about = {
            "model": call.model,
            "runtime": __name__,
            "batch_size": rows_of(call.inputs),
            "attempts": 1,
        }
        if isinstance(result, Expired | Cancelled):
            state = states.REVOKED
        self.backend.store_result(job_id, result, state, request=Context({"fleet": about}))


def _typed(name: str, error: Exception) -> FleetError:
    """Return what a worker makes of an error of the code around a model."""
    if isinstance(error, FleetError):
        return error
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, ValueError):
        return BadRequest(f"{name} refused the job: {told}")
    return ModelCodeFailed(f"{name} raised {told}")
