"""Models that are unlike the usual: each is added as it is, or refused with what to do about it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import onnx
import onnx.parser
import pytest
from onnx import helper

from producer.contract.errors import ConfigError
from workers.adding import speed
from workers.adding.found import Found
from workers.adding.graph import read_graph
from workers.adding.hints import Hints, read_hints
from workers.adding.model_file import model_file
from workers.adding.trial import try_model
from workers.models import load_model
from workers.runner import ModelRunner

HEAD: Final = '<ir_version: 8, opset_import: ["" : 17]>'

RUNS: Final = {
    "half precision in and out": (
        f"{HEAD} g (float16[n, 4] x) => (float16[n, 4] y) {{ y = Relu(x) }}",
        {"x": 0, "y": 0},
    ),
    "rows on the last axis": (
        f"{HEAD} g (float[3, 4, b] x) => (float[3, b] y) {{ "
        "a = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, a) }",
        {"x": 2, "y": 1},
    ),
    "rows on another axis of each input": (
        f"{HEAD} g (float[n, 4] x, float[4, n] h) => (float[n, 4] y) {{ "
        "t = Transpose(h) y = Add(x, t) }",
        {"x": 0, "h": 1, "y": 0},
    ),
    "axes without a name": (
        f"{HEAD} g (float[?, 4] x) => (float[?, 4] y) {{ y = Relu(x) }}",
        {"x": 0, "y": 0},
    ),
    "a branch that a scalar chooses": (
        f"{HEAD} g (float[n, 4] x, bool c) => (float[n, 4] y) {{ y = If(c) <"
        "then_branch = a () => (float[n, 4] p) { p = Relu(x) }, "
        "else_branch = b () => (float[n, 4] q) { q = Neg(x) }> }",
        {"x": 0, "c": None, "y": 0},
    ),
    "a loop": (
        f"{HEAD} g (float[n, 4] x) => (float[n, 4] y) {{ k = Constant<value_int = 3>() "
        "t = Constant<value_int = 1>() c = Cast<to = 9>(t) y = Loop(k, c, x) <"
        "body = b (int64 i, bool d, float[n, 4] v) => (bool o, float[n, 4] w) "
        "{ o = Identity(d) w = Add(v, v) }> }",
        {"x": 0, "y": 0},
    ),
    "an old opset": (
        '<ir_version: 3, opset_import: ["" : 7]> '
        "g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }",
        {"x": 0, "y": 0},
    ),
    "one number for all rows beside an answer for each": (
        f"{HEAD} g (float[n, 4] x) => (float y, float[n, 4] z) {{ z = Relu(x) "
        "s = Constant<value_float = 3.0>() y = Identity(s) }",
        {"x": 0, "y": None, "z": 0},
    ),
}

RUNS_ALONE: Final = {
    "one number of all rows": (
        f"{HEAD} g (float[n, 4] x) => (float y) {{ y = ReduceSum<keepdims = 0>(x) }}",
        "rows influence each other",
    ),
    "an answer without rows": (
        f"{HEAD} g (float[n, 4] x) => (float[4] y) {{ "
        "a = Constant<value_ints = [0]>() y = ReduceSum<keepdims = 0>(x, a) }",
        "has shape (4,) for 1 rows on axis 0",
    ),
    "an answer by chance": (
        f"{HEAD} g (float[n, 4] x) => (float[n, 4] y) {{ y = RandomNormalLike(x) }}",
        "the same row is answered differently each time",
    ),
}

REFUSED: Final = {
    "no inputs": (
        f"{HEAD} g () => (float[2] y) {{ y = Constant<value_floats = [1.0, 2.0]>() }}",
        "the model has no inputs",
    ),
    "text": (f"{HEAD} g (string[n] x) => (string[n] y) {{ y = Identity(x) }}", "is text"),
    "a sequence": (
        f"{HEAD} g (float[n, 4] x) => (seq(float[n, 4]) y) {{ y = SequenceConstruct(x) }}",
        "is a sequence, not a tensor, and cannot be split between jobs. Leave it out",
    ),
    "what may be there or not": (
        f"{HEAD} g (float[n, 4] x) => (optional(float[n, 4]) y) {{ y = Optional(x) }}",
        "is an optional, not a tensor",
    ),
    "nothing at all": (
        f"{HEAD} g (float[0, 4] x) => (float[0, 4] y) {{ y = Relu(x) }}",
        "has an axis of size 0",
    ),
    "complex numbers": (
        f"{HEAD} g (complex64[n, 4] x) => (complex64[n, 4] y) {{ y = Identity(x) }}",
        "real and imaginary parts as two inputs",
    ),
    "bfloat16": (
        f"{HEAD} g (bfloat16[n, 4] x) => (float[n, 4] y) {{ y = Cast<to = 1>(x) }}",
        "export it as float32",
    ),
    "a row of gigabytes": (
        f"{HEAD} g (float[n, 1000000000] x) => (float[n, 1] y) {{ "
        "a = Constant<value_ints = [1]>() y = ReduceSum(x, a) }",
        "takes 4,000,000,000 bytes or more; a job carries 536,870,912 at most",
    ),
    "an opset of the future": (
        '<ir_version: 8, opset_import: ["" : 99]> '
        "g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }",
        "Export it with another, such as opset 17, or upgrade onnxruntime",
    ),
    "an opset of the past": (
        '<ir_version: 3, opset_import: ["" : 1]> '
        "g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }",
        "Export it with another, such as opset 17",
    ),
    "an operator of one's own": (
        '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]> '
        "g (float[n, 4] x) => (float[n, 4] y) { y = com.acme.Fancy(x) }",
        "com.acme:Fancy. Export the model with standard operators",
    ),
    "a division by what may be zero": (
        f"{HEAD} g (int64[n, 4] x) => (int64[n, 4] y) {{ "
        "k = Constant<value_int = 10>() y = Div(k, x) }",
        "--probe-min x=0 the least",
    ),
}


@pytest.fixture(autouse=True)
def _time_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast they are is not asked here."""
    monkeypatch.setattr(speed, "_TIMED_S", 0.0)


