"""What else holds on a machine: the table that FLEET_MACHINE names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from workers.settings import DEFAULT_CONFIG_DIR, WorkerSettings

B300 = DEFAULT_CONFIG_DIR / "b300.toml"

#: A B300's memory as its largest MIG profile names it, and that of its smallest, in GB.
WHOLE_GB, SLICE_GB = 269, 34


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fleet.toml").write_text("threads = 2\ngrace_s = 5")
    (tmp_path / "lab.toml").write_text("[small]\nthreads = 3\ninstances = 4\n[large]\nthreads = 6")
    return tmp_path


def refusal(folder: Path, machine: str) -> str:
    with pytest.raises(ConfigError) as caught:
        WorkerSettings.load(folder, {"FLEET_MACHINE": machine})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_table_wins_over_the_file_and_a_variable_over_both(folder: Path) -> None:
    settings = WorkerSettings.load(folder, {"FLEET_MACHINE": "lab.small", "FLEET_INSTANCES": "5"})

    assert (settings.grace_s, settings.threads, settings.instances) == (5, 3, 5)


@pytest.mark.parametrize("environ", [{}, {"FLEET_MACHINE": ""}])
def test_without_a_machine_no_table_is_read(folder: Path, environ: dict[str, str]) -> None:
    assert WorkerSettings.load(folder, environ).threads == 2


def test_a_table_that_is_not_there_is_refused_with_the_nearest(folder: Path) -> None:
    assert "has no table 'smal'. Did you mean 'small'?" in refusal(folder, "lab.smal")
    assert "Known: large, small." in refusal(folder, "lab")


def test_a_file_that_is_not_there_is_refused_by_the_variable(folder: Path) -> None:
    assert "FLEET_MACHINE is labs.small, and there is no " in refusal(folder, "labs.small")


def test_a_slip_in_any_table_of_the_file_is_refused(folder: Path) -> None:
    with (folder / "lab.toml").open("a") as file:
        file.write("\n[other]\nthread = 1")

    assert "[other]: thread is not a known key. Did you mean 'threads'?" in refusal(
        folder, "lab.small"
    )


def test_a_b300_host_has_8_whole_gpus_or_56_slices() -> None:
    whole = WorkerSettings.load(None, {"FLEET_MACHINE": "b300.whole"})
    mig = WorkerSettings.load(None, {"FLEET_MACHINE": "b300.mig"})

    assert (whole.instances, mig.instances) == (8, 8 * 7)
    assert whole.memory_limit_bytes is not None
    assert mig.memory_limit_bytes is not None
    assert whole.memory_limit_bytes < WHOLE_GB * 10**9
    assert mig.memory_limit_bytes < SLICE_GB * 10**9


def test_the_b300_file_says_that_it_was_not_run() -> None:
    text = B300.read_text(encoding="utf-8")

    assert "NOT RUN ON A GPU YET" in text.partition("\n[")[0]
    assert set(tomllib.loads(text)) == {"whole", "mig"}
