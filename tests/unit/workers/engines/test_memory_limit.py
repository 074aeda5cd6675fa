"""Memory limits that the runtime's own arena enforces, each in a process of its own: an arena is
registered for the whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import onnx_models

ROOT = onnx_models.DIGITS.parent.parent.parent

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
import numpy as np
from producer.contract.errors import FleetError
from workers.models import load_model
from workers.runner import ModelRunner

asked = json.loads(sys.argv[1])
spec = dataclasses.replace(
    load_model(Path(asked["folder"])),
    memory_limit_bytes=asked["limit_bytes"],
    memory_first_chunk_bytes=4096,
    find_ceiling=asked["find_ceiling"],
)
try:
    runner = ModelRunner.load(spec, threads=1)
    runner.find_ceilings()
except FleetError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
answers = []
for shape in asked["batches"]:
    x = np.random.default_rng(0).random(shape[1:], np.float32)
    for o in runner.run([runner.prepare({asked["input"]: x}) for _ in range(shape[0])]):
        answers.append([o.precision, o.batch_size, o.out_of_memory, str(o.error or "")])
print(json.dumps({
    "answers": answers,
    "out_of_memory": runner.counters.out_of_memory,
    "ceilings": runner.ceilings.lowest(),
}))
"""


def answered(
    folder: Path,
    limit_bytes: int,
    batches: list[list[int]],
    name: str,
    *,
    find_ceiling: bool = False,
) -> Any:
    asked = {
        "folder": str(folder),
        "limit_bytes": limit_bytes,
        "batches": batches,
        "input": name,
        "find_ceiling": find_ceiling,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asked)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert set(done.stderr.split()) <= {"engine.out_of_memory"}
    return json.loads(done.stdout)


def test_a_batch_beyond_the_limit_is_answered_in_fp16_with_half_the_rows() -> None:
    found = answered(onnx_models.DIGITS, 500_000, [[32, 1, 1, 8, 8]] * 3, "image")

    assert found["answers"][:32] == [["fp16", 16, 1, ""]] * 32
    assert found["answers"][32:] == [["fp32", 16, 0, ""]] * 64
    assert found["out_of_memory"] == 1


def test_the_ladder_goes_down_to_one_row() -> None:
    found = answered(onnx_models.DIGITS, 235_000, [[32, 1, 1, 8, 8]] * 2, "image")

    assert {tuple(answer[1:2] + answer[3:]) for answer in found["answers"]} <= {(1, ""), (2, "")}


def test_a_limit_below_the_weights_is_refused_with_the_number() -> None:
    found = answered(onnx_models.DIGITS, 150_000, [], "image")

    assert "the weights of all its engines take 203008" in found["refused"]
    assert "most of it digits in fp32 with 101632" in found["refused"]


def test_one_row_that_does_not_fit_is_refused_at_load() -> None:
    found = answered(onnx_models.DIGITS, 205_000, [], "image")

    assert "one row does not fit in memory" in found["refused"]


def test_int8_halves_itself_first_where_its_ladder_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "digits8"
    folder.mkdir()
    onnx_models.digits_int8_static(folder / "int8.onnx")
    (folder / "model.toml").write_text(
        'precision = "int8"\nladder = ["same/2", "fp16/4"]\n[engines]\nint8 = "int8.onnx"\n'
        f'fp16 = "{onnx_models.DIGITS / "digits_fp16.onnx"}"\n'
    )

    found = answered(folder, 400_000, [[32, 1, 1, 8, 8]] * 3, "image")

    assert {tuple(answer[:2]) for answer in found["answers"][:32]} == {("fp16", 4)}
    assert {tuple(answer) for answer in found["answers"][32:]} == {("int8", 8, 0, "")}
    assert found["out_of_memory"] == 2


def test_the_largest_batch_is_found_under_the_limit_before_the_first_job() -> None:
    found = answered(onnx_models.DIGITS, 500_000, [[32, 1, 1, 8, 8]], "image", find_ceiling=True)

    assert found["out_of_memory"] == 0
    assert 16 < found["ceilings"]["fp32"] < 32
    assert max(answer[1] for answer in found["answers"]) == found["ceilings"]["fp32"]
    assert {answer[0] for answer in found["answers"]} == {"fp32"}
