"""The worker's settings: what is read from where, and how a mistake is told."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from workers.settings import DEFAULT_CONFIG_DIR, WorkerSettings


def load(folder: Path, text: str = "", environ: dict[str, str] | None = None) -> WorkerSettings:
    (folder / "fleet.toml").write_text(text, encoding="utf-8")
    return WorkerSettings.load(folder, environ or {})


def refusal(folder: Path, text: str = "", environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_a_file_and_without_variables_the_defaults_hold(tmp_path: Path) -> None:
    assert WorkerSettings.load(tmp_path, {}) == WorkerSettings(config_dir=tmp_path)


def test_the_file_of_the_clone_holds_only_what_can_be_read() -> None:
    assert WorkerSettings.load(None, {}) == WorkerSettings()


def test_every_default_written_in_the_file_of_the_clone_is_the_real_one(tmp_path: Path) -> None:
    text = (DEFAULT_CONFIG_DIR / "fleet.toml").read_text(encoding="utf-8")
    written = dict(re.findall(r"^# ([a-z_]+) = (.+)$", text, flags=re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(WorkerSettings)} - {"config_dir"}
    assert written.keys() == fields

    # The two examples have no value by default.
    lines = [f"{key} = {value}" for key, value in written.items() if not key.startswith("memory_")]

    assert load(tmp_path, "\n".join(lines)) == WorkerSettings(config_dir=tmp_path)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        'grace_s = 5\nmodels = ["digits"]\nthreads = 2',
        {"FLEET_GRACE_S": "7.5", "FLEET_MODELS": "digits, faces", "FLEET_EVENTS": "false"},
    )

    assert (settings.grace_s, settings.threads) == (7.5, 2)
    assert settings.models == ("digits", "faces")
    assert settings.events is False


def test_the_folder_may_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("threads = 3", encoding="utf-8")

    settings = WorkerSettings.load(None, {"FLEET_CONFIG": str(tmp_path)})

    assert (settings.threads, settings.config_dir) == (3, tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLEET_CONFIG"):
        WorkerSettings.load(None, {"FLEET_CONFIG": str(tmp_path / "nowhere")})


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    assert "Did you mean 'grace_s'?" in refusal(tmp_path, "grace = 5")


def test_a_slip_in_a_variable_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, environ={"FLEET_THREAD": "2"})

    assert "FLEET_THREAD;" in message
    assert "FLEET_THREADS" in message


def test_a_variable_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    environ = {"FLEET_SERVICE_HOST": "10.0.0.1", "FLEET_BROKER_URL": "redis://x"}

    assert load(tmp_path, "", environ) == WorkerSettings(config_dir=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'grace_s = "20"',
        "grace_s = -1",
        "grace_s = nan",
        "grace_s = inf",
        "grace_s = true",
        "threads = 1.5",
        "threads = 0",
        "instances = -1",
        "events = 1",
        "models = [1]",
        "driver = 580",
        'driver = "580.82 or newer"',
        "memory_limit_bytes = 0",
        "[grace_s]",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(tmp_path: Path, line: str) -> None:
    key = re.findall(r"[a-z_]+", line)[0]

    message = refusal(tmp_path, line)

    assert f"fleet.toml: {key} must be " in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FLEET_GRACE_S", "soon"),
        ("FLEET_GRACE_S", "nan"),
        ("FLEET_INSTANCES", "two"),
        ("FLEET_DRIVER", "580"),
        ("FLEET_EVENTS", "maybe"),
    ],
)
def test_a_variable_of_the_wrong_kind_is_refused_by_its_name(
    tmp_path: Path, name: str, text: str
) -> None:
    assert f"environment: {name} must be " in refusal(tmp_path, environ={name: text})


def test_a_file_that_is_not_toml_is_refused_with_the_place(tmp_path: Path) -> None:
    message = refusal(tmp_path, "grace_s 5")

    assert str(tmp_path / "fleet.toml") in message
    assert "line 1" in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match="not valid TOML"):
        WorkerSettings.load(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "harm"),
    [
        ("claim_ttl_s = 2", "run twice"),
        ("lease_ttl_s = 1", "another worker"),
        ("batch_timeout_s = 0.5", "dead letters"),
        ("claim_ttl_s = 30", "would run again"),
        ("result_ttl_s = 10", "could run twice"),
        ("memory_limit_bytes = 10\nmemory_first_chunk_bytes = 11", "no model could be loaded"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_harm(
    tmp_path: Path, text: str, harm: str
) -> None:
    tomllib.loads(text)

    assert harm in refusal(tmp_path, text)
