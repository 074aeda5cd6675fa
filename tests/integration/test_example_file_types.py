"""examples/file_types: its script and its model's folder as they are, on a real worker."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.errors import BadRequest
from tests.support.commands import FLEET, run_command
from tests.support.examples import file_types_config, run_example
from tests.support.servers import TestServer
from tests.support.worker import ROOT, running_worker


def test_every_file_of_a_folder_gets_its_type(
    server: TestServer, fleet: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    code = (ROOT / "workers" / "loop" / "claimloop.py").read_bytes()
    (folder / "code").write_bytes(code)
    (folder / "deeper" / "image").write_bytes((ROOT / "docs" / "flower.png").read_bytes())
    (folder / "deeper" / "packed").write_bytes(gzip.compress(code))
    (folder / "empty").touch()

    with running_worker(server, file_types_config(tmp_path)):
        printed = run_example(server, "file_types/run.py", str(folder))
        reply = fleet.submit("file_types", {"content": code}).reply(20)
        models = run_command(*FLEET, "models", FLEET_BROKER_URL=server.url).stdout
        with pytest.raises(BadRequest, match="send the file's bytes"):
            fleet.submit("file_types", {"path": "/etc/passwd"}).reply(20)

    (*lines, _, total) = printed.splitlines()
    told = {line.split()[-1]: line.split()[0] for line in lines}
    assert told == {
        "code": "python",
        "deeper/image": "png",
        "deeper/packed": "gzip",
        "empty": "-",
    }
    assert re.search("so few bytes", printed)
    assert total.startswith("4 files: ")
    # The script sends the two ends of a large file; the whole of it is answered in the same way.
    assert reply.outputs["label"] == "python"
    assert f"{reply.outputs['score']:.4f}" in next(line for line in lines if " code" in line)
    assert re.search(r"file_types +1 of 1 .* fp32 +[0-9.]+ MB +8", models)
