"""What padding does to one layer of each kind, and whether the proof at load sees it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from workers.models import load_model
from workers.runner import ModelRunner

#: Numbers for the layers that have weights.
_RNG: Final = np.random.default_rng(4)
WEIGHTS: Final = {
    name: _RNG.normal(0, 0.5, shape).astype(np.float32)
    for name, shape in {
        "square": (3, 3),
        "taps": (3, 3, 3),
        "far_taps": (3, 3, 3),
        "gates": (1, 16, 3),
        "recurrent": (1, 16, 4),
        "both_gates": (2, 16, 3),
        "both_recurrent": (2, 16, 4),
        "both_biases": (2, 32),
        "words": (10, 3),
        "gru": (1, 12, 3),
        "gru_recurrent": (1, 12, 4),
    }.items()
}

STEPS: Final = "float[n, t, 3] x"
EACH: Final = "float[n, t, 3] y"
ONE: Final = "float[n, 3] y"

MASKED: Final = """
    no = Constant<value_float = 0.0>()
    one = Constant<value_ints = [1]>()
    last = Constant<value_ints = [2]>()
    far = Constant<value_float = -1e9>()
"""


class Kind(NamedTuple):
    """A graph with the free axis ``t``, a padding for it, and whether that changes nothing."""

    body: str
    same: bool
    value: float | str = 0
    inputs: str = STEPS
    outputs: str = ONE
    more: str = ""


KINDS: Final = {
    "the largest, of zeros": Kind("y = ReduceMax<axes = [1], keepdims = 0>(x)", same=False),
    "the largest, of a number below most": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)", same=False, value=-5
    ),
    "the largest, of a number far below": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)", same=False, value="-1e9"
    ),
    "the largest, of the least there is": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)", same=True, value="-inf"
    ),
    "the largest of numbers that nobody sends below": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)", same=True, value=0, more="probe_min = 0"
    ),
    "the least, of a number above most": Kind(
        "y = ReduceMin<axes = [1], keepdims = 0>(x)", same=False, value=5
    ),
    "the largest above zero": Kind(
        "p = Relu(x) y = ReduceMax<axes = [1], keepdims = 0>(p)", same=True
    ),
    "the mean": Kind("y = ReduceMean<axes = [1], keepdims = 0>(x)", same=False),
    "the length": Kind("y = ReduceL2<axes = [1], keepdims = 0>(x)", same=True),
    "the product of ones": Kind("y = ReduceProd<axes = [1], keepdims = 0>(x)", same=True, value=1),
    "the logarithm of a sum": Kind(
        "y = ReduceLogSumExp<axes = [1], keepdims = 0>(x)", same=False, value=-30
    ),
    "softmax over the steps": Kind("y = Softmax<axis = 1>(x)", same=False, outputs=EACH),
    "softmax over the steps, far below": Kind(
        "y = Softmax<axis = 1>(x)", same=False, value=-30, outputs=EACH
    ),
    "softmax within a step": Kind("y = Softmax<axis = 2>(x)", same=True, outputs=EACH),
    "normalised over the steps": Kind(
        "m = ReduceMean<axes = [1]>(x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<axes = [1]>(s) "
        "e = Constant<value_float = 1e-5>() w = Add(v, e) r = Sqrt(w) y = Div(d, r)",
        same=False,
        outputs=EACH,
    ),
    "normalised within a step": Kind(
        "g = Constant<value_floats = [1.0, 2.0, 3.0]>() y = LayerNormalization(x, g)",
        same=True,
        outputs=EACH,
    ),
    "where the largest is": Kind(
        "y = ArgMax<axis = 1, keepdims = 0>(x)", same=False, outputs="int64[n, 3] y", value=-5
    ),
    "the sum so far": Kind(
        "a = Constant<value_int = 1>() y = CumSum(x, a)", same=True, outputs=EACH
    ),
    "the sum from here on": Kind(
        "a = Constant<value_int = 1>() y = CumSum<reverse = 1>(x, a)",
        same=False,
        outputs=EACH,
        value=1,
    ),
    "the last step": Kind("a = Constant<value_int = -1>() y = Gather<axis = 1>(x, a)", same=False),
    "the best three": Kind(
        "k = Constant<value_ints = [3]>() y, i = TopK<axis = 1>(x, k)",
        same=False,
        value=-5,
        outputs="float[n, 3, 3] y",
    ),
    "the end of an LSTM": Kind(
        "s = Transpose<perm = [1, 0, 2]>(x) a, h = LSTM<hidden_size = 4>(s, gates, recurrent) "
        "z = Constant<value_ints = [0]>() y = Squeeze(h, z)",
        same=False,
        outputs="float[n, 4] y",
    ),
    "every step of an LSTM": Kind(
        "s = Transpose<perm = [1, 0, 2]>(x) a, h = LSTM<hidden_size = 4>(s, gates, recurrent) "
        "z = Constant<value_ints = [1]>() o = Squeeze(a, z) y = Transpose<perm = [1, 0, 2]>(o)",
        same=True,
        outputs="float[n, t, 4] y",
    ),
    "every step of an LSTM that reads both ways": Kind(
        "s = Transpose<perm = [1, 0, 2]>(x) "
        'a, h = LSTM<hidden_size = 4, direction = "bidirectional">'
        "(s, both_gates, both_recurrent, both_biases) "
        "o = Transpose<perm = [2, 0, 1, 3]>(a) k = Constant<value_ints = [0, 0, 8]>() "
        "y = Reshape(o, k)",
        same=False,
        outputs="float[n, t, 8] y",
    ),
    "one convolution, that takes zeros beyond the end": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) v = Conv<pads = [1, 1]>(c, taps) "
        "y = Transpose<perm = [0, 2, 1]>(v)",
        same=True,
        outputs=EACH,
    ),
    "two convolutions": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) v = Conv<pads = [1, 1]>(c, taps) "
        "w = Conv<pads = [1, 1]>(v, taps) y = Transpose<perm = [0, 2, 1]>(w)",
        same=False,
        outputs=EACH,
    ),
    "a convolution that repeats the end": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) k = Constant<value_ints = [0, 0, 1, 0, 0, 1]>() "
        'd = Pad<mode = "edge">(c, k) v = Conv(d, taps) y = Transpose<perm = [0, 2, 1]>(v)',
        same=False,
        outputs=EACH,
    ),
    "two convolutions that look back alone": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) v = Conv<pads = [2, 0]>(c, taps) r = Relu(v) "
        "w = Conv<pads = [2, 0]>(r, taps) y = Transpose<perm = [0, 2, 1]>(w)",
        same=True,
        outputs=EACH,
    ),
    "a mean of what is not zero": Kind(
        MASKED + "q = Equal(x, no) k = Not(q) m = Cast<to = 1>(k) s = ReduceSum<keepdims = 0>"
        "(x, one) c = ReduceSum<keepdims = 0>(m, one) y = Div(s, c)",
        same=True,
    ),
    "attention to what is above zero": Kind(
        MASKED + "k = Greater(x, no) l = Where(k, x, far) a = Softmax<axis = 1>(l) p = Mul(a, x) "
        "y = ReduceSum<keepdims = 0>(p, one)",
        same=False,
    ),
    "attention to what is above zero, where all is": Kind(
        MASKED + "k = Greater(x, no) l = Where(k, x, far) a = Softmax<axis = 1>(l) p = Mul(a, x) "
        "y = ReduceSum<keepdims = 0>(p, one)",
        same=True,
        more="probe_min = 0.001",
    ),
    "attention of each step to all": Kind(
        "q = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, q) a = Softmax<axis = 2>(s) "
        "y = MatMul(a, x)",
        same=False,
        outputs=EACH,
    ),
    "whether all is above four": Kind(
        "l = Constant<value_float = 4.0>() k = Greater(x, l) m = Cast<to = 1>(k) "
        "y = ReduceMin<axes = [1], keepdims = 0>(m)",
        same=False,
    ),
    "words by number, the largest": Kind(
        "e = Gather(words, x) y = ReduceMax<axes = [1], keepdims = 0>(e)",
        same=False,
        inputs="int64[n, t] x",
    ),
    "the largest number of a word": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)",
        same=False,
        value=1,
        inputs="int64[n, t] x",
        outputs="int64[n] y",
    ),
    "the largest sample": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)",
        same=False,
        inputs="int8[n, t] x",
        outputs="int8[n] y",
    ),
    "convolutions that reach five steps on": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) v = Conv<pads = [5, 5], dilations = [5]>(c, taps) "
        "w = Conv<pads = [5, 5], dilations = [5]>(v, taps) y = Transpose<perm = [0, 2, 1]>(w)",
        same=False,
        outputs=EACH,
    ),
    "the largest after a convolution": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) v = Conv<pads = [1, 1]>(c, taps) "
        "y = ReduceMax<axes = [2], keepdims = 0>(v)",
        same=False,
    ),
    "normalised over each instance": Kind(
        "c = Transpose<perm = [0, 2, 1]>(x) g = Constant<value_floats = [1.0, 2.0, 3.0]>() "
        "i = InstanceNormalization(c, g, g) y = Transpose<perm = [0, 2, 1]>(i)",
        same=False,
        outputs=EACH,
    ),
    "the end of a GRU": Kind(
        "s = Transpose<perm = [1, 0, 2]>(x) a, h = GRU<hidden_size = 4>(s, gru, gru_recurrent) "
        "z = Constant<value_ints = [0]>() y = Squeeze(h, z)",
        same=False,
        outputs="float[n, 4] y",
    ),
    "divided by the number of steps": Kind(
        "c = Shape<start = 1, end = 2>(x) f = Cast<to = 1>(c) y = Div(x, f)",
        same=False,
        outputs=EACH,
    ),
    "numbered from the end": Kind(
        "c = Shape<start = 1, end = 2>(x) i = Constant<value_ints = [1]>() l = Squeeze(c) "
        "z = Constant<value_int = 0>() o = Constant<value_int = 1>() r = Range(z, l, o) "
        "d = Sub(c, r) f = Cast<to = 1>(d) u = Unsqueeze(f, i) y = Add(x, u)",
        same=False,
        outputs=EACH,
    ),
    "numbered from the start": Kind(
        "c = Shape<start = 1, end = 2>(x) i = Constant<value_ints = [1]>() l = Squeeze(c) "
        "z = Constant<value_int = 0>() o = Constant<value_int = 1>() r = Range(z, l, o) "
        "f = Cast<to = 1>(r) u = Unsqueeze(f, i) y = Add(x, u)",
        same=True,
        outputs=EACH,
    ),
    "an answer that is always the same": Kind(
        "z = Constant<value_float = 0.0>() o = Mul(x, z) "
        "y = ReduceMean<axes = [1], keepdims = 0>(o)",
        same=False,
    ),
    "halves": Kind(
        "y = ReduceMax<axes = [1], keepdims = 0>(x)",
        same=False,
        value=-6e4,
        inputs="float16[n, t, 3] x",
        outputs="float16[n, 3] y",
    ),
}


def write(kind: Kind, folder: Path) -> None:
    used = {name: array for name, array in WEIGHTS.items() if re.search(rf"\b{name}\b", kind.body)}
    text = f"g ({kind.inputs}) => ({kind.outputs}) {{ {kind.body} }}"
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in used.items())
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "model.toml").write_text(
        f'[engines]\nfp32 = "model.onnx"\n[inputs.x]\n{kind.more}\n'
        f"pad = {{ axis = 1, value = {kind.value}, to = [4, 8, 16, 32] }}\n"
    )


def loaded(kind: Kind, folder: Path) -> ModelRunner:
    write(kind, folder)
    return ModelRunner.load(load_model(folder), threads=1)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_layer_is_padded_only_where_that_changes_no_answer(kind: Kind, tmp_path: Path) -> None:
    runner = loaded(kind, tmp_path)

    assert (runner.describe()["padding"] != {}) is kind.same, runner.why


#: Of these, any numbers may be sent.
ANY = {
    name: kind
    for name, kind in KINDS.items()
    if kind.same and not kind.more and kind.inputs == STEPS
}


@pytest.mark.parametrize("kind", ANY.values(), ids=ANY)
def test_what_is_padded_answers_rows_of_any_numbers_as_alone(kind: Kind, tmp_path: Path) -> None:
    runner = loaded(kind, tmp_path)
    rng = np.random.default_rng(8)
    rows = [rng.normal(0, 30, (1, steps, 3)).astype(np.float32) for steps in (1, 3, 4, 2)]

    outcomes = runner.run([runner.prepare({"x": row}) for row in rows])

    alone = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    assert [outcome.batch_size for outcome in outcomes] == [4] * 4
    for row, outcome in zip(rows, outcomes, strict=True):
        (expected,) = alone.run(["y"], {"x": row})
        assert outcome.outputs is not None
        np.testing.assert_allclose(outcome.outputs["y"], expected, rtol=1e-4, atol=1e-5)


def test_the_numbers_that_padding_changes_answers_to_are_named_with_what_rules_them_out(
    tmp_path: Path,
) -> None:
    runner = loaded(KINDS["the largest, of a number below most"], tmp_path)

    assert runner.why == (
        "no padding: padding changes answers: output 'y' changes by more than 0.001 of its largest "
        "value, with 'x' from -6 to -5; where jobs send no such numbers, give probe_min and "
        "probe_max there"
    )


def test_the_proof_of_a_small_model_takes_less_than_a_second(tmp_path: Path) -> None:
    kind = KINDS["every step of an LSTM"]
    loaded(kind, tmp_path).close()

    assert loaded(kind, tmp_path).describe()["load_s"] < 1
