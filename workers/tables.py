"""Reading a TOML table key by key: a wrong key or type is one line that says what to write instead.

Knows nothing of what the keys mean; ``models.py`` and ``settings.py`` do.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from producer.contract.errors import ConfigError


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known word, or what is known."""
    words = sorted(known)
    if close := difflib.get_close_matches(word, words, n=1, cutoff=0.5):
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(words)}." if words else ""


class Table:
    """One TOML table. Ask for every key that may be there, then call ``finish``."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        #: The file and table, as an error names it.
        self.where = where
        self._values = values
        self._asked: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> Table:
        """Return the file's top table."""
        try:
            return cls(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file.") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: is not valid TOML: {error}.") from None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        """Return the keys, for a table whose keys are the user's own words."""
        return tuple(self._values)

    def error(self, key: str, problem: str, do: str = "") -> ConfigError:
        """Return the error that says ``problem`` about ``key``, and what to ``do``."""
        return ConfigError(f"{self.where}: {key} {problem}", do)

    def raw(self, key: str) -> object:
        """Return the value as TOML gave it, or ``None``."""
        self._asked.add(key)
        return self._values.get(key)

    def text(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self.error(key, f'must be text in quotes, such as "{default}", not {value!r}.')
        return value

    def whole(self, key: str, default: int, *, least: int = 0) -> int:
        """Return a whole number that is at least ``least``."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"must be a whole number of at least {least}, not {value!r}.")
        return value

    def number(self, key: str, default: float, *, least: float = 0.0) -> float:
        """Return a finite number that is at least ``least``."""
        value = self.raw(key)
        if value is None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not least <= value < float("inf")
        ):
            raise self.error(key, f"must be a number of at least {least:g}, not {value!r}.")
        return float(value)

    def switch(self, key: str, *, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}.")
        return value

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f'must be a list of texts, such as ["a", "b"], not {value!r}.')
        return tuple(value)

    def table(self, key: str) -> Table:
        """Return the table below ``key``; an empty one when it is missing."""
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table, written as [{key}], not {value!r}.")
        return Table(f"{self.where} [{key}]", value)

    def finish(self) -> None:
        """Refuse the first key that nobody asked for."""
        for key in self._values:
            if key not in self._asked:
                raise self.error(key, f"is not a known key.{nearest(key, self._asked)}")
