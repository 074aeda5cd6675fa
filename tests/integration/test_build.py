"""`fleet build` as a person runs it: the digits' variants, and everything that can happen to a
build while it runs.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract.errors import ConfigError
from tests import onnx_models
from tests.support.building import built, digits_folder, ended, model_folder, reports, start_build
from tests.support.commands import FLEET, run_command
from tests.support.mlp import write_mlp
from tests.support.refusal import FLEET as FLEET_WORKER
from tests.support.refusal import refusal
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import running_worker
from workers.build.store import digest
from workers.demo.digits import held_out
from workers.models import load_model

PRECISIONS: Final = ("fp16", "int8", "fp8")
IMAGES: Final = 540


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration with the digits, all variants built, and what the build printed."""
    config = tmp_path_factory.mktemp("digits")
    digits_folder(config)
    began_s = time.monotonic()

    code, out, err = ended(start_build(config, "digits", "--precision", "fp16,int8,fp8", "--json"))

    assert (code, err) == (0, "")
    assert time.monotonic() - began_s < 60
    (config / "printed.json").write_text(out)
    return config


def variants(config: Path, model: str = "digits") -> list[str]:
    """Return what a build left, apart from its lock."""
    folder = config / ".cache" / "variants" / model
    return sorted(path.name for path in folder.glob("*") if path.name != ".lock")


def manifest(config: Path, precision: str) -> dict[str, Any]:
    path = config / ".cache" / "variants" / "digits" / f"{precision}.json"
    return dict(json.loads(path.read_text()))


def test_variants_of_the_digits_are_as_right_as_fp32(digits: Path) -> None:
    printed = reports((digits / "printed.json").read_text())

    right = {
        precision: [round(share * IMAGES) for share in entry["report"]["accuracy"]["scores"]]
        for precision, entry in printed.items()
    }

    print(f"right answers of {IMAGES}, fp32 and variant: {right}")
    assert list(printed) == list(PRECISIONS)
    assert {fp32 for fp32, _ in right.values()} == {534}
    assert abs(right["fp16"][1] - 534) <= 1
    assert right["int8"][1] / IMAGES >= 0.965
    assert right["fp8"][1] / IMAGES >= 0.965


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_manifest_says_what_was_built_of_what_and_how_good_it_is(
    digits: Path, precision: str
) -> None:
    folder = digits / ".cache" / "variants" / "digits"

    said = manifest(digits, precision)

    report = said["report"]
    assert said["source"] == {
        "file": "digits.onnx",
        "files": {"digits.onnx": digest(onnx_models.DIGITS / "digits.onnx")},
    }
    assert said["files"] == {said["file"]: digest(folder / said["file"])}
    assert report["size_bytes"] == (folder / said["file"]).stat().st_size
    assert report["converted"] == report["candidates"] == {"Conv": 2, "Gemm": 2}
    assert report["outputs"]["scores"]["rows"] == IMAGES
    assert report["outputs"]["scores"]["top1_agreement"] >= 0.98
    assert {speed["rows"] for speed in report["speed"]} == {1, 32}
    assert set(said["versions"]) >= {"onnx", "onnxruntime", "numpy"}
    assert "accuracy" in (folder / said["text"]).read_text()


def test_what_is_unchanged_is_not_built_again(digits: Path) -> None:
    before = variants(digits)

    code, out, _ = ended(start_build(digits, "digits", "--json"))

    assert code == 0
    assert {entry["state"] for entry in reports(out).values()} == {"unchanged"}
    assert variants(digits) == before


def test_a_worker_serves_the_built_precision_that_its_model_names(
    server: TestServer, client: redis.Redis, fleet: Client, digits: Path
) -> None:
    path = digits / "models" / "digits" / "model.toml"
    path.write_text(path.read_text().replace('precision = "fp32"', 'precision = "int8"'))
    images = held_out(onnx_models.DIGITS.parent.parent).images[:32]

    with running_worker(server, digits):
        reply = fleet.submit("digits", {"image": np.concatenate(images)}).reply(20)
        engines = fleet_engines(server, digits)

    path.write_text(path.read_text().replace('precision = "int8"', 'precision = "fp32"'))
    assert (reply.precision, reply.batch_size) == ("int8", 32)
    assert engines == {"int8": manifest(digits, "int8")["file"]} | {
        "fp16": manifest(digits, "fp16")["file"]
    }


