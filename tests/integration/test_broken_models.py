"""What a model that cannot be loaded costs the others of its process."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from producer.contract.names import Keys
from tests.support.worker import SCRIPTED, config_folder
from workers.loading import Loading
from workers.memory.shared_ceilings import SharedCeilings
from workers.settings import WorkerSettings
from workers.status import Status

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(("models", "least_s"), [(["broken"], 2.0), (["sound", "broken"], 2.4)])
def test_a_slow_load_that_fails_is_put_off_where_others_wait_for_it(
    client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    models: list[str],
    least_s: float,
) -> None:
    why = tmp_path / "why"
    why.write_text("no driver")
    options = {"load_s": 1.2, "load_fails_while": str(why)}
    with config_folder({"sound": SCRIPTED, "broken": {**SCRIPTED, "options": options}}) as config:
        monkeypatch.setenv("FLEET_CONFIG", str(config))
        ceilings = SharedCeilings(client, Keys())
        loading = Loading(WorkerSettings.load(), models, Status(), ceilings)

        loading.load(loading.due())

        assert loading.due() == []
        loading.close()
    (told,) = [record for record in caplog.records if record.msg == "model.broken"]
    gap_s = vars(told)["retry_in_s"]
    assert gap_s == 2 if least_s == 2 else gap_s >= least_s
