"""Five hundred sentences of every length through a worker, as text."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.noting import runs
from tests.support.real_models import sentence_embeddings
from tests.support.sentences import sentences_config, stretches, tokenizer
from tests.support.servers import TestServer
from tests.support.worker import running_worker
from workers.build.graph import prepared, read_source
from workers.models import load_model
from workers.runner import ModelRunner

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

COUNT = 500
MOST_ELEMENTS = 4096


def alone(texts: list[str]) -> list[npt.NDArray[Any]]:
    """Return the vector of each sentence, run by itself and without any of our code."""
    session = onnxruntime.InferenceSession(
        str(sentence_embeddings()), providers=["CPUExecutionProvider"]
    )
    encode, found = tokenizer().encode, []
    for text in texts:
        ids = np.array([encode(text).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (hidden,) = session.run(None, {**feeds, "token_type_ids": np.zeros_like(ids)})
        mean = hidden[0].mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return found


def test_sentences_of_every_length_share_runs_and_are_answered_as_alone(
    server: TestServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    texts = stretches(COUNT, least=3, most=100, seed=1)
    encode = tokenizer().encode
    lengths = [len(encode(text).ids) for text in texts]
    assert (min(lengths), max(lengths)) == (3, 100)

    with running_worker(server, sentences_config(tmp_path, log=log)):
        before, began_s = len(runs(log)), time.monotonic()
        with Client(Settings(broker_url=server.url)) as fleet:
            jobs = fleet.submit_many("sentences", ({"text": text} for text in texts))
            replies = [job.reply(200) for job in jobs]
        took_s = time.monotonic() - began_s

    shapes = [run["input_ids"] for run in runs(log)[before:]]
    mean_batch = sum(rows for rows, _ in shapes) / len(shapes)
    found = np.stack([reply.outputs["vector"] for reply in replies])
    expected = np.stack(alone(texts))
    largest = np.abs(found - expected).max()
    apart = np.abs(found[1:] - expected[:-1]).max(axis=1).min()
    real, padded = sum(lengths), sum(rows * length for rows, length in shapes)
    print(f"{COUNT} sentences in {took_s:.1f} s, {len(shapes)} runs, mean batch {mean_batch:.1f}")
    print(f"largest run {max(r * n for r, n in shapes)} elements; {1 - real / padded:.0%} padding")
    print(f"largest difference {largest:.1e}, of neighbours at least {apart:.1e}")
    print(dict(collections.Counter(shapes)))
    assert sum(rows for rows, _ in shapes) == COUNT
    assert mean_batch >= 16
    assert max(rows * length for rows, length in shapes) <= MOST_ELEMENTS
    assert largest < 1e-4 < apart


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_same_model_in_dynamic_int8_is_neither_batched_nor_padded(
    tmp_path: Path, precision: str
) -> None:
    folder = sentences_config(tmp_path) / "models" / "sentences"
    onnx.save(prepared(read_source(folder / "model.onnx")), folder / "plain.onnx")
    quantize_dynamic(folder / "plain.onnx", folder / "model.onnx", weight_type=QuantType.QUInt8)
    toml = (folder / "model.toml").read_text().replace("fp32", precision)
    (folder / "model.toml").write_text(toml)

    runner = ModelRunner.load(load_model(folder), threads=1)

    print(runner.why)
    assert runner.max_rows == 1
    assert runner.describe()["padding"] == {}
    assert "rows influence each other" in runner.why
    assert "no padding: padding changes answers" in runner.why
