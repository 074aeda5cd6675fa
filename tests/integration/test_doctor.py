"""`fleet doctor` as a person or a program runs it: on machines, servers and models with one thing
wrong each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.contract.names import Keys
from tests.onnx_models import linear
from tests.support.building import built, model_folder
from tests.support.commands import FLEET, run_command
from tests.support.nvml_inventories import environ_of, gpu
from tests.support.servers import TestServer

pytestmark = pytest.mark.redis

Lines = Mapping[str, Mapping[str, str]]

#: Runs the doctor with options and variables; returns its exit code and its lines by check.
Doctor = Callable[..., tuple[int, Lines]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a configuration with one model."""
    model_folder(tmp_path, linear)
    return tmp_path


@pytest.fixture
def fit(client: redis.Redis) -> Iterator[redis.Redis]:
    """Return the server with nothing to be said against it."""
    client.config_set("maxmemory", 1 << 30)
    yield client
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("appendonly", "yes")


@pytest.fixture
def doctor(fit: redis.Redis, server: TestServer, folder: Path) -> Doctor:
    def run(*options: str, **environ: str) -> tuple[int, Lines]:
        where = {"FLEET_BROKER_URL": server.url, "FLEET_CONFIG": str(folder)}
        given = environ_of("no_driver") | where | environ
        ran = run_command(*FLEET, "doctor", "--json", *options, **given)
        assert ran.stderr == ""
        return ran.returncode, lines(ran.stdout)

    return run


def lines(out: str) -> Lines:
    said: list[dict[str, str]] = json.loads(out)
    assert all(list(each) == ["check", "state", "text", "do"] for each in said)
    assert {each["state"] for each in said} <= {"ok", "warning", "error"}
    assert [each for each in said if (each["state"] == "ok") != (each["do"] == "")] == []
    return {each["check"]: each for each in said}


def wrong(found: Lines) -> set[tuple[str, str]]:
    """Return what is not ok, with its state."""
    return {(check, line["state"]) for check, line in found.items() if line["state"] != "ok"}


def test_a_machine_without_a_gpu_is_well(doctor: Doctor) -> None:
    code, found = doctor("--strict")

    assert (code, wrong(found)) == (0, set())
    assert "workers run on CPU cores" in found["driver"]["text"]
    assert list(found)[-5:] == [
        *("redis", "redis policy", "redis memory", "redis persistence", "model my")
    ]


def test_a_person_gets_a_table_and_a_line_that_sums_it_up(
    fit: redis.Redis, server: TestServer, folder: Path
) -> None:
    where = {"FLEET_BROKER_URL": server.url, "FLEET_CONFIG": str(folder)}
    where |= environ_of("no_driver")
    well = run_command(*FLEET, "doctor", **where)
    fit.config_set("maxmemory", 0)
    warned = run_command(*FLEET, "doctor", **where)

    assert (well.returncode, well.stdout.splitlines()[-1]) == (0, "All is well.")
    assert (warned.returncode, warned.stdout.splitlines()[-1]) == (0, "1 warning.")
    (row,) = [line for line in warned.stdout.splitlines() if line.split()[:1] == ["warning"]]
    assert "redis memory" in row
    assert "no maxmemory" in row
    assert "Set `maxmemory`" in row


def test_a_warning_is_exit_code_1_with_strict_alone(doctor: Doctor, fit: redis.Redis) -> None:
    fit.config_set("appendonly", "no")

    code, found = doctor()
    strict, _ = doctor("--strict")

    assert (code, strict) == (0, 1)
    assert wrong(found) == {("redis persistence", "warning")}
    assert "appendonly yes" in found["redis persistence"]["do"]


def test_gpus_are_listed_with_free_memory_holder_and_fast_precisions(
    doctor: Doctor, fit: redis.Redis
) -> None:
    until_ms = int(fit.time()[0]) * 1000
    fit.set(Keys().lease(f"{gpu(1).uuid}/0"), f"{until_ms + 60_000} w1@there/7.1", ex=60)
    fit.set(Keys().lease(f"{gpu(2).uuid}/0"), f"{until_ms - 60_000} w2@there/8.1", ex=60)

    code, found = doctor(**environ_of("eight_b300"))

    assert code == 0
    first, second, third = (found[f"gpu {gpu(place).uuid}"]["text"] for place in range(3))
    assert "NVIDIA B300 SXM6 AC, compute capability 10.3, 267 of 269 GiB free, free" in first
    assert "held by w1@there" in second
    assert "w2@there" not in third
    assert "fast in fp8, fp16, bf16" in first
    assert "int8 is slow: 0.15 POPS" in found["precisions 10.3"]["text"]
    assert "fp8 is right there" in found["precisions 10.3"]["text"]
    # The tests' environment has no runtime for GPUs.
    assert ("tensorrt", "warning") in wrong(found)


