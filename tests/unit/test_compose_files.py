"""The files that Docker and Compose read: what they must never say, and what they must.

`make compose-test` runs them; this holds on machines without Docker too.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FILES = ("compose.yaml", "compose.gpu.yaml", "tests/compose/compose.yaml")

#: What docker-compose 1.29 and the v2 plugin both take, of all that the files could say.
TOP_KEYS = {"services", "volumes"}
SERVICE_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "volumes", "ports", "tmpfs"),
    *("restart", "depends_on", "healthcheck", "stop_grace_period", "logging", "deploy"),
    *("read_only", "cap_drop", "security_opt"),
}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}

#: ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?text}``; 1.29 knows no other.
VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))


def values(node: Any) -> Iterator[str]:
    """Yield every text and number below ``node``, as text."""
    if isinstance(node, dict):
        for value in node.values():
            yield from values(value)
    elif isinstance(node, list):
        for value in node:
            yield from values(value)
    else:
        yield str(node)


def keys(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys(value)


def seconds(text: str) -> float:
    assert re.fullmatch(r"\d+s", text)
    return float(text[:-1])


@pytest.fixture
def services() -> dict[str, Any]:
    return dict(load("compose.yaml")["services"])


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_only_what_both_compose_know(name: str) -> None:
    file = load(name)

    assert {key for key in file if not key.startswith("x-")} <= TOP_KEYS
    for service in file["services"].values():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("healthcheck", {})) <= HEALTH_KEYS
        for awaited in service.get("depends_on", {}).values():
            assert set(awaited) == {"condition"}
    text = "\n".join(values(file["services"]))
    assert "$" not in VARIABLE.sub("", text)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_every_variable_is_in_the_example_with_the_same_default(name: str) -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    for variable, kind, default in VARIABLE.findall("\n".join(values(load(name)["services"]))):
        assert variable in example
        if kind == ":-":
            assert example[variable] == default


def test_every_password_comes_from_the_environment_and_none_may_be_empty(
    services: dict[str, Any],
) -> None:
    command = services["redis"]["command"]
    flower = services["flower"]["environment"]["FLOWER_BASIC_AUTH"]

    assert command[command.index("--requirepass") + 1].startswith("${REDIS_PASSWORD:?")
    assert flower.startswith("fleet:${FLOWER_PASSWORD:?")
    for service in ("workers", "flower"):
        url = services[service]["environment"]["FLEET_BROKER_URL"]
        assert url == "redis://:${REDIS_PASSWORD}@redis:6379/0"


def test_the_only_port_of_the_host_is_flowers_and_on_the_loopback(
    services: dict[str, Any],
) -> None:
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}

    assert ports == {"flower": ["127.0.0.1:${FLOWER_PORT:-5555}:5555"]}


def test_redis_keeps_jobs_and_throws_none_away(services: dict[str, Any]) -> None:
    text = (ROOT / "configs" / "redis.conf").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    conf = {line[0]: line[1] for line in lines}
    command = services["redis"]["command"]

    assert (conf["appendonly"], conf["maxmemory-policy"]) == ("yes", "noeviction")
    assert "requirepass" not in conf
    assert command[command.index("--maxmemory") + 1].startswith("${REDIS_MAXMEMORY:-")
    assert f"redis-data:{conf['dir']}" in services["redis"]["volumes"]


def test_a_worker_container_has_no_fixed_name_and_is_asked_itself(
    services: dict[str, Any],
) -> None:
    workers = services["workers"]

    assert workers["command"][0] == "worker"
    assert not {"-n", "--hostname"} & set(workers["command"])
    assert workers["healthcheck"]["test"] == ["CMD", "fleet", "health"]
    # Six seconds for the answer, and as many to start on a busy machine.
    assert seconds(workers["healthcheck"]["timeout"]) >= 12


def test_a_stop_waits_longer_than_a_worker_needs(services: dict[str, Any]) -> None:
    grace_s = WorkerSettings.load(None, {}).grace_s

    # Two waits of five seconds at most follow the grace time.
    assert seconds(services["workers"]["stop_grace_period"]) >= grace_s + 2 * 5


def test_devices_are_asked_for_in_the_overlay_alone(services: dict[str, Any]) -> None:
    overlay = load("compose.gpu.yaml")["services"]
    (device,) = overlay["workers"]["deploy"]["resources"]["reservations"]["devices"]

    assert "devices" not in set(keys(load("compose.yaml")))
    assert set(overlay) == {"workers"} <= set(services)
    # With a count or ids, every replica would be given the same GPUs.
    assert set(device) == {"driver", "capabilities"}
    assert "gpu" in device["capabilities"]


def test_the_image_runs_a_worker_as_process_1_of_a_user_without_rights() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    last = dict(re.findall(r"^(USER|ENTRYPOINT|CMD) (.+)$", text, flags=re.MULTILINE))

    assert last["USER"] not in {"root", "0"}
    assert json.loads(last["ENTRYPOINT"]) == ["env", "--block-signal=TERM", "fleet"]
    assert json.loads(last["CMD"]) == ["worker"]
    assert "-c constraints.txt" in text


def test_what_is_not_named_stays_out_of_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = set(
        re.findall(r"^COPY (?!--)(.+) ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    )

    assert rules[0] == "*"
    assert {word.partition("/")[0] for line in copied for word in line.split()} == {
        rule[1:] for rule in rules if rule.startswith("!")
    }


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with what `make compose-up` needs to write .env."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/compose_env.py", ".env.example"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def write_env(clone: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "scripts/compose_env.py"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stderr


def test_compose_up_writes_passwords_that_only_the_owner_can_read(clone: Path) -> None:
    said = write_env(clone)
    written = (clone / ".env").read_text(encoding="utf-8")
    passwords = re.findall(r"^\w+_PASSWORD=([0-9a-f]{48})$", written, flags=re.MULTILINE)

    assert stat.S_IMODE((clone / ".env").stat().st_mode) == 0o600
    assert len(set(passwords)) == 2
    assert not any(password in said for password in passwords)
    assert "/.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_compose_up_leaves_passwords_that_are_there(clone: Path) -> None:
    (clone / ".env").write_text("REDIS_PASSWORD=mine\n")

    assert write_env(clone) == ""
    assert (clone / ".env").read_text() == "REDIS_PASSWORD=mine\n"