def fleet_engines(server: TestServer, config: Path) -> dict[str, str]:
    """Return the files that the running worker opened."""
    ran = run_command(*FLEET, "models", "--json", FLEET_BROKER_URL=server.url)
    (instance,) = json.loads(ran.stdout)["digits"]["instances"]
    return dict(instance["engines"])


def test_a_worker_refuses_a_precision_that_nobody_built(server: TestServer, tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace('precision = "fp32"', 'precision = "int8"'))

    line = refusal(FLEET_WORKER, server=server, config=tmp_path)

    assert "precision is 'int8'" in line
    assert line.endswith("no such entry. Build it with `fleet build digits --precision int8`.")


def test_a_perceptron_reads_the_digits_in_every_precision(tmp_path: Path) -> None:
    digits = digits_folder(tmp_path)
    folder = model_folder(tmp_path, write_mlp)

    made = built(
        folder,
        *PRECISIONS,
        calibrate=digits / "calibration.npz",
        test=digits / "test.npz",
        labels={"scores": "labels"},
    )

    shares = {one.precision: one.manifest["report"]["accuracy"]["scores"] for one in made}
    print(f"accuracy of fp32 and of each variant: {shares}")
    assert all(fp32 - variant <= 0.01 for fp32, variant in shares.values())
    assert all(one.manifest["report"]["converted"] == {"Gemm": 3} for one in made)
    assert all(fp32 >= 0.9 for fp32, _ in shares.values())


def test_two_builds_at_once_do_the_work_once(tmp_path: Path) -> None:
    digits_folder(tmp_path)
    words = ("digits", "--precision", "fp16,int8", "--json")

    both = [start_build(tmp_path, *words) for _ in range(2)]
    first, second = (ended(process) for process in both)

    assert (first[0], second[0]) == (0, 0)
    states = [{entry["state"] for entry in reports(out).values()} for _, out, _ in (first, second)]
    assert sorted(states, key=sorted) == [{"built"}, {"unchanged"}]
    assert len([name for name in variants(tmp_path) if name.endswith(".onnx")]) == 2


def begun(config: Path) -> bool:
    """Return whether a build has made its folder for half-made files."""
    return any(name.startswith(".building-") for name in variants(config))


def compared(config: Path) -> bool:
    """Return whether the first variant is published, so that the build is in its second."""
    return "fp16.json" in variants(config)


@pytest.mark.parametrize(("moment", "signum"), [(begun, signal.SIGINT), (compared, signal.SIGTERM)])
def test_an_interrupt_leaves_nothing_half_written_and_the_next_build_works(
    tmp_path: Path, moment: Callable[[Path], bool], signum: signal.Signals
) -> None:
    digits_folder(tmp_path)
    words = ("digits", "--precision", "fp16,int8,fp8")
    process = start_build(tmp_path, *words)
    wait_until(lambda: moment(tmp_path), what="a build that is under way")

    process.send_signal(signum)
    code, out, err = ended(process)

    whole = [name for name in ("fp16", "int8", "fp8") if f"{name}.json" in variants(tmp_path)]
    assert code == 128 + signum
    assert err.splitlines()[-1] == "fleet: interrupted; what was not finished left no trace."
    assert variants(tmp_path) == sorted(files_of(tmp_path, whole))
    assert len(whole) < 3
    assert "Traceback" not in out + err
    assert ended(start_build(tmp_path, *words))[0] == 0
    assert variants(tmp_path) == sorted(files_of(tmp_path, ["fp16", "int8", "fp8"]))


def files_of(config: Path, precisions: list[str]) -> list[str]:
    """Return the files that belong to whole variants."""
    said = [manifest(config, precision) for precision in precisions]
    return [
        name
        for entry in said
        for name in (f"{entry['precision']}.json", entry["text"], *entry["files"])
    ]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    digits_folder(tmp_path)
    process = start_build(tmp_path, "digits", "--precision", "fp16,int8,fp8")
    wait_until(lambda: begun(tmp_path), what="a build that is under way")

    process.kill()
    ended(process)
    left = begun(tmp_path)
    code, _, _ = ended(start_build(tmp_path, "digits", "--precision", "fp16"))

    assert left
    assert code == 0
    assert variants(tmp_path) == sorted(files_of(tmp_path, ["fp16"]))


