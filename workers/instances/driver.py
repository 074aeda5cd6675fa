"""Which versions of NVIDIA's driver a worker may run on: ``>=580.82,<600``, compared by numbers."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

#: The longer ones first, so that ``>=`` is not read as ``>``.
_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_BOUND: Final = re.compile(rf"({'|'.join(_COMPARE)})\s*(\d+(?:\.\d+)*)")
_VERSION: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclasses.dataclass(frozen=True, slots=True)
class DriverRange:
    """Bounds that a driver's version must keep, all of them; without any, every driver will do."""

    text: str = ""

    def __post_init__(self) -> None:
        for part in self._parts():
            if not _BOUND.fullmatch(part):
                raise ValueError(f"{part!r} is no bound")

    def __bool__(self) -> bool:
        return bool(self.text)

    def allows(self, version: str) -> bool:
        """Return whether a driver of ``version`` may be used; one that tells none may not."""
        if not self.text:
            return True
        if not _VERSION.fullmatch(version):
            return False
        return all(_keeps(version, part) for part in self._parts())

    def _parts(self) -> list[str]:
        return [part.strip() for part in self.text.split(",")] if self.text else []


def _keeps(version: str, part: str) -> bool:
    bound = _BOUND.fullmatch(part)
    assert bound is not None
    length = max(version.count("."), bound[2].count(".")) + 1
    return _COMPARE[bound[1]](_numbers(version, length), _numbers(bound[2], length))


def _numbers(version: str, length: int) -> tuple[int, ...]:
    """Return a version's numbers, and zeros for those it leaves out: 580 is 580.0."""
    numbers = [int(number) for number in version.split(".")]
    return (*numbers, *[0] * (length - len(numbers)))


#: CUDA 13 and MIG on a B300 ask for 580.82; what comes after 600 nobody has tried.
SUPPORTED: Final = DriverRange(">=580.82,<600")
