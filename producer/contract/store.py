"""A folder or bucket for large arrays, through fsspec: one file for each, named by its id.

Nothing there expires by itself. Files go when their job has ended, or their reply was read; what is
left of jobs that died with their sender is for a rule of the bucket, or for `find -mtime`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from kombu.exceptions import OperationalError

from producer.contract.errors import ConfigError

logger = logging.getLogger(__name__)

_NAMES: Final = "FLEET_BLOB_URL"
#: A file is tried so often, where others can be read meanwhile.
_TRIES: Final = 3
#: How long a store may take to answer: an instance whose loop stands still for longer is killed.
#: What is longer on its way than that, since it is large, has one second more for so many bytes.
_ANSWER_S: Final = 10.0
_BYTES_PER_S: Final = 4 * 1024 * 1024
#: The most that is waited for: what a message says of its size may be wrong.
_LONGEST_BYTES: Final = 64 * 1024 * 1024
#: The trial is three steps, and a small file.
_TRIAL_S: Final = 5.0


class Store:
    """The files below one URL."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec.asyn
        except ImportError:
            raise ConfigError(
                f"{_NAMES} is set, and fsspec is not installed.",
                'Install the extra `fsspec`: pip install "fleet-inference[fsspec]".',
            ) from None
        # A listing that somebody else in this process has asked for must not hide newer files.
        self._open = functools.partial(fsspec.core.url_to_fs, url, use_listings_cache=False)
        self._wait: Any = fsspec.asyn.sync
        try:
            files, root = self._open()
        except (ImportError, ValueError) as error:
            # Where a URL holds a password, what is said of the URL may as well.
            said = type(error).__name__ if "@" in url else error
            raise ConfigError(f"{_NAMES} cannot be used: {said}") from None
        except Exception as error:
            # Some connect at once.
            raise _unreachable(error) from error
        self._root = str(root).rstrip("/")
        protocols = [files.protocol] if isinstance(files.protocol, str) else files.protocol
        if "file" in protocols:
            # Once: where its mount is away later, an empty folder in its place would lack files.
            # And no bucket: a name that is misspelt would become one.
            with contextlib.suppress(OSError):
                files.makedirs(self._root, exist_ok=True)

    def check(self) -> None:
        """Raise ConfigError when files cannot be written, read and deleted."""
        if error := self._trial():
            raise ConfigError(
                f"{_NAMES} cannot be used: a file could not be written, read and deleted there "
                f"({type(error).__name__}).",
                "Look at the name, the credentials and their rights; a bucket must be there.",
            )

    def write(self, blobs: Mapping[str, bytes | memoryview]) -> None:
        """Write the files; raises OperationalError when that fails."""
        data = {blob_id: bytes(elements) for blob_id, elements in blobs.items()}
        nbytes = sum(map(len, data.values()))
        answers = self._each("pipe_file", list(data.items()), _limit_s(nbytes))
        failed = [each for each in answers.values() if isinstance(each, Exception)]
        if not failed:
            return
        self.remove([key for key, answer in answers.items() if not isinstance(answer, Exception)])
        raise _unreachable(failed[0]) from failed[0]

    def read(self, blob_ids: Collection[str], *, nbytes: int = 0) -> dict[str, bytes | None]:
        """Return the files, ``nbytes`` in all; None for one that is gone or cannot be read.

        Raises OperationalError when the store itself fails.
        """
        found: dict[str, bytes | None] = dict.fromkeys(blob_ids)
        wanted = list(found)
        for _ in range(_TRIES):
            calls = [(each,) for each in wanted]
            answers = self._each("cat_file", calls, _limit_s(nbytes), start=0)
            failed = {key: each for key, each in answers.items() if isinstance(each, Exception)}
            found |= {key: bytes(answers[key]) for key in wanted if key not in failed}
            wanted = [key for key, each in failed.items() if not _is_gone(each)]
            if failed and self._trial():
                error = next(iter(failed.values()))
                raise _unreachable(error) from error
            if not wanted:
                return found
        # Tried again and again, they would hold up every job that is read beside their own.
        for key in wanted:
            told = {"blob": key, "error": type(failed[key]).__name__}
            logger.error("blob.unreadable", extra=told)
        return found

    def remove(self, blob_ids: Collection[str]) -> None:
        """Delete the files; one that cannot be deleted is left, and logged."""
        try:
            answers = self._each("rm_file", [(each,) for each in blob_ids], _ANSWER_S)
        except OperationalError as error:
            answers = dict.fromkeys(blob_ids, error.__cause__ or error)
        left = {
            blob_id: type(answer).__name__
            for blob_id, answer in answers.items()
            if isinstance(answer, Exception) and not _is_gone(answer)
        }
        if left:
            first, kind = next(iter(left.items()))
            told = {"blobs": len(left), "first": first, "error": kind}
            logger.warning("blob.not_removed", extra=told)

    def _trial(self) -> Exception | None:
        """Return why no file can be written, read and deleted at the moment; None if one can."""
        name, data = f"trial-{uuid.uuid4().hex}", b"trial"
        try:
            for step, arguments in (("pipe_file", (data,)), ("cat_file", ()), ("rm_file", ())):
                answer = self._each(step, [(name, *arguments)], _TRIAL_S)[name]
                if isinstance(answer, Exception):
                    raise answer
                if step == "cat_file" and bytes(answer) != data:
                    raise ValueError("it does not keep what is written")
        except Exception as error:  # noqa: BLE001  whatever a store raises
            return error
        return None

    def _each(
        self, name: str, calls: Sequence[tuple[Any, ...]], limit_s: float, **options: Any
    ) -> dict[str, Any]:
        """Call ``name`` of the files once for each of ``calls``, which begin with an id: together,
        where they can. Returns the answers by id; where one failed stands its error.

        Raises OperationalError when nothing can be asked, or the answers take too long. A folder
        whose mount has died waits as long as the kernel does.
        """
        try:
            # Asked for each time: fsspec keeps it, and makes it anew in a forked child.
            files = self._open()[0]
            method = getattr(files, f"_{name}" if files.async_impl else name)
            made = [
                functools.partial(method, f"{self._root}/{blob_id}", *rest, **options)
                for blob_id, *rest in calls
            ]
            if files.async_impl:
                answers = self._wait(files.loop, _together, made, timeout=limit_s)
            else:
                answers = [_tried(each) for each in made]
        except Exception as error:
            raise _unreachable(error) from error
        return {call[0]: answer for call, answer in zip(calls, answers, strict=True)}


async def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return await asyncio.gather(*(call() for call in calls), return_exceptions=True)


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  whatever a store raises
        return error


def _is_gone(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError)


def _limit_s(nbytes: int) -> float:
    return _ANSWER_S + min(nbytes, _LONGEST_BYTES) / _BYTES_PER_S


def _unreachable(error: Exception) -> OperationalError:
    return OperationalError(
        f"The folder or bucket of large arrays ({_NAMES}) failed: {type(error).__name__}."
    )
