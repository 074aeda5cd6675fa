"""What instances of one kind know of a model's ceilings together, in Redis: read when a model is
loaded, read and written when an instance has learned something, never for a batch.

One hash for each model and kind of instance: a field for each precision and shape. It is knowledge,
not a promise: where Redis takes or gives nothing, an instance learns by itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

import redis

from producer.contract.names import Keys
from workers.batching.ceiling import Ceiling
from workers.batching.shapes import TensorKey
from workers.memory.ceilings import MOST_SHAPES, Ceilings, Place
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

#: How long ceilings outlive the last instance that read or wrote them.
_LIFE_S: Final = 7 * 86_400

#: Fields of one hash; instances may know different shapes of a model.
_MOST_FIELDS: Final = 4 * MOST_SHAPES


class SharedCeilings:
    """The ceilings of a fleet; used by the thread that claims."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys

    def exchange(self, model: str, kind: str, ceilings: Ceilings) -> None:
        """Tell ``ceilings`` what others know, and others what is news to them."""
        key = self._keys.ceilings(model, kind)
        theirs: dict[Place, Ceiling] = {}
        try:
            found: Any = self._client.hgetall(key)
            theirs = _read(found)
        except redis.RedisError as error:
            logger.warning("ceilings.unread", extra={"model": model, "error": said(error)})
        ceilings.learn(theirs)
        news = {p: c for p, c in ceilings.everything().items() if theirs.get(p) != c}
        try:
            self._write(key, news, theirs)
        except redis.RedisError as error:
            # A full server takes none; the next change brings this one along.
            logger.warning("ceilings.unshared", extra={"model": model, "error": said(error)})

    def _write(
        self, key: str, news: Mapping[Place, Ceiling], theirs: Mapping[Place, Ceiling]
    ) -> None:
        pipe = self._client.pipeline(transaction=False)
        surplus = len({**theirs, **news}) - _MOST_FIELDS
        if surplus > 0:
            oldest = sorted(theirs.keys() - news.keys(), key=lambda p: theirs[p].since_unix_s)
            pipe.hdel(key, *(_field(place) for place in oldest[:surplus]))
        if news:
            pipe.hset(key, mapping={_field(p): _value(c) for p, c in news.items()})
        if news or theirs:
            pipe.expire(key, _LIFE_S)
            pipe.execute()


def _field(place: Place) -> str:
    sizes, precision = place
    return json.dumps([precision, [[t.name, t.dtype, t.shape] for t in sizes]])


def _value(ceiling: Ceiling) -> str:
    return json.dumps(dataclasses.asdict(ceiling))


def _read(found: Mapping[bytes, bytes]) -> dict[Place, Ceiling]:
    """Return what a hash holds; what another version wrote in another way is left out."""
    theirs: dict[Place, Ceiling] = {}
    for field, value in found.items():
        try:
            precision, tensors = json.loads(field)
            sizes = tuple(
                TensorKey(str(name), str(dtype), tuple(map(int, shape)), b"")
                for name, dtype, shape in tensors
            )
            ceiling = Ceiling(**json.loads(value))
            counts = (ceiling.rows, ceiling.raised, ceiling.failed)
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("counts are whole numbers")
            if ceiling.since_unix_s >= 0:
                theirs[sizes, str(precision)] = ceiling
        except (ValueError, TypeError):
            logger.warning("ceilings.strange_field")
    return theirs
