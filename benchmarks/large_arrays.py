"""Arrays of megabytes: jobs a second beside one client's SET and GET of the same bytes, and whether
the worker's parent stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks import processes, sides
from producer.client import Client
from producer.contract.settings import Settings, redis_client
from workers.engines.base import Engine
from workers.models import ModelSpec, TensorSpec
from workers.up import local
from workers.up.embedded import embedded_server

MODEL: Final = "bytes"
_MIB: Final = 1 << 20
_WITHIN_S: Final = 120.0
_END_WITHIN_S: Final = 20.0

_MODEL_FILE: Final = """\
runtime = "benchmarks.large_arrays:FirstAndLast"
max_batch_size = 32
ladder = []

[options]
row_bytes = {row_bytes}
large_replies = {large_replies}
"""


class FirstAndLast(Engine):
    """Answers each row with its first and last byte, or with the row itself."""

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        self._large = bool(spec.options["large_replies"])
        size = int(str(spec.options["row_bytes"]))
        self.inputs = (TensorSpec(name="x", dtype="uint8", shape=(None, size), batch_axis=0),)
        width = size if self._large else 2
        self.outputs = (TensorSpec(name="y", dtype="uint8", shape=(None, width), batch_axis=0),)
        self.runtime = "first-and-last"

    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        rows = feeds["x"]
        return {"y": rows.copy() if self._large else np.ascontiguousarray(rows[:, [0, -1]])}

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def answered_per_s(client: Client, rows: list[npt.NDArray[np.uint8]]) -> float:
    """Send a job for each of ``rows`` and check every reply; returns jobs a second."""
    began_s = time.perf_counter()
    jobs = client.submit_many(MODEL, ({"x": row} for row in rows))
    row_of = {job.id: row for job, row in zip(jobs, rows, strict=True)}
    for job in client.as_completed(jobs, timeout_s=_WITHIN_S):
        got, row = job.reply(timeout_s=0).outputs["y"], row_of.pop(job.id)
        if (got[0, 0], got[0, -1]) != (row[0, 0], row[0, -1]):
            raise ValueError("an answer is another row's")
    return len(rows) / (time.perf_counter() - began_s)


def set_and_get_per_s(url: str, rows: list[npt.NDArray[np.uint8]]) -> float:
    """SET and GET the same bytes, one after the other, with one client; returns pairs a second."""
    client = redis_client(url)
    packed = [row.tobytes() for row in rows]
    began_s = time.perf_counter()
    for data in packed:
        client.set("benchmark:bytes", data)
        if client.get("benchmark:bytes") != data:
            raise ValueError("what was read is not what was written")
    took_s = time.perf_counter() - began_s
    client.delete("benchmark:bytes")
    client.close()
    return len(rows) / took_s


def measure(*, mib: int, large_replies: bool, jobs: int, rounds: int) -> None:
    """Print what a worker and one client do with arrays of ``mib`` MiB."""
    rng = np.random.default_rng(6)
    rows = [rng.integers(0, 256, (1, mib * _MIB), dtype=np.uint8) for _ in range(jobs)]
    with tempfile.TemporaryDirectory(prefix="fleet-large-") as name, embedded_server() as server:
        folder = Path(name)
        model = folder / "models" / MODEL
        model.mkdir(parents=True)
        values = {"row_bytes": mib * _MIB, "large_replies": str(large_replies).lower()}
        (model / "model.toml").write_text(_MODEL_FILE.format(**values))
        environ = {
            **sides.clean_environ(),
            "FLEET_BROKER_URL": server.url,
            "FLEET_CONFIG": name,
            "FLEET_INSTANCES": "1",
        }
        settings = Settings.from_env(environ)
        broker = local.Broker(settings=settings, environ=environ, server=server)
        with (
            local.worker(broker, grace_s=_END_WITHIN_S, output=folder / "log") as worker,
            Client(settings) as client,
        ):
            local.wait_until_ready(broker, worker, tell=lambda _: None, within_s=_WITHIN_S)
            answered_per_s(client, rows[:4])
            before_kib = processes.resident_kib(worker.process.pid)
            pairs = []
            for _ in range(rounds):
                alone = set_and_get_per_s(server.url, rows)
                pairs.append((answered_per_s(client, rows), alone))
            after_kib = processes.resident_kib(worker.process.pid)
    ratio = statistics.median(answered / alone for answered, alone in pairs)
    report = {
        "mib_in": mib,
        "mib_out": mib if large_replies else 0,
        "jobs": jobs,
        "jobs_per_s": [round(answered, 1) for answered, _ in pairs],
        "set_and_get_per_s": [round(alone, 1) for _, alone in pairs],
        "ratio": round(ratio, 2),
        "parent_kib": [before_kib, after_kib],
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each; the median counts")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of 1 MiB; a tenth of 20 MiB")
    options = parser.parse_args()
    for mib, large_replies in ((1, False), (1, True), (20, False), (20, True)):
        jobs = options.jobs if mib == 1 else max(4, options.jobs // 10)
        measure(mib=mib, large_replies=large_replies, jobs=jobs, rounds=options.rounds)


if __name__ == "__main__":
    main()