def test_mig_slices_are_listed_and_what_cannot_be_used_is_named(doctor: Doctor) -> None:
    _, cut = doctor(**environ_of("seven_slices"))
    _, mixed = doctor(**environ_of("mixed"))
    _, fallen = doctor(**environ_of("fallen"))

    assert len([check for check in cut if check.startswith("mig MIG-")]) == 7
    assert "no slices" in mixed["gpu"]["text"]
    assert (fallen["gpu"]["state"], "lost" in fallen["gpu"]["text"]) == ("warning", True)


def test_a_driver_outside_the_range_is_an_error(doctor: Doctor) -> None:
    code, found = doctor(**environ_of("eight_b300", driver="570.172.08"))

    assert code == 2
    assert found["driver"]["state"] == "error"
    assert 'is 570.172.08, and fleet.toml allows driver = ">=580.82' in found["driver"]["text"]


def test_int8_on_a_b300_is_a_warning_that_names_fp8(doctor: Doctor, folder: Path) -> None:
    toml = folder / "models" / "my" / "model.toml"
    toml.write_text('precision = "int8"\n[engines]\nint8 = "model.onnx"\n')

    _, found = doctor(**environ_of("eight_b300"))
    _, elsewhere = doctor(**environ_of("mixed"))

    assert found["precision my"]["state"] == "warning"
    assert "fleet build my --precision fp8" in found["precision my"]["do"]
    # The T4 of that machine is good at int8, its B300 is not.
    assert "B300" in elsewhere["precision my"]["text"]


def test_a_server_that_throws_jobs_away_is_an_error(doctor: Doctor, fit: redis.Redis) -> None:
    fit.config_set("maxmemory-policy", "allkeys-lru")

    code, found = doctor()

    assert code == 2
    assert wrong(found) == {("redis policy", "error")}
    assert "allkeys-lru" in found["redis policy"]["text"]
    assert found["redis policy"]["do"] == "Set `maxmemory-policy noeviction` there."


def test_no_server_is_an_error_and_the_rest_is_looked_at(doctor: Doctor) -> None:
    code, found = doctor(FLEET_BROKER_URL="redis://user:secret@127.0.0.1:1/0")

    assert code == 2
    assert wrong(found) == {("redis", "error")}
    assert "There is no Redis at redis://" in found["redis"]["text"]
    assert "secret" not in str(found)
    assert "model my" in found


def test_the_server_of_the_results_is_looked_at_too(doctor: Doctor) -> None:
    code, found = doctor(FLEET_RESULT_URL="redis://127.0.0.1:1/0")

    assert code == 2
    assert wrong(found) == {("results", "error")}
    assert "FLEET_RESULT_URL" in found["results"]["text"]


@pytest.mark.parametrize("key", ['precision = "int8"', 'ladder = ["int8/2"]'])
def test_a_variant_that_is_not_built_is_an_error_with_the_command_that_builds_it(
    doctor: Doctor, folder: Path, key: str
) -> None:
    toml = folder / "models" / "my" / "model.toml"
    toml.write_text(f"{key}\n{toml.read_text()}")

    code, found = doctor()

    assert code == 2
    assert wrong(found) == {("model my", "error")}
    assert "fleet build my --precision int8" in found["model my"]["do"]


def test_a_variant_of_another_file_than_the_one_that_is_there_is_an_error(
    doctor: Doctor, folder: Path
) -> None:
    model = folder / "models" / "my"
    built(model, "fp16")
    assert wrong(doctor()[1]) == set()
    linear(model / "model.onnx", rows=4)

    code, found = doctor()

    assert code == 2
    assert "was not built from" in found["model my"]["text"]
    assert found["model my"]["do"].endswith("fleet build my --precision fp16")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole: whole[:-20], "only a part of one"),
        (lambda whole: whole.replace(b"\x06MatMul", b"\x7fMatMul"), "is damaged"),
        (lambda whole: b"", "is empty"),
    ],
)
def test_a_corrupt_file_is_an_error_that_names_it(
    doctor: Doctor, folder: Path, spoil: Callable[[bytes], bytes], says: str
) -> None:
    path = folder / "models" / "my" / "model.onnx"
    path.write_bytes(spoil(path.read_bytes()))

    code, found = doctor()

    assert code == 2
    assert wrong(found) == {("model my", "error")}
    assert str(path) in found["model my"]["text"]
    assert says in found["model my"]["text"]


