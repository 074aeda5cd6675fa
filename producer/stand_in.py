"""Who answers jobs in this process in place of workers: nobody, but in an app's own tests.

The places that would talk to Redis ask here first. `producer.testing` is who stands in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from celery import Celery
from celery.result import AsyncResult

if TYPE_CHECKING:
    from producer.contract.results import FleetBackend
    from producer.envelope import Submission
    from producer.inbox import Awaited
    from producer.results import Results


class StandIn(Protocol):
    """Takes jobs as the broker would, and answers them at once."""

    @property
    def models(self) -> frozenset[str]:
        """The models that are served."""
        ...

    @property
    def backend(self) -> FleetBackend:
        """Where ``infer``'s results lie."""
        ...

    @property
    def results(self) -> Results:
        """The same, as `Client` reads them."""
        ...

    def expect(self, jobs: Iterable[Awaited]) -> None:
        """Settle ``jobs`` when they are sent and answered."""
        ...

    def take(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Answer what ``commands`` send; returns what Redis would have said to each."""
        ...

    def apply(
        self, app: Celery, job: Submission, run: Callable[..., AsyncResult], options: dict[str, Any]
    ) -> None:
        """Answer ``job`` of ``app``; ``run`` is Celery's own ``apply`` of the task."""
        ...

    def answer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs for one call."""
        ...


_standing: Final[list[StandIn]] = []


def stand_in() -> StandIn | None:
    """Return who stands in at the moment."""
    return _standing[-1] if _standing else None


@contextlib.contextmanager
def standing_in(who: StandIn) -> Iterator[None]:
    """Have ``who`` stand in for the length of the block, and then whoever did before."""
    _standing.append(who)
    try:
        yield
    finally:
        _standing.remove(who)
