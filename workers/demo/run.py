"""The demo from start to end: three acts, and whether all that they promise held."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import ConfigError, FleetError
from producer.tasks import register
from workers import children
from workers.demo import acts, burst, show
from workers.demo.digits import MODEL, Digits, held_out
from workers.settings import WorkerSettings
from workers.up import local

#: A machine's own choice of instances may stand; every other setting is the demo's.
_KEPT: Final = frozenset({"FLEET_INSTANCES", "FLEET_THREADS"})

#: Weights and activations together (onnxruntime 1.32): the weights of both engines take 203,008
#: bytes, 16 rows in FP16 fit from about 410,000, 32 rows in FP32 from about 610,000.
MEMORY_LIMIT_BYTES: Final = 500_000
#: The runtime takes memory in pieces that double. With the usual first one of 1 MiB the digits
#: never need a second, and no limit would be felt.
MEMORY_FIRST_CHUNK_BYTES: Final = 4096

#: Instances that the third act's worker may grow to.
_MOST_INSTANCES: Final = 2

_LEAST_ACCURACY: Final = 0.98
_READY_WITHIN_S: Final = 60.0


def demo(*, as_json: bool) -> None:
    """Play all acts; ends with exit code 0 only when everything held."""
    console = Console(quiet=as_json)
    with contextlib.ExitStack() as stack, children.ended_by_signals():
        try:
            outcome = _play(stack, console)
        except children.Ended as ended:
            raise SystemExit(128 + ended.signum) from None
        finally:
            stack.close()
    failed = broken_promises(outcome)
    if as_json:
        show.as_json(outcome, failed)
    for text in failed:
        console.print(f"[bold red]Not as promised:[/] {text}")
    if failed:
        raise SystemExit(1)


def broken_promises(outcome: show.Outcome) -> list[str]:
    """Return what the demo promises and ``outcome`` does not show."""
    first, second, third = outcome.first, outcome.second, outcome.third
    checks = {
        f"accuracy {first.accuracy:.3f} is below {_LEAST_ACCURACY}": (
            first.accuracy >= _LEAST_ACCURACY
        ),
        f"accuracy {second.accuracy:.3f} is below {_LEAST_ACCURACY} with too little memory": (
            second.accuracy >= _LEAST_ACCURACY
        ),
        f"engines were loaded {outcome.loads} times, not once in each process": (
            set(outcome.loads) == {1}
        ),
        "no batch ran out of memory and was answered in FP16": (
            any(reply.precision == "fp16" for reply in second.out_of_memory())
        ),
        f"the burst grew the worker to {third.most} instances and left {third.last}": (
            (third.most, third.last) == (_MOST_INSTANCES, 1)
        ),
        f"{third.answered} of {burst.JOBS} jobs of the burst were answered": (
            third.answered == burst.JOBS
        ),
    }
    return [text for text, holds in checks.items() if not holds]


def _play(stack: contextlib.ExitStack, console: Console) -> show.Outcome:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FLEET_") or name in _KEPT
    }
    settings = WorkerSettings.load(environ=environ)
    digits = held_out(settings.config_dir)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-demo-")))
    broker = stack.enter_context(local.broker(settings, environ))
    client = stack.enter_context(Client(broker.settings))
    stage = _Stage(
        broker=broker,
        client=client,
        digits=digits,
        grace_s=settings.grace_s,
        log=folder / "worker.log",
        console=console,
    )
    first, loads = stage.first_act()
    show.first_act(console, first, loads, digits)
    second = stage.second_act()
    show.second_act(console, second, MEMORY_LIMIT_BYTES)
    third = stage.third_act()
    show.third_act(console, third)
    return show.Outcome(
        first=first,
        second=second,
        third=third,
        loads=loads,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Where the acts play: one broker, one client, and a worker for each act."""

    broker: local.Broker
    client: Client
    digits: Digits
    grace_s: float
    #: What the workers write.
    log: Path
    console: Console

    def first_act(self) -> tuple[acts.Answers, list[int]]:
        """Send every digit with ``infer.delay`` to a worker that waits for them."""
        infer = register(make_app(self.broker.settings))
        self.console.print(
            f"\n[bold]First act.[/] {len(self.digits.labels)} images that the model never saw, "
            "each one a job."
        )
        with self._worker({}) as words:
            with show.progress(self.console, len(self.digits.labels)) as tell:
                answers = acts.by_delay(infer, self.client, self.digits, tell)
            return answers, acts.loads(words)

    def second_act(self) -> acts.Answers:
        """Let the digits wait, so that full batches form, then start a worker short of memory."""
        self.console.print(
            f"\n[bold]Second act.[/] The same images wait while the worker is started anew with "
            f"{MEMORY_LIMIT_BYTES:,} bytes of memory for each instance: too few for a batch of 32."
        )
        inputs = [{"image": image} for image in self.digits.images]
        jobs = self.client.submit_many(MODEL, inputs)
        limits = {
            "FLEET_MEMORY_LIMIT_BYTES": str(MEMORY_LIMIT_BYTES),
            "FLEET_MEMORY_FIRST_CHUNK_BYTES": str(MEMORY_FIRST_CHUNK_BYTES),
        }
        with (
            self._worker(limits),
            show.progress(self.console, len(jobs)) as tell,
        ):
            return acts.by_client(jobs, self.client, self.digits, tell)

    def third_act(self) -> burst.Burst:
        """Send more than one instance should answer to a worker that may start a second one."""
        self.console.print(
            f"\n[bold]Third act.[/] One instance waits; {burst.JOBS:,} jobs come at once. What "
            f"waits should be answered within {burst.TARGET_DRAIN_S:g} s."
        )
        scaling = {
            "FLEET_INSTANCES": str(_MOST_INSTANCES),
            "FLEET_MIN_INSTANCES": "1",
            "FLEET_TARGET_DRAIN_S": str(burst.TARGET_DRAIN_S),
            "FLEET_DOWN_AFTER_S": str(burst.DOWN_AFTER_S),
        }
        with self._worker(scaling):
            show.burst_head(self.console)
            return burst.play(
                self.broker,
                self.client,
                self.digits,
                lambda moment: show.burst_moment(self.console, moment),
            )

    @contextlib.contextmanager
    def _worker(self, limits: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        """Run a worker that serves the digits alone; its words once it is ready."""
        environ = {"FLEET_MODELS": MODEL, **limits}
        with local.worker(
            self.broker, grace_s=self.grace_s, environ=environ, output=self.log
        ) as worker:
            try:
                with self.console.status("Starting the worker") as status:
                    words = local.wait_until_ready(
                        self.broker,
                        worker,
                        tell=lambda states: status.update(f"Starting the worker: {states}"),
                        within_s=_READY_WITHIN_S,
                    )
                yield words
            except FleetError as error:
                raise ConfigError(f"{error} Last in its log: {self._last_line()}") from error

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing."
