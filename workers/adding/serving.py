"""A new model is asked for at once: workers that run on the same folder take it on.

Asked are those of this host that serve all other models of the folder; one that was told what to
serve is left as it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import redis
from kombu.exceptions import OperationalError

from producer.contract import live
from producer.contract.app import make_app
from producer.contract.errors import ConfigError
from producer.contract.live import Words
from producer.contract.memory import is_full
from producer.contract.names import Keys, queue_of
from producer.contract.reach import reach, why_not
from producer.contract.settings import Settings
from workers.models import config_words, model_names

#: How long remote control may take to answer, and an engine to be loaded while somebody looks on.
_ANSWER_WITHIN_S: Final = 5.0
_LOADED_WITHIN_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.1

#: What comes of a server that goes away, or is full, while workers are asked.
_LOST: Final = (ConfigError, redis.RedisError, OperationalError)

_LATE: Final = "it is still being loaded; `fleet models` shows when it is there"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of the model in the workers that run."""

    workers: int = 0
    #: Those that have loaded it.
    instances: int = 0
    #: Why it is not served, or not yet; empty when all is well, and when there is no worker.
    trouble: str = ""
    #: Workers that serve a file of this name as it was before.
    older: tuple[str, ...] = ()


def serve(name: str, config_dir: Path, where: Settings) -> Served:
    """Have the running workers of ``config_dir`` serve ``name``; returns when they do."""
    keys = Keys(prefix=where.prefix)
    try:
        client = reach(where.broker_url)
    except ConfigError:
        # No server is no mistake here: the model is added all the same.
        return Served()
    with client:
        try:
            return _asked(client, keys, where, name, config_dir)
        except _LOST as error:
            return Served(trouble=_why_lost(error, where))


def _asked(client: redis.Redis, keys: Keys, where: Settings, name: str, config_dir: Path) -> Served:
    found = live.workers(client, keys, now_unix_s=time.time())
    ours = [each for each in found if _reads(each, config_dir)]
    older = tuple(each["node"] for each in ours if name in each["models"])
    nodes = [each["node"] for each in ours if _takes_on(each, name, config_dir)]
    served = Served()
    if nodes:
        served = _refusal(where, nodes, name) or _loaded(client, keys, nodes, name)
    return dataclasses.replace(served, older=older)


def _why_lost(error: Exception, where: Settings) -> str:
    """Return what became of the server while workers were asked, and what to do."""
    if isinstance(error, redis.RedisError) and is_full(error):
        return (
            "Redis is full (maxmemory), so that no worker can be asked. `fleet queue` says what "
            "fills it: start more workers, or give it more memory"
        )
    return why_not(error, where.broker_url)


def _reads(worker: Words, config_dir: Path) -> bool:
    return worker.get("config") == config_words(config_dir) and worker["state"] == "running"


def _takes_on(worker: Words, name: str, config_dir: Path) -> bool:
    others = set(model_names(config_dir)) - {name}
    served = set(worker["models"])
    return name not in served and others <= served


def _refusal(where: Settings, nodes: Sequence[str], name: str) -> Served | None:
    """Ask the workers; return what they say where none of them takes the model on."""
    control = make_app(where).control
    answers: Iterable[Words] = control.add_consumer(
        queue_of(name), destination=list(nodes), reply=True, timeout=_ANSWER_WITHIN_S
    )
    said = [words for answer in answers or () for words in answer.values()]
    if any("ok" in words for words in said):
        return None
    why = "; ".join(str(words.get("error")) for words in said) or "it does not answer"
    return Served(workers=len(nodes), trouble=f"a worker that runs was asked to serve it: {why}")


def _loaded(client: redis.Redis, keys: Keys, nodes: Sequence[str], name: str) -> Served:
    """Wait until every instance has loaded the model, or has said why it cannot."""
    deadline_s = time.monotonic() + _LOADED_WITHIN_S
    while True:
        found = live.workers(client, keys, now_unix_s=time.time())
        asked = [each for each in found if each["node"] in nodes]
        instances = [i for each in asked for i in each["instances"]]
        about = [i["models"].get(name, {}) for i in instances if i["pid"]]
        broken = [str(its["text"]) for its in about if its.get("state") == "broken"]
        ready = sum(its.get("state") == "ready" for its in about)
        late = time.monotonic() > deadline_s
        if why := _nobody_loads(asked):
            return Served(workers=len(nodes), trouble=why)
        if late or (about and len(broken) + ready == len(about)):
            trouble = broken[0] if broken else _LATE if late and not ready else ""
            return Served(workers=len(nodes), instances=ready, trouble=trouble)
        time.sleep(_LOOK_EVERY_S)


def _nobody_loads(asked: Sequence[Words]) -> str:
    """Return why none of the workers has an instance that could load a model; empty where one has,
    or will have in a moment.
    """
    if not asked:
        return "the worker that was asked has ended"
    waits = [str(each.get("waiting") or "") for each in asked]
    return waits[0] if all(waits) else ""