def test_an_operator_that_nobody_knows_is_a_warning(doctor: Doctor, folder: Path) -> None:
    path = folder / "models" / "my" / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"MatMul", b"MatMug"))

    code, found = doctor()

    assert code == 0
    assert wrong(found) == {("model my", "warning")}
    assert "MatMug" in found["model my"]["text"]


def test_weights_that_are_missing_beside_a_file_are_an_error(doctor: Doctor, folder: Path) -> None:
    import onnx

    path = folder / "models" / "my" / "model.onnx"
    options: dict[str, Any] = {"save_as_external_data": True, "size_threshold": 0}
    onnx.save_model(onnx.load(path), str(path), location="weights.data", **options)
    assert wrong(doctor()[1]) == set()
    (path.parent / "weights.data").unlink()

    code, found = doctor()

    assert code == 2
    assert "weights.data, which is not there" in found["model my"]["text"]


def test_code_that_is_not_there_is_an_error(doctor: Doctor, folder: Path) -> None:
    file = folder / "models" / "my" / "model.toml"
    file.write_text(f'code = "mine:Mine"\n{file.read_text()}')

    code, found = doctor()

    assert (code, wrong(found)) == (2, {("model my", "error")})
    assert "mine is neither in" in found["model my"]["text"]


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("\nraise RuntimeError('no licence')", "RuntimeError: no licence (mine.py, line 2)"),
        ("class Mine:\n    def __init__(self): open('/nosuch')", "'/nosuch' (mine.py, line 2)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed the process (SIGKILL)"),
        ("import os; os._exit(7)", "with status 7"),
    ],
)
def test_code_that_no_worker_could_load_is_an_error_with_its_place(
    doctor: Doctor, folder: Path, python: str, says: str
) -> None:
    file = folder / "models" / "my" / "model.toml"
    file.write_text(f'code = "mine:Mine"\n{file.read_text()}')
    (file.parent / "mine.py").write_text(python)

    code, found = doctor()

    assert (code, wrong(found)) == (2, {("model my", "error")})
    assert says in found["model my"]["text"]
    assert "mine:Mine" in found["model my"]["do"]


def test_code_and_engines_of_ones_own_are_loaded_as_a_worker_does(
    doctor: Doctor, folder: Path
) -> None:
    file = folder / "models" / "my" / "model.toml"
    file.write_text(f'code = "mine:Mine"\nruntime = "engine:Own"\n{file.read_text()}')
    (file.parent / "mine.py").write_text(
        "print('loud')\nclass Mine:\n    def preprocess(self, inputs): return inputs\n"
    )
    code_without, without = doctor()
    (file.parent / "engine.py").write_text("class Own: pass")

    code, found = doctor()

    assert (code_without, code) == (2, 0)
    assert "No module named 'engine'" in without["model my"]["text"]
    assert "Its code, mine:Mine and engine:Own, can be loaded." in found["model my"]["text"]


def test_a_folder_that_cannot_be_written_is_a_warning(doctor: Doctor, folder: Path) -> None:
    code, found = doctor(FLEET_CACHE=str(folder / "fleet.toml" / "cache"))
    (folder / "fleet.toml").write_text("")
    _, blocked = doctor(FLEET_CACHE=str(folder / "fleet.toml" / "cache"))
    (folder / "circle").symlink_to(folder / "circle")
    _, in_circles = doctor(FLEET_CACHE=str(folder / "circle"))
    # Where nobody can make a file, and root's rights say otherwise.
    _, not_a_disk = doctor(FLEET_CACHE="/proc/nowhere")

    assert (code, wrong(found)) == (0, set())
    assert wrong(blocked) == wrong(in_circles) == wrong(not_a_disk) == {("cache", "warning")}
    assert "cannot be written" in not_a_disk["cache"]["text"]


def test_a_mistake_in_the_settings_is_an_error_and_the_server_is_looked_at(doctor: Doctor) -> None:
    code, found = doctor(FLEET_GRACES="3")

    assert code == 2
    assert wrong(found) == {("settings", "error")}
    assert found["redis"]["state"] == "ok"
