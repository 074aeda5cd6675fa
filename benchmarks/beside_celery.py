"""The fleet beside plain Celery: the same server, ONNX file and rows, one process for the model.

Jobs per second from the first `delay()` to the last answer, and microseconds of CPU that a job
costs in each process. One command: ``python -m benchmarks.beside_celery``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import celery
import redis

from benchmarks import processes, report, sides, workload
from benchmarks.sides import Side
from benchmarks.workload import Workload
from workers import children
from workers.up.embedded import Server, embedded_server

#: Events of the last jobs and the like are sent after the last answer; they belong to the run.
_AFTERMATH_S: Final = 0.3
_WARM_UP_JOBS: Final = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed round of one side."""

    side: str
    way: str
    jobs_per_s: float
    #: Microseconds of CPU of a job, by what they were spent in.
    cpu_us: dict[str, float]
    #: Jobs per run of the engine; None where the answers do not say.
    mean_batch: float | None
    #: Cores that strangers kept busy meanwhile: what a noisy round looks like.
    others_cores: float


def main() -> int:
    options = _options()
    try:
        with children.ended_by_signals():
            facts, runs = _measured(options)
    except children.Ended as ended:
        return 128 + ended.signum
    if options.json:
        print(json.dumps({**facts, "runs": [dataclasses.asdict(run) for run in runs]}))
    else:
        report.print_tables(runs)
    return 0


def _measured(options: argparse.Namespace) -> tuple[dict[str, Any], list[Run]]:
    """Start everything, take turns, and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder = Path(name)
        load = workload.make(folder, jobs=options.jobs)
        with embedded_server() as server, _running(server, load, folder) as running:
            facts = _facts(server, options.jobs, options.rounds)
            if not options.json:
                report.print_head(facts)
            return facts, _rounds(running, load, server, options.rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside_celery",
        description="Jobs per second and CPU per job of the fleet beside plain Celery.",
    )
    parser.add_argument("--jobs", type=_at_least_1, default=2000, help="jobs of a run (2000)")
    parser.add_argument("--rounds", type=_at_least_1, default=3, help="runs of each side (3)")
    parser.add_argument("--json", action="store_true", help="print every run as one JSON object")
    return parser.parse_args()


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


@contextlib.contextmanager
def _running(server: Server, load: Workload, folder: Path) -> Iterator[list[Side]]:
    """Run all workers; gives the sides in the order in which they take turns."""
    with (
        sides.plain(server, load, database=1, folder=folder) as (plain_get, plain_together),
        sides.fleet(server, load, database=2, folder=folder, events=False) as (quiet, _),
        sides.fleet(server, load, database=3, folder=folder, events=True) as (usual, usual_get),
    ):
        yield [plain_get, quiet, plain_together, usual, usual_get]


def _rounds(running: Sequence[Side], load: Workload, server: Server, rounds: int) -> list[Run]:
    few = dataclasses.replace(
        load,
        rows=load.rows[:_WARM_UP_JOBS],
        lists=load.lists[:_WARM_UP_JOBS],
        expected=load.expected[:_WARM_UP_JOBS],
    )
    for side in running:
        _run(side, few, server)
    return [_run(side, load, server) for _ in range(rounds) for side in running]


def _run(side: Side, load: Workload, server: Server) -> Run:
    """Send every row, collect every answer, and count what that took."""
    _rewrite_append_only_file(server)
    gc.collect()
    pids = {"parent": side.parent, "instance": side.instance, "Redis": server.process.pid}
    before = {role: processes.cpu_s(pid) for role, pid in pids.items()}
    busy_s = processes.machine_cpu_s()
    marks = [(time.perf_counter(), time.process_time())]
    results = side.publish(load)
    marks.append((time.perf_counter(), time.process_time()))
    collected = side.collect(results)
    marks.append((time.perf_counter(), time.process_time()))
    time.sleep(_AFTERMATH_S)
    busy_s = processes.machine_cpu_s() - busy_s
    watched_s = time.perf_counter() - marks[0][0]
    after = {role: processes.cpu_s(pid) for role, pid in pids.items()}
    load.check(collected.answers)
    (began_s, cpu_0), (_, cpu_1), (ended_s, cpu_2) = marks
    spent_s = {
        report.PUBLISH: cpu_1 - cpu_0,
        **{role: after[role] - before[role] for role in pids},
        report.COLLECT: cpu_2 - cpu_1,
    }
    jobs = len(load.rows)
    sizes = collected.batch_sizes
    others_s = max(0.0, busy_s - sum(spent_s.values()))
    return Run(
        side=side.name,
        way=side.way,
        jobs_per_s=jobs / (ended_s - began_s),
        cpu_us={role: seconds / jobs * 1e6 for role, seconds in spent_s.items()},
        mean_batch=jobs / sum(1 / size for size in sizes) if sizes else None,
        others_cores=others_s / watched_s,
    )


def _rewrite_append_only_file(server: Server) -> None:
    """Let no run pay for rewriting what an earlier one has left in the file."""
    with redis.Redis.from_url(server.url) as client:
        client.bgrewriteaof()
        while client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.05)


def _facts(server: Server, jobs: int, rounds: int) -> dict[str, Any]:
    """Return what somebody needs to know to compare these numbers with others."""
    with redis.Redis.from_url(server.url) as client:
        info = client.info("server")
    return {
        "jobs": jobs,
        "rounds": rounds,
        "row_bytes": workload.ROW_BYTES,
        "model": workload.ABOUT,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "celery": celery.__version__,
        "server": f"{info.get('server_name', 'redis')} "
        f"{info.get('valkey_version', info['redis_version'])}",
    }


if __name__ == "__main__":
    sys.exit(main())
