"""examples/sentences: its model's folder as it is, on a real worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.errors import BadRequest
from tests.support.sentences import EXAMPLE, sentences_config
from tests.support.servers import TestServer
from tests.support.worker import ROOT, running_worker

pytest.importorskip("tokenizers")

TEXT = """Workers take jobs from a queue. A batch that runs out of memory is tried again in a
smaller one. The cat lies in the sun and sleeps all day. Each job is answered once, whatever dies.
"""


def test_a_question_finds_the_sentence_that_answers_it(
    server: TestServer, fleet: Client, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    question = "What happens when there is too little memory?"
    command = [sys.executable, str(EXAMPLE / "run.py"), question, str(tmp_path / "text")]
    environ = {"FLEET_BROKER_URL": server.url, "PYTHONPATH": str(ROOT)}

    with running_worker(server, sentences_config(tmp_path)):
        printed = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=50, check=True
        ).stdout
        reply = fleet.submit("sentences", {"text": question}).reply(20)
        with pytest.raises(BadRequest, match="send one sentence"):
            fleet.submit("sentences", {"text": [question]}).reply(20)

    best, *_, total = printed.splitlines()
    assert "out of memory" in best
    assert total.startswith("5 sentences, ")
    assert reply.outputs["vector"].shape == (384,)
