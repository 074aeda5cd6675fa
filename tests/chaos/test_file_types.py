"""Three hundred real files through a worker, as raw bytes."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.examples import file_types_config
from tests.support.python_files import LABELS, python_files
from tests.support.servers import TestServer
from tests.support.worker import running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def test_files_of_the_python_installation_are_what_their_suffixes_say(
    server: TestServer, tmp_path: Path
) -> None:
    paths = python_files(300, seed=1)
    if len(paths) < 300:
        pytest.skip(f"this Python came with only {len(paths)} files of known types")

    with running_worker(server, file_types_config(tmp_path)) as worker:
        with Client(Settings(broker_url=server.url)) as fleet:
            jobs = fleet.submit_many("file_types", ({"content": p.read_bytes()} for p in paths))
            told = [job.reply(180).outputs["label"] for job in jobs]
        counters = worker.wait_counters("file_types", jobs=300)

    wrong = [
        (path, label)
        for path, label in zip(paths, told, strict=True)
        if label != LABELS[path.suffix]
    ]
    kinds = collections.Counter(path.suffix for path in paths)
    print(f"{300 - len(wrong)} of 300 right, {counters['batches']} batches; {dict(kinds)}")
    for path, label in wrong:
        print(f"  {label:<12} {path}")
    assert len(kinds) >= 6
    assert len(wrong) <= 9
