"""Celery's Redis result backend, as the fleet needs it and as an app beside it needs it.

Same keys, same format. ``FleetBackend`` differs in that nothing subscribes when a job is sent, and
in how results are waited for (`producer.contract.waiter`). ``AppBackend`` is Celery's own, and
reads the fleet's results too; jobs are waited for there in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from celery import Celery, states
from celery.backends import redis as celery_redis
from celery.canvas import Signature, maybe_signature
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kombu.serialization import dumps, loads
from kombu.utils.encoding import bytes_to_str

from producer.contract import errors, wire
from producer.contract.blobs import Blobs, Named, Spilled, named_in
from producer.contract.names import INFER_TASK, Keys
from producer.contract.patience import Patience
from producer.contract.settings import (
    ANY_NUMBER,
    CONNECT_TIMEOUT_S,
    HEALTH_CHECK_INTERVAL_S,
    SOCKET_TIMEOUT_S,
    Server,
    Settings,
)
from producer.contract.standing import standing
from producer.contract.waiter import Waiter, leaves_of

#: What `result_backend` names in front of the URL.
BACKEND: Final = "producer.contract.results:FleetBackend"

#: What an app with `infer` on it has in place of Celery's own Redis backend.
APP_BACKEND: Final = "producer.contract.results:AppBackend"

#: What our results begin with. No serializer of Celery's writes a result that does.
_VERSION: Final = bytes([wire.VERSION])
_VERSION_BYTES: Final = frozenset(bytes([version]) for version in wire.READABLE_VERSIONS)

#: What those begin with whose large arrays are elsewhere.
_WITH_REFERENCES: Final = bytes([wire.VERSION_WITH_REFERENCES])

#: What Celery's names of results begin with, behind a prefix.
_TASK_NAMES: Final = "celery-task-meta-"

#: kombu's names of the transport that jobs are sent with.
_OUR_TRANSPORTS: Final = ("fleet", "fleets")


def _settings_of(app: Any) -> Settings:
    """Return the settings of the fleet whose jobs ``app`` sends."""
    fleet = getattr(app.tasks.get(INFER_TASK), "fleet", app)
    return getattr(fleet, "settings", None) or Settings.from_env()


def _without_its_arrays(data: Any) -> Any:
    """Return the result of a job whose answer came too late for its large arrays."""
    gone = (
        "The large arrays of this reply are gone: it was read before, they outlived result_ttl_s, "
        "Redis evicted them, workers have another FLEET_BLOB_URL, or a file there cannot be read "
        "(then the log has blob.unreadable). Send the job again under a new id."
    )
    told = {
        "exc_type": errors.ArrayMissing.__name__,
        "exc_message": [gone],
        "exc_module": errors.__name__,
    }
    return {**data, "status": states.FAILURE, "result": told}


def alike(setting: str, fleets: str, apps: str) -> str:
    """Return what to do where an app has another prefix than the fleet."""
    if not fleets:
        return f"Take global_keyprefix out of your app's {setting}, or set FLEET_PREFIX={apps}"
    other = f", or set FLEET_PREFIX={apps}" if apps else ""
    return f'Set {setting} = {{"global_keyprefix": {fleets!r}}} in your app{other}'


def _is_error(data: Any) -> bool:
    """Return whether ``data`` is a result, or a chord's part of one, that says what went wrong."""
    state = data.get("status") if isinstance(data, dict) else None
    if isinstance(data, list) and len(data) == 4:
        state = data[2]
    return isinstance(state, str) and state in states.EXCEPTION_STATES


class JsonReply(dict[str, Any]):
    """A reply to a job that came in JSON; whatever is packed with it is packed as JSON."""


class JsonValue:
    """The same of a reply that is no map; kombu's JSON asks it for what to write."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __json__(self) -> Any:
        return self._value


def reply_in_json(reply: Any) -> JsonReply | JsonValue:
    """Return ``reply``, with lists of numbers in place of arrays, to be packed as JSON."""
    plain = _without_arrays(reply)
    return JsonReply(plain) if isinstance(plain, dict) else JsonValue(plain)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _without_arrays(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(each) for each in value]
    return value


def _is_json(data: Any) -> bool:
    """Return whether ``data``, a result or a chord's part of one, is for an app that reads JSON."""
    result = data.get("result") if isinstance(data, dict) else None
    if isinstance(data, list) and len(data) == 4:
        result = data[3]
    return isinstance(result, JsonReply | JsonValue)


