"""How long somebody waits for replies: the time they gave, or the fleet's default."""

from __future__ import annotations

import time
from typing import Final

#: Short steps of a wait are shorter.
_LONG_S: Final = 1.0


class Patience:
    """A time to wait, from now on. Infinity waits for ever.

    A time that the caller gave is the time for all; the default is a time without any news.
    """

    def __init__(self, given_s: float | None, default_s: float) -> None:
        self._is_default = given_s is None
        self._wait_s = default_s if given_s is None else given_s
        self._began_s = self._since_s = time.monotonic()

    def __str__(self) -> str:
        source = " (FLEET_REPLY_TIMEOUT_S)" if self._is_default else ""
        return f"{self._wait_s:g} s{source}"

    @property
    def left_s(self) -> float:
        """How long to wait yet; 0 when it is over."""
        return max(0.0, self._since_s + self._wait_s - time.monotonic())

    @property
    def was_long(self) -> bool:
        """Whether who waited wants to know why: not who waits in many short steps."""
        return time.monotonic() - self._began_s >= _LONG_S

    def renew(self) -> None:
        """Note that there was news."""
        if self._is_default:
            self._since_s = time.monotonic()
