"""Where nobody watches, `fleet add` says seldom what it is at."""

from __future__ import annotations

import pytest

from workers.adding import progress


def test_lines_come_when_it_takes_long_and_ever_more_seldom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    with progress.shown("trying") as tell:
        for now_s in range(100):
            tell(f"at {now_s}")

    said = capsys.readouterr().err.splitlines()
    assert said == ["fleet: at 10", "fleet: at 20", "fleet: at 40", "fleet: at 80"]
