"""Processes that a command starts beside itself: none outlives it, and they stop in order.

Also what a signal means for such a command: the first ends it, a second one hurries its children.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from workers.birth import die_with_parent

#: A closed terminal ends a command as Ctrl-C does.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: How long a finalizer may need to end.
_AGAIN_S: Final = 0.02


class Ended(BaseException):
    """A signal asks this command to end. No ``except Exception`` may hold it up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    within_s: float,
    output: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` for the length of the block, then end it: SIGTERM, and SIGKILL if it stays.

    Its output goes to ``output``, or to where ours goes. It is a session of its own, so that
    Ctrl-C reaches us alone and we say in which order things stop. Call it from the main thread:
    the kernel ties the child's life to the thread that started it.
    """
    with _output(output) as stream:
        child = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=None if stream is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
    try:
        yield child
    finally:
        end(child, within_s=within_s)


def end(child: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Ask ``child`` to end; a signal that comes while we wait is passed on, which hurries it."""
    with _passed_on(child):
        child.terminate()
        try:
            child.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Raise `Ended` in the block when a signal asks to end. Later ones do not interrupt its end.

    What is yielded says, when it is called, that from then on any signal comes too late.
    """
    over = False
    asked: int | None = None

    def too_late() -> None:
        nonlocal over
        over = True

    def handle(signum: int, _frame: FrameType | None) -> None:
        nonlocal over, asked
        if not over:
            over, asked = True, signum
            raise Ended(signum)

    def again(signum: int) -> None:
        nonlocal over
        over = False
        # From a thread: here it would be raised in the finalizer once more.
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signum)).start()

    with _handled_by(handle), _heard_in_finalizers(again):
        try:
            yield too_late
        except Exception as error:
            if asked is None:
                raise
            # A library in C that was being imported makes an error of its own of what we raised.
            raise Ended(asked) from error


@contextlib.contextmanager
def _heard_in_finalizers(again: Callable[[int], None]) -> Iterator[None]:
    """Call ``again`` with the signal of an `Ended` that Python ignored: raised while a finalizer
    ran, it reaches nobody.
    """
    before = sys.unraisablehook

    def hear(ignored: sys.UnraisableHookArgs) -> None:
        if isinstance(ignored.exc_value, Ended):
            again(ignored.exc_value.signum)
        else:
            before(ignored)

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def handle(_signum: int, _frame: FrameType | None) -> None:
        child.terminate()

    with _handled_by(handle):
        yield


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # What was ignored when we started stays ignored: nohup means SIGHUP, a script's & means SIGINT.
    heard = [signum for signum in _ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[int | None]:
    if path is None:
        yield None
        return
    with path.open("ab") as file:
        yield file.fileno()