def tried(folder: Path, text: str, hints: Hints | None = None) -> Found:
    file = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    return try_model(read_graph(file), "model", hints or {}, threads=1)


@pytest.mark.parametrize(("text", "axes"), RUNS.values(), ids=RUNS)
def test_it_is_served_and_its_rows_share_runs(
    tmp_path: Path, text: str, axes: dict[str, int | None]
) -> None:
    found = tried(tmp_path, text)

    assert found.batches, found.why
    assert {port.name: port.batch_axis for port in (*found.inputs, *found.outputs)} == axes


@pytest.mark.parametrize(("text", "why"), RUNS_ALONE.values(), ids=RUNS_ALONE)
def test_it_is_served_and_each_job_runs_alone(tmp_path: Path, text: str, why: str) -> None:
    found = tried(tmp_path, text)

    assert (found.batches, found.whole) == (False, True)
    assert why in found.why


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line_that_says_what_to_do(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError) as told:
        tried(tmp_path, text)

    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_names_with_slashes_and_colons_are_kept(tmp_path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, 1, ["n", 4]) for name in ("in/a:0", "out/b:0")]
    node = helper.make_node("Relu", ["in/a:0"], ["out/b:0"])
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17)]
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)

    found = try_model(read_graph(file), "model", {}, threads=1)

    assert [port.name for port in (*found.inputs, *found.outputs)] == ["in/a:0", "out/b:0"]
    table = tomllib.loads(model_file("model", file.name, found, {}))
    assert table["inputs"]["in/a:0"]["batch_axis"] == 0


def test_a_division_runs_with_the_least_number_that_jobs_send(tmp_path: Path) -> None:
    text, _ = REFUSED["a division by what may be zero"]

    hints = read_hints([], ["x=9"], ["x=1"])

    found = tried(tmp_path, text, hints)
    toml = model_file("model", "model.onnx", found, hints)
    (tmp_path / "model.toml").write_text(toml, encoding="utf-8")
    runner = ModelRunner.load(load_model(tmp_path), threads=1)

    assert found.batches
    assert runner.max_rows == found.max_batch_size
