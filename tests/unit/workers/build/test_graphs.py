"""What a build does to a graph: each conversion computes what the original does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests import onnx_models
from tests.support.building import built, model_folder
from workers.build import graph, quantize
from workers.build.free_batch import with_free_batch
from workers.build.half import beyond, halved
from workers.build.store import variants_folder
from workers.models import load_model, load_source
from workers.runner import ModelRunner

Array = npt.NDArray[Any]

FLOAT = TensorProto.FLOAT
X: Array = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
W: Array = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Array],
    *,
    inputs: Sequence[str] = ("x",),
    opset: int = 17,
    rank: int = 2,
) -> onnx.ModelProto:
    """Return a model of [n, 4] float32 inputs and one output ``y`` of ``rank`` axes."""
    made = helper.make_graph(
        list(nodes),
        "made",
        [helper.make_tensor_value_info(name, FLOAT, ["n", 4]) for name in inputs],
        [helper.make_tensor_value_info("y", FLOAT, [f"y{axis}" for axis in range(rank)])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def answer(made: onnx.ModelProto, **feeds: Array) -> Array:
    """Return ``y``, computed without any optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: Array = session.run(["y"], feeds)[0]
    return found


def kinds_of(made: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in made.graph.node)


def stored_as_int8() -> onnx.ModelProto:
    """Return ``x @ (int8 weights * scale)``, which only a folded graph shows as a weight."""
    nodes = [
        helper.make_node("Cast", ["stored"], ["wide"], to=FLOAT),
        helper.make_node("Mul", ["wide", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    stored = np.rint(W * 40).astype(np.int8)
    return model(nodes, {"stored": stored, "scale": np.array(1 / 40, np.float32)})


def test_weights_behind_casts_are_folded_and_nodes_get_names() -> None:
    prepared = graph.prepared(stored_as_int8())

    assert kinds_of(prepared) == {"MatMul": 1}
    assert [tensor.name for tensor in prepared.graph.initializer] == ["w"]
    assert prepared.graph.node[0].name == "MatMul_0"
    assert np.array_equal(answer(prepared, x=X), answer(stored_as_int8(), x=X))


def test_unfolded_weights_are_not_quantised_and_folded_ones_are() -> None:
    ranges = {"x": 3.0}

    _, before = quantize.quantized(stored_as_int8(), ranges, "int8", keep=())
    _, after = quantize.quantized(graph.prepared(stored_as_int8()), ranges, "int8", keep=())

    assert (before, after) == ({}, {"MatMul": 1})


def test_what_differs_at_every_run_is_not_folded() -> None:
    nodes = [
        helper.make_node("RandomNormal", [], ["noise"], shape=[4, 3]),
        helper.make_node("MatMul", ["x", "noise"], ["y"]),
    ]

    assert kinds_of(graph.prepared(model(nodes, {}))) == {"RandomNormal": 1, "MatMul": 1}


def test_weights_that_an_old_exporter_lists_as_inputs_are_weights() -> None:
    made = stored_as_int8()
    made.graph.input.append(helper.make_tensor_value_info("scale", FLOAT, []))
    made.ir_version = 3

    prepared = graph.prepared(made)

    assert kinds_of(prepared) == {"MatMul": 1}
    assert [value.name for value in prepared.graph.input] == ["x"]
    assert prepared.ir_version == 4


def with_branch() -> onnx.ModelProto:
    """Return a model that reads the folded weight ``w`` from inside of a branch."""
    inside = [helper.make_node("MatMul", ["x", "w"], ["then"])]
    other = [helper.make_node("Neg", ["plain"], ["else"])]
    nodes = [
        helper.make_node("Mul", ["half", "two"], ["w"]),
        helper.make_node("MatMul", ["x", "half"], ["plain"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If",
            ["positive"],
            ["y"],
            then_branch=helper.make_graph(
                inside, "a", [], [helper.make_tensor_value_info("then", FLOAT, None)]
            ),
            else_branch=helper.make_graph(
                other, "b", [], [helper.make_tensor_value_info("else", FLOAT, None)]
            ),
        ),
    ]
    weights: dict[str, Array] = {
        "half": W / 2,
        "two": np.array(2, np.float32),
        "zero": np.array(0, np.float32),
    }
    return model(nodes, weights)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_branch_reads_survives_every_conversion(sign: int) -> None:
    rows = np.abs(X) * np.float32(sign)
    prepared = graph.prepared(with_branch())

    half, _ = halved(prepared, keep=())
    quantised, counts = quantize.quantized(prepared, {"x": 3.0}, "int8", keep=())

    expected = answer(with_branch(), x=rows)
    assert np.array_equal(answer(prepared, x=rows), expected)
    assert np.allclose(answer(half, x=rows), expected, atol=0.01)
    assert np.allclose(answer(quantised, x=rows), expected, atol=0.15)
    assert counts == {"MatMul": 1}


def everything() -> onnx.ModelProto:
    """Return one of each: a cast, a kept input of Resize, a mask, shapes, two outputs of a node."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="project"),
        helper.make_node("Greater", ["m", "zero"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["ones"], to=FLOAT, name="ones"),
        helper.make_node("Where", ["positive", "m", "lowest"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"], axis=1),
        helper.make_node("Mul", ["shares", "ones"], ["product"]),
        helper.make_node("TopK", ["product", "k"], ["largest", "which"], axis=1),
        helper.make_node("Cast", ["which"], ["places"], to=FLOAT),
        helper.make_node("Add", ["largest", "places"], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "first"], ["image"]),
        helper.make_node("Unsqueeze", ["image", "first"], ["images"]),
        helper.make_node(
            "Resize", ["images", "", "scales"], ["y"], mode="nearest", nearest_mode="floor"
        ),
    ]
    weights: dict[str, Array] = {
        "w": W,
        "zero": np.array(0, np.float32),
        "lowest": np.array(np.finfo(np.float32).min, np.float32),
        "k": np.array([2], np.int64),
        "first": np.array([0], np.int64),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    return model(nodes, weights, rank=4)


def test_fp16_knows_which_inputs_an_operator_takes_in_fp32_alone() -> None:
    prepared = graph.prepared(everything())

    half, counts = halved(prepared, keep=())

    onnx.checker.check_model(half, full_check=True)
    assert counts == {"MatMul": 1}
    assert np.allclose(answer(half, x=X), answer(prepared, x=X), atol=0.01)
    ends = (*half.graph.input, *half.graph.output)
    assert {value.type.tensor_type.elem_type for value in ends} == {FLOAT}


@pytest.mark.parametrize("keep", [["project"], ["ones"], ["project", "ones"]])
def test_kept_nodes_compute_in_fp32_between_others_in_fp16(keep: list[str]) -> None:
    prepared = graph.prepared(everything())

    half, counts = halved(prepared, keep=keep)

    onnx.checker.check_model(half, full_check=True)
    types = graph.kinds(half)
    kept = [node for node in half.graph.node if node.name in keep]
    assert [types[node.output[0]] for node in kept] == [FLOAT] * len(keep)
    assert counts == ({} if "project" in keep else {"MatMul": 1})
    assert np.allclose(answer(half, x=X), answer(prepared, x=X), atol=0.01)


def squares() -> onnx.ModelProto:
    """Return ``sqrt(x * x) @ w``: its middle exceeds fp16 where inputs and answers do not."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["squared"], name="square"),
        helper.make_node("Sqrt", ["squared"], ["rooted"], name="root"),
        helper.make_node("MatMul", ["rooted", "w"], ["y"], name="project"),
    ]
    return model(nodes, {"w": np.eye(4, 3, dtype=np.float32)})


def test_nodes_that_make_or_read_what_fp16_cannot_hold_stay_in_fp32() -> None:
    ranges = {"x": 300.0, "squared": 90_000.0, "rooted": 300.0, "y": 300.0}

    kept = beyond(squares(), ranges)
    half, counts = halved(squares(), keep=kept)

    assert kept == ["square", "root"]
    assert counts == {"MatMul": 1}
    # ONNX Runtime's CPU leaves out casts between fp16 nodes; the reference computes in fp16.
    rows = {"x": np.full((2, 4), 300, np.float32)}
    with np.errstate(all="ignore"):
        (without,) = ReferenceEvaluator(halved(squares(), keep=())[0]).run(None, rows)
    (found,) = ReferenceEvaluator(half).run(None, rows)
    assert not np.isfinite(without).any()
    assert np.allclose(found, 300)


def test_a_build_finds_values_beyond_fp16_on_rows_of_its_user(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path,
        lambda path: onnx.save(squares(), path),
        files={"rows.npz": {"x": np.full((4, 4), 300, np.float32)}},
    )

    (fp16,) = built(folder, "fp16", test=folder / "rows.npz")

    assert fp16.state == "built"
    assert list(fp16.manifest["report"]["kept_fp32"]) == ["square", "root"]
    assert "in fp32     square, root" in fp16.text


@pytest.mark.parametrize(("transposed", "axis"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_are_quantised_by_output_channel(
    precision: str, transposed: int, axis: int
) -> None:
    loud = W * np.array([1, 100, 0], np.float32)
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="g", transB=transposed)]
    weight = np.ascontiguousarray(loud.T if transposed else loud)
    made = model(nodes, {"w": weight, "b": np.ones(3, np.float32)})

    quantised, counts = quantize.quantized(made, {"x": float(np.abs(X).max())}, precision, keep=())

    onnx.checker.check_model(quantised, full_check=True)
    found = {tensor.name: tensor for tensor in quantised.graph.initializer}
    assert counts == {"Gemm": 1}
    assert list(found[f"w_axis{axis}_scale"].dims) == [3]
    assert "b" in found
    expected, got = answer(made, x=X), answer(quantised, x=X)
    error = np.abs(expected - got).max(axis=0) / np.abs(expected).max(axis=0)
    assert (error < (0.02 if precision == "int8" else 0.1)).all()


def test_a_tensor_and_a_weight_that_two_nodes_read_are_quantised_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="a"),
        helper.make_node("MatMul", ["x", "w"], ["b"], name="b"),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]

    quantised, counts = quantize.quantized(model(nodes, {"w": W}), {"x": 3.0}, "int8", keep=())

    assert counts == {"MatMul": 2}
    assert kinds_of(quantised)["QuantizeLinear"] == 1
    assert kinds_of(quantised)["DequantizeLinear"] == 2


def test_a_product_of_two_inputs_is_quantised_on_both_sides() -> None:
    nodes = [
        helper.make_node("Transpose", ["z"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"], name="m"),
    ]
    made = model(nodes, {}, inputs=("x", "z"))

    quantised, counts = quantize.quantized(made, {"x": 4.0, "turned": 4.0}, "int8", keep=())

    assert counts == {"MatMul": 1}
    assert np.allclose(answer(quantised, x=X, z=X), answer(made, x=X, z=X), atol=0.3)


@pytest.mark.parametrize(("precision", "least"), [("int8", 13), ("fp8", 19)])
def test_an_old_opset_is_raised_to_one_that_can_quantise(precision: str, least: int) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": W}, opset=11)

    quantised, _ = quantize.quantized(graph.prepared(made), {"x": 3.0}, precision, keep=())

    assert graph.standard_opset(quantised) == least
    onnx.checker.check_model(quantised, full_check=True)


def test_a_fixed_batch_becomes_free_and_workers_batch_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, lambda path: onnx_models.linear(path, rows=1))

    (fp32,) = built(folder, "fp32")
    (folder / "model.toml").write_text('[build]\nsource = "model.onnx"\n')
    runner = ModelRunner.load(load_model(folder), threads=1)

    assert fp32.manifest["report"]["max_rows"] == 32
    assert runner.max_rows == 32
    runner.close()


def test_a_larger_fixed_batch_is_freed_only_where_it_is_declared(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, lambda path: onnx_models.linear(path, rows=8))
    undeclared = with_free_batch(onnx.load(folder / "model.onnx"), load_source(folder))

    with (folder / "model.toml").open("a") as file:
        file.write("[inputs.x]\nbatch_axis = 0\n[outputs.y]\nbatch_axis = 0\n")
    (fp32,) = built(folder, "fp32")

    assert undeclared is None
    assert fp32.manifest["report"]["max_rows"] == 32
    assert fp32.manifest["report"]["outputs"]["y"]["max_abs"] < 1e-6


def test_a_batch_that_is_baked_into_the_graph_stays_fixed(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        onnx_models.baked_reshape(path)
        made = onnx.load(path)
        for value in (*made.graph.input, *made.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 1
        onnx.save(made, path)

    folder = model_folder(tmp_path, write)

    (fp32,) = built(folder, "fp32")

    assert fp32.manifest["report"]["max_rows"] == 1
    assert "takes exactly one row" in fp32.manifest["report"]["why"]


def test_weights_in_a_file_of_their_own_are_a_part_of_the_source(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        weights = {"w": np.ones((4, 600), np.float32)}
        made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights)
        onnx.save(made, path, save_as_external_data=True, location="weights.data")

    folder = model_folder(tmp_path, write)

    (fp16,) = built(folder, "fp16")
    (fp16_again,) = built(folder, "fp16")
    content = bytearray((folder / "weights.data").read_bytes())
    content[3] ^= 1
    (folder / "weights.data").write_bytes(content)
    (changed,) = built(folder, "fp16")

    assert set(fp16.manifest["source"]["files"]) == {"model.onnx", "weights.data"}
    assert [one.state for one in (fp16, fp16_again, changed)] == ["built", "unchanged", "built"]
    assert len(list(variants_folder(folder).glob("*.onnx"))) == 1
