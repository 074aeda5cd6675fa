"""When a worker may take what others held: a pure decision with the clock as an argument."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class HoldOff:
    """When claims or leases of others may be taken: never soon after this worker may have missed
    something.

    The server's clock goes on while it is stopped or out of reach. Afterwards every claim and every
    lease looks dead, also those of workers that are about to renew them. All times but the server's
    are of the monotonic clock.
    """

    #: How long a claim, or a lease, lasts.
    ttl_s: float
    until_s: float
    renewed_at_s: float
    #: How far the server's clock was ahead of ours when it was heard last.
    ahead_s: float | None = None

    @classmethod
    def begin(cls, *, ttl_s: float, now_s: float) -> HoldOff:
        return cls(ttl_s=ttl_s, until_s=now_s + ttl_s, renewed_at_s=now_s)

    def failed(self, *, now_s: float) -> None:
        """Redis did not answer as it should."""
        self.until_s = now_s + self.ttl_s

    def renewed(self, *, now_s: float) -> None:
        """A renewal was answered; one that comes a third of that time too late counts as missed."""
        if self._is_late(now_s):
            self.failed(now_s=now_s)
        self.renewed_at_s = now_s

    def heard(self, *, server_unix_s: float, now_s: float) -> None:
        """The server told its time; a clock that was set forward makes all that others hold look
        dead until they renew it.
        """
        ahead_s = server_unix_s - now_s
        if self.ahead_s is not None and ahead_s - self.ahead_s > self.ttl_s / 3:
            self.failed(now_s=now_s)
        self.ahead_s = ahead_s

    def allows(self, *, now_s: float) -> bool:
        """Whether others' may be taken now; not while a renewal is late that would be told of next.

        Whoever asks may have waited for this server until now, with the renewal to come after it.
        """
        return now_s >= self.until_s and not self._is_late(now_s)

    def _is_late(self, now_s: float) -> bool:
        return now_s - self.renewed_at_s > self.ttl_s * 2 / 3
