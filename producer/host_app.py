"""An app that is not the fleet's own, with `infer` on it: what it has to take, and to agree in.

Its broker and its results stay its own. What follows a job is sent by fleet workers, and lies in
the fleet's Redis under the fleet's prefix: where the app's workers look elsewhere, it would wait
there for ever, and so would whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from celery import Celery, Task

from producer.contract import wire
from producer.contract.app import FleetApp
from producer.contract.errors import ConfigError
from producer.contract.names import INFER_TASK
from producer.contract.results import APP_BACKEND, ReadingBackend, alike
from producer.stand_in import stand_in

#: The result backends of an app, by the scheme of their URL, that read the fleet's results.
_READING: Final = {"redis": APP_BACKEND, "rediss": APP_BACKEND}

#: What Celery's own signatures of several tasks hold them in.
_PARTS: Final = {
    "celery.group": ("tasks",),
    "celery.chain": ("tasks",),
    "celery.chord": ("header", "body"),
}

#: The brokers whose keys have the prefix that `global_keyprefix` names.
_REDIS: Final = ("redis", "rediss", "sentinel", "fleet", "fleets")


class BackendOf:
    """The task attribute ``backend``: the fleet's.

    In an app that is not the fleet's own it is the app's, where that reads the fleet's results too:
    a group can be waited for only if its members have the backend of the group.
    """

    def __init__(self, fleet: FleetApp) -> None:
        self._fleet = fleet

    def __get__(self, task: Task | None, owner: type) -> ReadingBackend:
        if (here := stand_in()) is not None:
            return here.backend
        ours = cast(ReadingBackend, self._fleet.backend)
        own = task._get_app().backend if task is not None else None
        if own is ours or (isinstance(own, ReadingBackend) and _place(own) == _place(ours)):
            return own
        return ours


def admit(app: Celery) -> None:
    """Let ``app``'s own tasks take what a job hands on, and its backend read what jobs answer."""
    wire.register()

    def extend(conf: Any) -> None:
        if wire.SERIALIZER not in conf.accept_content:
            conf.accept_content = [*conf.accept_content, wire.SERIALIZER]
        # A copy: the loader's class shares its own. What the app itself overrides stays.
        app.loader.override_backends = {**_READING, **app.loader.override_backends}

    if app.configured:
        extend(app.conf)
        _renew_backend(app)
    else:
        app.on_after_configure.connect(lambda source, **_: extend(source), weak=False)


def refuse_what_waits_for_ever(app: Celery, fleet: FleetApp, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a job of ``app`` with these options whose followers nobody would run,
    because the two have different prefixes.
    """
    theirs = [name for name in _followers(options) if name != INFER_TASK]
    if theirs:
        _refuse_other_prefix(app, fleet.settings.prefix, theirs[0])
    if options.get("chord") and isinstance(app.backend, ReadingBackend):
        app.backend.refuse_other_prefix(cast(ReadingBackend, fleet.backend))


def _refuse_other_prefix(app: Celery, prefix: str, follower: str) -> None:
    given = (app.conf.broker_transport_options or {}).get("global_keyprefix") or ""
    url = app.conf.broker_write_url or app.conf.broker_url or ""
    if given != prefix and str(url).partition("://")[0] in _REDIS:
        raise ConfigError(
            f"{follower} follows a job and would wait for ever: fleet workers send it under "
            f"FLEET_PREFIX, which is {prefix!r}, and your workers look under {given!r}.",
            alike("broker_transport_options", prefix, given),
        )


def _followers(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tasks that a fleet worker sends after a job with these options."""
    for name in ("link", "link_error", "chain", "chord"):
        for signature in _listed(options.get(name)):
            yield from _tasks_of(signature)


def _tasks_of(signature: object) -> Iterator[str]:
    """Yield the names of the tasks that are sent for ``signature``, and of what follows them."""
    if not isinstance(signature, Mapping):
        yield str(signature)
        return
    parts = _PARTS.get(signature["task"])
    if parts is None:
        yield signature["task"]
    for part in parts or ():
        for each in _listed(signature["kwargs"].get(part)):
            yield from _tasks_of(each)
    yield from _followers(signature.get("options") or {})


def _listed(given: Any) -> list[Any] | tuple[Any, ...]:
    """Return ``given`` as a list: of none where there is nothing, of one where it is no list."""
    if isinstance(given, list | tuple):
        return given
    return (given,) if given else ()


def _renew_backend(app: Celery) -> None:
    """Have the backend of every thread made anew, where it is one that now reads more.

    Any other is left: results may be on their way to it.
    """
    named = app.backend_cls or app.conf.result_backend
    scheme = named.partition("://")[0].partition("+")[0] if isinstance(named, str) else None
    if scheme in _READING and not isinstance(app._backend, ReadingBackend):
        # Celery keeps it in one of these two, as the setting `result_backend_thread_safe` says.
        app._backend_cache = None
        app._local = threading.local()


def _place(backend: ReadingBackend) -> list[Any]:
    """Return what makes two backends look at the same key for the same job."""
    parameters = backend.connparams
    host = parameters.get("host")
    here = "127.0.0.1" if host == "localhost" else host
    rest = [parameters.get(name) for name in ("port", "path", "db")]
    return [here, *rest, backend.task_keyprefix]
