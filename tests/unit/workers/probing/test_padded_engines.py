"""Engines of one's own, padded: what a runtime's own models show only by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from producer.contract.errors import BadRequest
from workers.models import load_model
from workers.runner import ModelRunner

PAD: Final = "pad = { axis = 1, value = 0, to = [4, 8, 16] }"

SUMS = """
import numpy as np
from workers.engines.base import Engine
from workers.models import TensorSpec

class Sums(Engine):
    runtime = "sums 1"
    inputs = (TensorSpec(name="x", dtype="float32", shape=(None, None), batch_axis=0),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(None, None), batch_axis=0),)

    def __init__(self, spec, precision, *, threads):
        pass

    def run(self, feeds):
        if feeds["x"].size > 64:
            raise MemoryError("too much")
        return {"y": 2 * feeds["x"]}

    def close(self):
        pass
"""


BY_LONGEST = """
import numpy as np
from workers.engines.base import Engine
from workers.models import TensorSpec

class ByLongest(Engine):
    runtime = "by the longest 1"
    inputs = (TensorSpec(name="x", dtype="float32", shape=(None, None), batch_axis=0),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(None,), batch_axis=0),)

    def __init__(self, spec, precision, *, threads):
        pass

    def run(self, feeds):
        x = feeds["x"]
        return {"y": x.sum(axis=1) / (x != 0).sum(axis=1).max()}

    def close(self):
        pass
"""


LONG_MASKS = """
from workers.engines.base import Engine
from workers.models import TensorSpec

class LongMasks(Engine):
    runtime = "long masks 1"
    inputs = tuple(
        TensorSpec(name=name, dtype="float32", shape=(None, None), batch_axis=0)
        for name in ("x", "mask")
    )
    outputs = (TensorSpec(name="y", dtype="float32", shape=(None,), batch_axis=0),)

    def __init__(self, spec, precision, *, threads):
        pass

    def run(self, feeds):
        x, mask = feeds["x"], feeds["mask"]
        return {"y": (x * mask[:, : x.shape[1]]).sum(axis=1)}

    def close(self):
        pass
"""


def test_a_mask_that_may_be_longer_and_not_shorter_has_no_length_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LONG_MASKS)
    pads = f"[inputs.x]\n{PAD}\n[inputs.mask]\n{PAD}\n"
    (tmp_path / "model.toml").write_text(f'runtime = "own:LongMasks"\n{pads}')

    runner = ModelRunner.load(load_model(tmp_path), threads=1)

    assert runner.why == ""
    with pytest.raises(BadRequest, match="must be equally long: x 3, mask 4"):
        runner.prepare({"x": np.ones((1, 3), np.float32), "mask": np.ones((1, 4), np.float32)})


def test_rows_that_only_a_longer_row_beside_them_changes_are_not_padded(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BY_LONGEST)
    (tmp_path / "model.toml").write_text(f'runtime = "own:ByLongest"\n[inputs.x]\n{PAD}\n')

    runner = ModelRunner.load(load_model(tmp_path), threads=1)

    assert runner.max_rows == 32
    assert "no padding: padding changes answers: output 'y' changes" in runner.why


def test_what_fits_in_memory_is_known_by_the_padded_shape(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SUMS)
    (tmp_path / "model.toml").write_text(f'runtime = "own:Sums"\n[inputs.x]\n{PAD}\n')
    runner = ModelRunner.load(load_model(tmp_path), threads=1)
    jobs = [{"x": np.full((1, n), n, np.float32)} for n in (9, 13, 3, 16, 11, 2, 14, 10)]

    first, then = (runner.run([runner.prepare(job) for job in jobs]) for _ in range(2))

    for outcomes in (first, then):
        for job, outcome in zip(jobs, outcomes, strict=True):
            np.testing.assert_array_equal(outcome.outputs["y"], 2 * job["x"])
    assert [outcome.out_of_memory for outcome in first] == [1, 1, 0, 1, 1, 0, 1, 1]
    assert {outcome.out_of_memory for outcome in then} == {0}
    assert runner.ceilings.lowest() == {"fp32": 3}


def test_the_largest_batch_is_looked_for_in_the_padded_shape(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SUMS)
    pad = "pad = { axis = 1, value = 0, to = [4, 8, 20] }"
    (tmp_path / "model.toml").write_text(
        f'runtime = "own:Sums"\nfind_ceiling = true\n[inputs.x]\n{pad}\n'
    )
    runner = ModelRunner.load(load_model(tmp_path), threads=1)

    runner.find_ceilings()
    outcomes = runner.run([runner.prepare({"x": np.ones((1, n), np.float32)}) for n in (9, 12, 20)])
    more = runner.run([runner.prepare({"x": np.ones((4, 11), np.float32)})])

    assert runner.ceilings.lowest() == {"fp32": 3}
    assert [(o.batch_size, o.out_of_memory) for o in (*outcomes, *more)] == [(3, 0)] * 4
