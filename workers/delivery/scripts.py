"""The Lua scripts beside this file: loaded once, called by digest, sent several in one round
trip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import redis

T = TypeVar("T")

_FOLDER: Final = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script: its text and the digest that Redis knows it by."""

    name: str
    text: str
    digest: str


def read_script(folder: pathlib.Path, name: str) -> Script:
    """Return the script ``name`` of ``folder``."""
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    # SHA-1 is the name Redis gives a script, not a safeguard.
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name=name, text=text, digest=digest)


CLAIM: Final = read_script(_FOLDER, "claim")
BEGIN: Final = read_script(_FOLDER, "begin")
COMPLETE: Final = read_script(_FOLDER, "complete")
BURY: Final = read_script(_FOLDER, "bury")
RELEASE: Final = read_script(_FOLDER, "release")
UNFINISHED: Final = read_script(_FOLDER, "unfinished")
RENEW: Final = read_script(_FOLDER, "renew")
TAKE_OVER: Final = read_script(_FOLDER, "take_over")
MOVE_DUE: Final = read_script(_FOLDER, "move_due")
GROUPS: Final = read_script(_FOLDER, "groups")
BRIDGE: Final = read_script(_FOLDER, "bridge")
KEEP: Final = read_script(_FOLDER, "keep")

#: Every script of this folder.
ALL: Final = (
    *(CLAIM, BEGIN, COMPLETE, BURY, RELEASE, UNFINISHED),
    *(RENEW, TAKE_OVER, MOVE_DUE, GROUPS, BRIDGE, KEEP),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """A script with its arguments and the reader of its answer, ready to be sent."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], T]


def send(client: redis.Redis, *calls: Call[Any]) -> list[Any]:
    """Run ``calls`` in order in one round trip and return what each one's reader makes of its
    answer.

    A server that lost its scripts (a restart) gets all of them again, and only the calls it refused
    are repeated: were some of its scripts there, a later call would run before an earlier one. The
    pipeline is a plain one: a full server refuses MULTI.

    Raises what redis-py raises. After a lost connection it is unknown which of the calls ran.
    """
    answers = _round_trip(client, calls)
    refused = [i for i, answer in enumerate(answers) if isinstance(answer, _NO_SCRIPT)]
    if refused:
        for script in {*ALL, *(call.script for call in calls)}:
            client.script_load(script.text)
        for i, answer in zip(
            refused, _round_trip(client, [calls[i] for i in refused]), strict=True
        ):
            answers[i] = answer
    for call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, redis.ResponseError):
            # What a command within a script was refused for does not say which script it was.
            answer.args = (f"{call.script.name}.lua: {answer}",)
        if isinstance(answer, Exception):
            raise answer
    return [call.read(answer) for call, answer in zip(calls, answers, strict=True)]


_NO_SCRIPT: Final = redis.exceptions.NoScriptError


def _round_trip(client: redis.Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    pipe = client.pipeline(transaction=False)
    for call in calls:
        pipe.execute_command("EVALSHA", call.script.digest, len(call.keys), *call.keys, *call.args)
    return list(pipe.execute(raise_on_error=False))
