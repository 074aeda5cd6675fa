"""A worker on a machine whose driver is not the one that fleet.toml allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nvml_inventories import environ_of, gpu
from tests.support.refusal import CELERY, FLEET, refusal
from tests.support.servers import TestServer

pytestmark = pytest.mark.redis

#: Named, since no runtime for GPUs is installed where tests run.
ON_A_GPU = {"FLEET_INSTANCES": gpu(0).uuid}


@pytest.mark.parametrize("command", [CELERY, FLEET])
def test_it_refuses_to_start_on_a_gpu_in_one_line(
    server: TestServer, config: Path, command: tuple[str, ...]
) -> None:
    old = environ_of("eight_b300", driver="570.172.08")

    line = refusal(command, server=server, config=config, environ=old | ON_A_GPU)

    assert line.startswith("fleet: NVIDIA's driver is 570.172.08, and ")
    assert 'driver = ">=580.82,<600"' in line


def test_the_range_is_the_one_that_the_file_says(server: TestServer, config: Path) -> None:
    (config / "fleet.toml").write_text('driver = "<580"\n')

    here = environ_of("eight_b300") | ON_A_GPU
    line = refusal(FLEET, server=server, config=config, environ=here)

    assert 'driver = "<580"' in line
