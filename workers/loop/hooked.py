"""The jobs of a batch on their way through the hooks, each in a thread and by itself."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

from producer.contract.errors import BadRequest, FleetError, ModelCodeFailed
from workers.hooks import Hooks
from workers.loop.jobs import Job
from workers.progress import Outcome
from workers.runner import ModelRunner

Going: TypeAlias = "list[concurrent.futures.Future[None]]"
Replies: TypeAlias = "list[concurrent.futures.Future[Outcome]]"
Ended: TypeAlias = "concurrent.futures.Future[None]"


def start_preprocess(runner: ModelRunner, jobs: Sequence[Job]) -> Going:
    """Begin to prepare ``jobs`` for the engine; afterwards each has inputs for it, or a fault."""
    hooks = runner.hooks
    if hooks is None or not hooks.has_preprocess:
        return []
    return [hooks.before.submit(_preprocess, runner, hooks, job) for job in jobs]


def start_postprocess(
    runner: ModelRunner, jobs: Sequence[Job], outcomes: Sequence[Outcome]
) -> Replies:
    """Begin to make replies of ``outcomes``; each is an outcome again."""
    hooks = runner.hooks
    assert hooks is not None
    return [
        hooks.behind.submit(_postprocess, hooks, job, outcome)
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


def all_of(futures: Sequence[concurrent.futures.Future[Any]]) -> Ended:
    """Return what is done when the last of ``futures`` is: to be waited for beside others."""
    ended: Ended = concurrent.futures.Future()
    left, counting = len(futures), threading.Lock()

    def one_is_done(_: concurrent.futures.Future[Any]) -> None:
        nonlocal left
        with counting:
            left -= 1
            is_last = left == 0
        if is_last:
            ended.set_result(None)

    if not futures:
        ended.set_result(None)
    for each in futures:
        each.add_done_callback(one_is_done)
    return ended


def _preprocess(runner: ModelRunner, hooks: Hooks, job: Job) -> None:
    try:
        arrays = hooks.preprocess(job.inputs or {})
        try:
            job.prepared = runner.prepare(arrays)
        except BadRequest as error:
            # It is the code that gave these to the engine, not the sender.
            raise ModelCodeFailed(f"preprocess returned what the model refuses: {error}") from None
    except FleetError as error:
        job.fault = error
    except BaseException as error:  # noqa: BLE001 - it ends this job alone
        job.fault = ModelCodeFailed(f"preprocess returned what is no array: {type(error).__name__}")


def _postprocess(hooks: Hooks, job: Job, outcome: Outcome) -> Outcome:
    if outcome.error is not None:
        return outcome
    try:
        reply = hooks.postprocess(outcome.outputs, job.inputs or {})
    except FleetError as error:
        return dataclasses.replace(outcome, outputs=None, error=error)
    except BaseException as error:  # noqa: BLE001 - it ends this job alone
        failed = ModelCodeFailed(f"The reply cannot be sent: {type(error).__name__}")
        return dataclasses.replace(outcome, outputs=None, error=failed)
    return dataclasses.replace(outcome, outputs=reply)
