"""`fleet add` on files that would keep it, or a person, waiting.

What it says of other awkward models is in tests/unit/workers/adding/test_awkward_models.py.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

from tests.support.adding import refused

#: Hours of it.
SLOW = """
    <ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) {
        many = Constant<value_int = 10000000000>()
        one = Constant<value_int = 1>()
        go = Cast<to = 9>(one)
        y = Loop(many, go, x) <
            body = b (int64 i, bool before, float[n, 4] v) => (bool after, float[n, 4] w) {
                after = Identity(before)
                w = Tanh(v)
            }
        >
    }
"""


def test_a_model_that_takes_longer_than_a_batch_may_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "fleet.toml").write_text("batch_timeout_s = 2\n", encoding="utf-8")
    onnx.save(onnx.parser.parse_model(SLOW), tmp_path / "slow.onnx")

    line = refused(config, tmp_path / "slow.onnx")

    assert "took more than 2 s" in line
    assert "batch_timeout_s in fleet.toml" in line
    assert [path.name for path in config.iterdir()] == ["fleet.toml"]
