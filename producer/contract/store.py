"""A folder or bucket for large arrays, through fsspec: one file for each, named by its id.

Nothing there expires by itself. Files go when their job has ended, or their reply was read; what is
left of jobs that died with their sender is for a rule of the bucket, or for `find -mtime`.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kombu.exceptions import OperationalError

from producer.contract.errors import ConfigError

logger = logging.getLogger(__name__)

_NAMES: Final = "FLEET_BLOB_URL"
#: A file is tried so often, where others can be read meanwhile.
_TRIES: Final = 3


class Store:
    """The files below one URL."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                f"{_NAMES} is set, and fsspec is not installed.",
                'Install the extra `fsspec`: pip install "fleet-inference[fsspec]".',
            ) from None
        self._open = functools.partial(fsspec.core.url_to_fs, url)
        try:
            self._root = str(self._open()[1]).rstrip("/")
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{_NAMES} cannot be used: {error}") from None

    @property
    def _files(self) -> Any:
        # Asked for each time: fsspec keeps it, and makes it anew in a forked child.
        return self._open()[0]

    def write(self, blobs: Mapping[str, bytes | memoryview]) -> None:
        """Write the files; raises OperationalError when that fails."""
        try:
            self._files.makedirs(self._root, exist_ok=True)
            for blob_id, data in blobs.items():
                self._files.pipe_file(self._path(blob_id), bytes(data))
        except Exception as error:
            raise _unreachable(error) from error

    def read(self, blob_ids: Iterable[str]) -> dict[str, bytes | None]:
        """Return the files, None for one that is gone or cannot be read.

        Raises OperationalError when the store itself fails.
        """
        return {blob_id: self._read(blob_id) for blob_id in blob_ids}

    def remove(self, blob_ids: Iterable[str]) -> None:
        """Delete the files; one that cannot be deleted is left, and logged."""
        for blob_id in blob_ids:
            try:
                self._files.rm_file(self._path(blob_id))
            except FileNotFoundError:
                continue
            except Exception as error:  # noqa: BLE001  whatever a bucket raises: the job has ended
                logger.warning(
                    "blob.not_removed", extra={"blob": blob_id, "error": type(error).__name__}
                )

    def _read(self, blob_id: str) -> bytes | None:
        """Return one file; None for one that is gone, or that cannot be read where others can.

        Tried again and again, such a file would hold up every job that is read beside its own.
        """
        tries = _TRIES
        while True:
            try:
                return bytes(self._files.cat_file(self._path(blob_id)))
            except FileNotFoundError:
                return None
            except Exception as error:
                tries -= 1
                if not self._works():
                    raise _unreachable(error) from error
                if not tries:
                    told = {"blob": blob_id, "error": type(error).__name__}
                    logger.error("blob.unreadable", extra=told)
                    return None

    def _works(self) -> bool:
        """Return whether a file can be written, read and deleted at the moment."""
        path, data = self._path(f"trial-{uuid.uuid4().hex}"), b"trial"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(path, data)
            found: Any = self._files.cat_file(path)
            self._files.rm_file(path)
        except Exception:  # noqa: BLE001  whatever a bucket raises
            return False
        return bytes(found) == data

    def _path(self, blob_id: str) -> str:
        return f"{self._root}/{blob_id}"


def _unreachable(error: Exception) -> OperationalError:
    return OperationalError(
        f"The folder or bucket of large arrays ({_NAMES}) failed: {type(error).__name__}."
    )
