"""A model whose answers to rows of zeros and ones the number of rows in a run moves, as rounding
does in real ones: what `fleet add` says of it.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from workers.adding.found import Found
from workers.adding.graph import read_graph
from workers.adding.model_file import model_file
from workers.adding.trial import try_model

#: Rows of zeros and ones are answered with more the more of them there are in a run.
MOVED = """
    <ir_version: 8, opset_import: ["" : 17]> g (int64[n, 4] x) => (float[n, 4] y) {{
        two = Constant<value_int = 2>()
        share = Constant<value_float = {share}>()
        numbers = Cast<to = 1>(x)
        most = ReduceMax<axes = [1]>(x)
        low = Less(most, two)
        few = Cast<to = 1>(low)
        shape = Shape<start = 0, end = 1>(x)
        count = Cast<to = 1>(shape)
        part = Mul(count, share)
        more = Mul(part, few)
        moved = Mul(numbers, more)
        y = Add(numbers, moved)
    }}
"""


def tried(folder: Path, *, share: float) -> Found:
    file = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(MOVED.format(share=share)), file)
    return try_model(read_graph(file), "model", {}, threads=1)


def test_answers_that_the_number_of_rows_moves_a_little_are_given_the_tolerance_for_it(
    tmp_path: Path,
) -> None:
    found = tried(tmp_path, share=0.0037)

    assert (found.batches, found.wider) == (True, ("x",))
    assert found.tolerance == pytest.approx(0.004)
    assert "\ntolerance = 0.004\n" in model_file("model", "model.onnx", found, {})


def test_answers_that_it_moves_further_are_given_one_row_at_a_time(tmp_path: Path) -> None:
    found = tried(tmp_path, share=0.2)

    assert (found.batches, found.wider) == (False, ())
    assert "though no row changes another's" in found.why