def limited(size_bytes: int) -> Callable[[], None]:
    """Return what lets the kernel refuse to write a file beyond ``size_bytes``."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def test_a_disk_that_takes_no_more_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    digits_folder(tmp_path)
    assert ended(start_build(tmp_path, "digits", "--precision", "int8"))[0] == 0
    before = variants(tmp_path)

    process = start_build(tmp_path, "digits", "--precision", "fp16", preexec_fn=limited(50_000))
    code, out, err = ended(process)

    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert "File too large; no variant was changed. Free some space, or set FLEET_CACHE" in line
    assert variants(tmp_path) == before


def test_a_disk_that_fills_while_rows_are_prepared_changes_nothing(tmp_path: Path) -> None:
    digits_folder(tmp_path)

    process = start_build(tmp_path, "digits", "--precision", "int8", preexec_fn=limited(100_000))
    code, _, err = ended(process)

    assert code == 2
    assert len(err.splitlines()) == 1
    assert variants(tmp_path) == []


def test_a_cache_that_may_not_be_written_is_one_line(tmp_path: Path) -> None:
    digits_folder(tmp_path)
    (tmp_path / "file").write_text("")

    ran = run_build(tmp_path, "digits", FLEET_CACHE=str(tmp_path / "file" / "cache"))

    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 2
    assert "Not a directory; no variant was changed." in line


def test_a_variant_that_is_not_good_enough_ends_with_exit_code_1(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    np.savez(folder / "noise.npz", image=np.full((8, 1, 8, 8), 1e-6, np.float32))

    code, out, _ = ended(
        start_build(
            *(tmp_path, "digits", "--precision", "fp16,int8"),
            *("--calibrate", str(folder / "noise.npz")),
        )
    )

    assert code == 1
    assert "below min_agreement 0.98" in out
    assert variants(tmp_path) == sorted(files_of(tmp_path, ["fp16"]))


def test_a_metric_of_ones_own_is_reported_beside_that_of_fp32(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    (folder / "measures.py").write_text(
        "def wrong(outputs, data):\n"
        "    return (outputs['scores'].argmax(axis=1) != data['labels']).sum()\n"
    )

    code, out, _ = ended(
        start_build(
            *(tmp_path, "digits", "--precision", "fp16", "--metric", "measures:wrong", "--json")
        )
    )

    assert code == 0
    assert reports(out)["fp16"]["report"]["metric"] == [6, 6]


def test_a_committed_twin_stays_in_use_and_the_build_says_so(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, onnx_models.linear, toml='fp16 = "model_fp16.onnx"\n')
    onnx_models.in_fp16(folder / "model.onnx")

    code, out, _ = ended(start_build(tmp_path, "my"))

    assert code == 0
    assert "[engines] in model.toml lists another fp16 file, which workers go on using" in out


@pytest.mark.parametrize("listed", ["model.onnx", "nowhere.onnx"])
def test_a_twin_that_is_none_does_not_stop_the_build_of_one(tmp_path: Path, listed: str) -> None:
    folder = model_folder(tmp_path, onnx_models.linear, toml=f'fp16 = "{listed}"\n')

    with pytest.raises(ConfigError, match="Without this line the one is used that `fleet build my"):
        load_model(folder)
    code, _, _ = ended(start_build(tmp_path, "my", "--precision", "fp16"))

    assert code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("digit",), "there is no model 'digit'. Did you mean 'digits'?"),
        (("digits", "--precision", "int4"), "'int4' cannot be built. Did you mean 'int8'?"),
        (("digits", "--precision", ","), "--precision names none of fp32, fp16, int8, fp8."),
        (("digits", "--metric", "score"), "--metric must be \"module:function\", not 'score'."),
        (("digits", "--keep-fp32", "conv9"), "has no node 'conv9' to keep in fp32."),
        (("digits", "--calibrate", "gone.npz"), "gone.npz: there is no such file."),
    ],
)
def test_a_slip_is_one_line_and_exit_code_2(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    digits_folder(tmp_path)

    ran = run_build(tmp_path, *words)

    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 2
    assert line.startswith("fleet: ")
    assert says in line


def test_the_help_says_what_to_give_and_what_comes_of_it() -> None:
    ran = run_command(*FLEET, "build", "--help")

    for word in ("--calibrate", "numpy.savez", "model.toml", "FLEET_CACHE", "Exit code 1"):
        assert word in ran.stdout


def run_build(config: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_command(*FLEET, "build", *words, FLEET_CONFIG=str(config), **environ)
