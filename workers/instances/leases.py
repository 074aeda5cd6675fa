"""The scripts that lease instances to workers, as calls.

A lease is renewed by the parent and by the process that lives on the instance; either is enough, as
with claims. So it cannot run out under a process that lives and reaches Redis, whatever befell its
parent, and when it has run out that process is dead or cut off.

It says which two processes these are: who shares their place need not wait until it runs out.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.names import Keys
from workers.delivery.scripts import Call, read_script
from workers.hello import Lease
from workers.instances import lives
from workers.instances.instance import Instance
from workers.instances.sharing import Sharer

_FOLDER: Final = Path(__file__).parent

_HOLD: Final = read_script(_FOLDER, "hold")
_TAKE: Final = read_script(_FOLDER, "take")
_KEEP: Final = read_script(_FOLDER, "keep")
_GIVE_BACK: Final = read_script(_FOLDER, "give_back")

#: A lease that ran out is remembered for so long, so that nobody takes an instance at first sight
#: whose holder may be about to renew it.
_REMEMBERED_S: Final = 3600


#: In place of a process, where none has lived since the lease was taken; the scripts say the same.
NOBODY: Final = "-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The lease of one instance."""

    #: The token of its holder, empty where there is none.
    holder: str
    #: The life of the process on the instance, `NOBODY` before there was one, empty: not known.
    process: str
    #: How long it lasts, below 0 where it has run out.
    left_s: float

    @property
    def words(self) -> str:
        """Return the two as the lease has them."""
        return f"{self.holder}\t{self.process}"

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that nobody renews it any more, nor lives on the instance.

        A process says that it is there before it loads anything, and ends when it may not say so.
        """
        if not lives.is_over(life_in(self.holder)):
            return False
        return self.process == NOBODY or lives.is_over(self.process)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is to be seen of a host at one moment."""

    #: The server's clock.
    now_unix_s: float
    #: Whether the server did not know that this worker is there.
    unknown: bool
    present: tuple[Sharer, ...]
    leases: Mapping[str, Held]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """Calls in the name of one worker."""

    keys: Keys
    host: str
    token: str
    ttl_s: float

    def to_process(self, instance: Instance, until_s: float) -> Lease:
        """Return what the process of ``instance`` must know to renew the lease itself."""
        return Lease(
            instance=instance.key,
            host=self.host,
            token=self.token,
            ttl_s=self.ttl_s,
            until_s=until_s,
        )

    def hold(
        self, sharer: Sharer | None, instances: Sequence[str], believed: frozenset[str]
    ) -> Call[Sight]:
        """Renew what is held of ``instances`` and look around; ``sharer`` None leaves the host."""

        def read(answer: Any) -> Sight:
            now_ms, unknown, present, leases = answer
            triples = zip(leases[::3], leases[1::3], leases[2::3], strict=True)
            return Sight(
                now_unix_s=now_ms / 1000,
                unknown=unknown == 1,
                present=tuple(filter(None, map(_sharer, present))),
                leases={
                    key: Held(
                        holder=holder.decode(), process=process.decode(), left_s=left_ms / 1000
                    )
                    for key, (holder, process, left_ms) in zip(instances, triples, strict=True)
                },
            )

        return Call(
            script=_HOLD,
            keys=[self.keys.host(self.host), *map(self.keys.lease, instances)],
            args=[
                *(self.token, *self._times_ms, node_of(self.token), _words(sharer)),
                *(int(key in believed) for key in instances),
            ],
            read=read,
        )

    def take(
        self,
        instances: Sequence[str],
        *,
        over: frozenset[str] = frozenset(),
        dead: Mapping[str, Held] | None = None,
        until_unix_s: float,
    ) -> Call[list[str]]:
        """Lease ``instances`` that nobody holds, those of ``over`` whose lease ran out, and those
        that still are as ``dead`` says.
        """
        from_whom = dict.fromkeys(over, "over")
        from_whom |= {key: held.words for key, held in (dead or {}).items()}
        return Call(
            script=_TAKE,
            keys=[self.keys.lease(key) for key in instances],
            args=[
                *(self.token, *self._times_ms, int(until_unix_s * 1000)),
                *(from_whom.get(key, "") for key in instances),
            ],
            read=lambda taken: [
                key for key, ours in zip(instances, taken, strict=True) if ours == 1
            ],
        )

    def keep(self, instance: str, process: str) -> Call[bool]:
        """Renew the lease of one instance for ``process``, the life that is on it; False when
        another worker holds it.
        """
        return Call(
            script=_KEEP,
            keys=[self.keys.lease(instance)],
            args=[self.token, *self._times_ms, process],
            read=bool,
        )

    def give_back(self, instances: Sequence[str]) -> Call[int]:
        """End the leases of ``instances`` as far as they are ours."""
        return Call(
            script=_GIVE_BACK,
            keys=[self.keys.lease(key) for key in instances],
            args=[self.token],
            read=int,
        )

    @property
    def _times_ms(self) -> tuple[int, int]:
        return int(self.ttl_s * 1000), _REMEMBERED_S * 1000


def token_of(node: str, pid: int, life: str) -> str:
    """Return what a worker signs its leases with; no other worker, nor a later one, does."""
    return f"{node}/{pid}.{time.time_ns() // 1_000_000}+{life}"


def node_of(token: str) -> str:
    """Return the name of the worker that signs with ``token``."""
    return token.rpartition("/")[0]


def life_in(token: str) -> str:
    """Return the life of the parent that signs with ``token``."""
    return token.rpartition("/")[2].partition("+")[2]


def _words(sharer: Sharer | None) -> str:
    if sharer is None:
        return ""
    return json.dumps({**dataclasses.asdict(sharer), "may_use": sorted(sharer.may_use)})


def _sharer(words: bytes) -> Sharer | None:
    """Return who said ``words``; None for a worker of another version that says it differently.

    Its leases are respected all the same: they have one form.
    """
    try:
        said = json.loads(words)
        return Sharer(
            since_unix_s=float(said["since_unix_s"]),
            token=str(said["token"]),
            may_use=frozenset(map(str, said["may_use"])),
        )
    except (ValueError, TypeError, KeyError):
        return None


def holders(client: redis.Redis, keys: Keys, instances: Sequence[str]) -> dict[str, str]:
    """Return the token of each worker that holds one of ``instances``, by instance."""
    if not instances:
        return {}
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.mget([keys.lease(key) for key in instances])
    (now_s, _), leases = pipe.execute()
    held = {}
    for key, lease in zip(instances, leases, strict=True):
        until_ms, _, words = (lease or b"0 ").partition(b" ")
        if int(until_ms) >= now_s * 1000:
            held[key] = words.partition(b"\t")[0].decode()
    return held