def _holds_array(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    return isinstance(value, np.ndarray)


class JobResult(AsyncResult):
    """The result of a job, which a backend that has those of other tasks too can tell from them.

    ``get()`` without a timeout ends with Celery's TimeoutError after FLEET_REPLY_TIMEOUT_S;
    ``get(timeout=math.inf)`` waits for ever.
    """

    def _set_cache(self, d: dict[str, Any]) -> dict[str, Any]:
        if isinstance(d.get("result"), TaskRevokedError):
            d["result"] = revoked_elsewhere(d["result"])
        cached: dict[str, Any] = super()._set_cache(d)
        return cached


def revoked_elsewhere(error: object) -> errors.FleetError:
    """Return our error for what a stock worker stored for a job: of every task that is revoked it
    does so itself, known to it or not.
    """
    # Celery's own revoke and expiry know these two words alone.
    if "expired" in str(error):
        return errors.Expired("The job expired before it was started.")
    return errors.Cancelled("The job was revoked before it was started.")


class ReadingBackend(celery_redis.RedisBackend):
    """Celery's Redis backend; reads the fleet's results beside those of its own serializer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        wire.register()
        super().__init__(*args, **kwargs)

    @functools.cached_property
    def waiter(self) -> Waiter:
        """Waits for results of jobs, in place of Celery's consumer of results."""
        return Waiter(self, functools.partial(standing, _settings_of(self.app)))

    def is_ours(self, result: AsyncResult) -> bool:
        """Return whether our waiter waits for ``result``."""
        return isinstance(result, JobResult)

    def add_pending_result(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember who waits, as Celery does; for a job there is nothing to remember."""
        if self.is_ours(result):
            return result
        return super().add_pending_result(result, *args, **kwargs)

    def remove_pending_result(self, result: Any) -> Any:
        """Forget who waited, as Celery does; for a job there is nothing to forget."""
        return result if self.is_ours(result) else super().remove_pending_result(result)

    def _wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[None]:
        options: dict[str, Any] = {"on_interval": on_interval, "on_message": on_message}
        if ours := [leaf for leaf in leaves_of(result) if self.is_ours(leaf)]:
            for leaf in ours:
                self.refuse_other_prefix(leaf.backend)
            patience = Patience(timeout, _settings_of(self.app).reply_timeout_s)
            return self.waiter.wait(result, patience, **options)
        waited: Iterator[None] = super()._wait_for_pending(result, timeout, **options, **kwargs)
        return waited

    def refuse_other_prefix(self, other: ReadingBackend) -> None:
        """Raise ConfigError where jobs are stored under another prefix than this app's results:
        whoever waits here for a group or a chord of them would wait in vain.
        """
        here, there = self._before_names, other._before_names
        if here != there:
            raise errors.ConfigError(
                f"Groups and chords of jobs are looked for under your results' prefix, {here!r}, "
                f"and the results of jobs lie under FLEET_PREFIX, {there!r}.",
                alike("result_backend_transport_options", there, here),
            )

    @property
    def _before_names(self) -> str:
        prefix: str = bytes_to_str(self.task_keyprefix)
        return prefix.removesuffix(_TASK_NAMES)

    @functools.cached_property
    def blobs(self) -> Blobs:
        """Where the large arrays of results lie."""
        return Blobs.of(_settings_of(self.app))

    def read_blobs(self, named: Sequence[Named]) -> Mapping[str, bytes | None]:
        """Return the large arrays of a result."""
        return self.blobs.read(self.client, named)

    def decode(self, payload: Any) -> Any:
        """Unpack a result: of ours, in the JSON that errors have, or in the app's own format.

        One whose large arrays are gone is a failure that says so.
        """
        first = payload[:1] if payload else b""
        if named := named_in(payload) if first == _WITH_REFERENCES else ():
            blobs = self.read_blobs(named)
            data = wire.loads(payload, blobs)
            return _without_its_arrays(data) if None in blobs.values() else data
        if first in _VERSION_BYTES:
            return wire.loads(payload)
        if self.content_encoding == "binary" and first in (b"{", b"[", "{", "["):
            return loads(payload, content_type="application/json", content_encoding="utf-8")
        return super().decode(payload)

    def _forget(self, task_id: str) -> None:
        """Delete a result, and its large arrays after it."""
        payload = self.get(self.get_key_for_task(task_id))
        super()._forget(task_id)
        if named := named_in(payload) if payload else ():
            self.blobs.remove(self.client, named)

    def exception_to_python(self, exc: Any) -> Any:
        """Rebuild an error; one of ours that this version does not know is a FleetError."""
        if isinstance(exc, dict) and exc.get("exc_module") == errors.__name__:
            cls = getattr(errors, str(exc.get("exc_type")), errors.FleetError)
            if isinstance(cls, type) and issubclass(cls, errors.FleetError):
                message = exc.get("exc_message") or ()
                told = message if isinstance(message, list | tuple) else [message]
                return cls(*(str(text).removeprefix(f"{cls.code}: ") for text in told))
        return super().exception_to_python(exc)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **options: Any) -> None:
        """Count a member of a chord; the last one sends the body."""
        body = maybe_signature(request.chord, app=self.app)
        if body is not None:
            # Celery takes a signature as it is and calls this with what the members answered.
            body.delay = functools.partial(self._send_body, body)
            request.chord = body
        super().on_chord_part_return(request, state, result, **options)

    def _send_body(self, body: Signature, answers: Any) -> Any:
        options = {}
        # The app's JSON cannot carry arrays. Whoever takes a body after jobs reads our format:
        # it comes in it when a fleet worker ends the chord.
        chosen = body.options.get("serializer") or self.app.conf.task_serializer == "pickle"
        if not chosen and _holds_array(answers):
            options["serializer"] = wire.SERIALIZER
        return body.apply_async((answers,), **options)


class AppBackend(ReadingBackend):
    """The result backend of an app that has `infer` on it: all else is as Celery has it."""

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Subscribe to a task that is sent, as Celery does; not to a job."""
        if producer.connection.transport_cls not in _OUR_TRANSPORTS:
            super().on_task_call(producer, task_id)


class FleetBackend(ReadingBackend):
    """Results in Redis, in Celery's own format, packed by the fleet's serializer."""

    def __init__(self, *args: Any, app: Celery, **kwargs: Any) -> None:
        kwargs.setdefault("serializer", wire.SERIALIZER)
        kwargs.setdefault("accept", [wire.SERIALIZER, "json"])
        #: Set by `producer.contract.app`; an app of somebody's own has none of it.
        self._options = app.conf.result_backend_transport_options
        before = Keys(prefix=self._options.get("fleet_keyprefix", "")).result_prefix
        # Not by Celery's own option: 5.4 spells the names otherwise than 5.7, and both must meet.
        for name in ("task_keyprefix", "group_keyprefix", "chord_keyprefix"):
            setattr(self, name, f"{before}{getattr(self, name)}")
        super().__init__(*args, app=app, **kwargs)

    def is_ours(self, result: AsyncResult) -> bool:
        """Return True: our waiter waits for all results."""
        return True

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: Celery's own would subscribe to every job that is sent."""

    def pack(self, data: Any) -> Spilled:
        """Return a result as it is stored, its large arrays beside it."""
        if _is_error(data) or _is_json(data):
            payload = self.encode(data)
            return Spilled(body=payload if isinstance(payload, bytes) else payload.encode())
        return self.blobs.pack(data)

    def _encode(self, data: Any) -> Any:
        # What an error ends is often another app's: the next step of its chain, the body of its
        # chord. JSON is what that app's own backend reads.
        as_json = _is_error(data) or _is_json(data)
        return dumps(data, serializer="json" if as_json else self.serializer)

    def prepare_exception(self, exc: Any, serializer: str | None = None) -> Any:
        """Put the code before an error's text: a stock app knows nothing of our classes."""
        told = super().prepare_exception(exc, serializer)
        # For a pickle, which Celery asks for when its own machinery fails, it stays an exception.
        if isinstance(exc, errors.FleetError) and isinstance(told, dict):
            told["exc_message"] = [f"{exc.code}: {exc}"]
        return told

    def _set(self, key: Any, value: Any, expires: int | None = None) -> None:
        spilled = self.blobs.spill(value) if value[:1] == _VERSION else Spilled(body=value)
        ttl_s = self.blobs.output_ttl_s(self.expires if expires is None else expires)
        self.blobs.keep(self.client, spilled, ttl_s=ttl_s)
        value = spilled.body
        # A plain pipeline, where Celery's own has MULTI: a full Redis may refuse that.
        with self.client.pipeline(transaction=False) as pipe:
            pipe.set(key, value, ex=(self.expires if expires is None else expires) or None)
            pipe.publish(key, value)
            # redis-py puts a part of what was sent, values among it, into an error that it raises.
            for answer in pipe.execute(raise_on_error=False):
                if isinstance(answer, Exception):
                    raise answer

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        server = Server.from_url(url)
        scheme = "rediss" if server.tls else "redis"
        _, _, rest = url.partition("://")
        options = {
            **defaults,
            "max_connections": defaults["max_connections"] or ANY_NUMBER,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": HEALTH_CHECK_INTERVAL_S,
        }
        params: dict[str, Any] = super()._params_from_url(f"{scheme}://{rest}", options)
        sentinels = server.sentinels or self._options.get("fleet_sentinels")
        server = dataclasses.replace(server, sentinels=sentinels)
        return {**params, **server.tls_options, **server.connection()}

    def _get_result_meta(
        self, result: Any, state: str, traceback: Any, request: Any, **options: Any
    ) -> dict[str, Any]:
        meta: dict[str, Any] = super()._get_result_meta(
            result, state, traceback, request, **options
        )
        fleet = getattr(request, "fleet", None)
        if fleet is not None:
            meta["fleet"] = fleet
        return meta
