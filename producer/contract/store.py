"""A folder or bucket for large arrays, through fsspec: one file for each, named by its id.

Nothing there expires by itself. Files go when their job has ended, or their reply was read; what is
left of jobs that died with their sender is for a rule of the bucket, or for `find -mtime`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kombu.exceptions import OperationalError

from producer.contract.errors import ConfigError

logger = logging.getLogger(__name__)

_NAMES: Final = "FLEET_BLOB_URL"


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
        """Return the files, None for one that is gone; raises OperationalError when that fails."""
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
        try:
            data: Any = self._files.cat_file(self._path(blob_id))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _unreachable(error) from error
        return bytes(data)

    def _path(self, blob_id: str) -> str:
        return f"{self._root}/{blob_id}"


def _unreachable(error: Exception) -> OperationalError:
    return OperationalError(
        f"The folder or bucket of large arrays ({_NAMES}) failed: {type(error).__name__}."
    )
