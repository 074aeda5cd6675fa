"""What an instance remembers of the orders to end jobs that run."""

from __future__ import annotations

import io
import math
import os
import sys
import time

import pytest

from workers.orders import Orders, terminate_line
from workers.status import Status


class ParentIsGone(Exception):
    """Instead of the end of this process."""


def test_a_mark_is_kept_as_long_as_a_batch_is_in_hand_that_was_begun_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(_: int) -> None:
        raise ParentIsGone

    monkeypatch.setattr(os, "_exit", gone)
    monkeypatch.setattr(sys, "stdin", io.StringIO(terminate_line("cancelled:7") + "\n"))
    heard, before_s = Orders(["digits"]), time.monotonic()
    with pytest.raises(ParentIsGone):
        heard.listen(Status())

    heard.forget(before_s=before_s - 1)
    assert heard.terminates(["cancelled:7", "another"])

    heard.forget(before_s=math.inf)
    assert not heard.terminates(["cancelled:7"])
