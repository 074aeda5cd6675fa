"""`fleet dead`: look at dead letters, requeue them, purge them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import redis

from producer.commands.output import Refused, json_option, plain, print_json, print_table
from producer.contract.names import Keys, is_stream_queue, queue_of
from producer.contract.queues import find
from producer.contract.reach import reach
from producer.contract.settings import Settings

# Letters are read and requeued with what knows the wire format, arrays and all. Every `fleet`
# command imports this module, and only these here shall wait for that.
if TYPE_CHECKING:
    from producer.dead import DeadLetter
    from producer.requeue import Requeued

T = TypeVar("T")

#: What names a letter that stays where it is, and why it does.
Stays = tuple[str, str]

#: So many of those that stay are named in the one line on standard error.
_NAMED: Final = 3
#: Fewer letters are done before anybody could read a bar.
_WORTH_A_BAR: Final = 200


@click.group()
def dead() -> None:
    """Look at dead letters: jobs that will not be tried again; requeue or purge them.

    A job becomes one when its process died at every start it was allowed, or when nobody can read
    it. The sender has its error; the letter keeps the entry for people.

    \b
      fleet dead list                  what is there, and why
      fleet dead show JOB              who sent it, and what its inputs look like
      fleet dead requeue JOB           the cause is mended: it shall run again
      fleet dead purge JOB --yes       nobody needs it any more

    JOB is the id of a job, or of the letter where the job has none that can be read.
    """


@dead.command("list")
@json_option
def dead_list(as_json: bool) -> None:
    """List the dead letters of every queue, the oldest first."""
    found = _all_letters(Settings.from_env())
    if as_json:
        print_json([letter.about() for letter in found])
    elif not found:
        click.echo("No dead letters.")
    else:
        print_table(("queue", "job", "code", "starts", "buried", "reason"), map(_row, found))


@dead.command("show")
@click.argument("job")
@click.option(
    "--values", is_flag=True, help="Show short values of its inputs too: they may be private."
)
@json_option
def dead_show(*, job: str, values: bool, as_json: bool) -> None:
    """Show one dead letter, by the id of its job or its own.

    Of its inputs only names, dtypes and shapes are shown. --values adds those values that are short
    as JSON, up to 120 characters.
    """
    settings = Settings.from_env()
    found = [each for each in _all_letters(settings) if job in _names(each)]
    if not found:
        raise Refused(f"There is no dead letter {job}. See `fleet dead list`.")
    with reach(settings.broker_url) as client:
        keys = Keys(prefix=settings.prefix)
        said = [_about(client, keys, each, values=values) for each in found]
    if as_json:
        print_json(said)
        return
    for about in said:
        width = max(map(len, about))
        for name, value in about.items():
            for line in _lines(value):
                click.echo(f"{name:<{width}}  {plain(line)}")


def _about(client: redis.Redis, keys: Keys, letter: DeadLetter, *, values: bool) -> dict[str, Any]:
    """Return what is known of a letter, with what its inputs look like."""
    from producer.arguments import MOST_BYTES, look
    from producer.dead import entry_of

    about = letter.about()
    if sum(letter.sizes_bytes.values()) > MOST_BYTES:
        return {**about, "inputs": None, "unreadable": "It is too large to be looked at."}
    return {**about, **look(entry_of(client, keys, letter), values=values)}


def _lines(value: object) -> list[str]:
    """Return a value of a letter as lines: one for each input."""
    if isinstance(value, Mapping) and value:
        return [f"{name}: {'(long)' if its is None else its}" for name, its in value.items()]
    return [str(value)]


def _choosing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command what says which letters it is about."""
    for option in (
        click.option("--queue", metavar="QUEUE", help="Only letters of this queue, or model."),
        click.option("--all", "every", is_flag=True, help="Every dead letter."),
        click.argument("jobs", nargs=-1, metavar="[JOB]..."),
    ):
        command = option(command)
    return command


@dead.command("requeue")
@_choosing
@json_option
def dead_requeue(*, jobs: tuple[str, ...], every: bool, queue: str | None, as_json: bool) -> None:
    """Let jobs run again, by their ids or those of their letters.

    The entry that was sent goes back to the end of the queue it came from, and the letter goes. The
    job begins anew: its attempts and its failure are forgotten, so AsyncResult(id).get() and
    Client().as_completed([id]) wait for the new outcome. A job whose expiry is over ends as
    EXPIRED. What its failure has set off, errbacks or a chord's error, is not taken back.

    A letter stays when its entry is missing, or when its job was sent again meanwhile and runs or
    is answered: one line on standard error says why, and the exit code is 2; the others are
    requeued all the same. A job that nobody can read becomes a dead letter again.
    """
    from producer.requeue import Requeued, requeue

    settings = Settings.from_env()
    chosen, stay = _choose(settings, jobs, every=every, queue=queue)
    with reach(settings.broker_url) as client, _results(settings) as results:
        keys = Keys(prefix=settings.prefix)
        said = requeue(client, keys, chosen, results=results, blob_ttl_s=settings.blob_ttl_s)
        ends = list(_with_bar(said, len(chosen), "requeueing"))
    done = [letter for letter, end in ends if end is Requeued.REQUEUED]
    # Who asks for all of them does not mind that somebody else was faster.
    expected = {Requeued.REQUEUED, Requeued.GONE} if every else {Requeued.REQUEUED}
    stay += [(_name(letter, end), end.why) for letter, end in ends if end not in expected]
    _tell("requeued", done, stay, as_json=as_json)


@dead.command("purge")
@_choosing
@click.option("--yes", is_flag=True, help="Delete them: there is no way back.")
@json_option
def dead_purge(
    *, jobs: tuple[str, ...], every: bool, queue: str | None, yes: bool, as_json: bool
) -> None:
    """Delete dead letters, and with them the only copy of their jobs.

    What their senders were told stays as it is.
    """
    from producer.contract.blobs import Blobs
    from producer.requeue import purge

    settings = Settings.from_env()
    chosen, stay = _choose(settings, jobs, every=every, queue=queue)
    if chosen and not yes:
        raise Refused(f"This deletes {_count(chosen)} for good. Say --yes if that is meant.")
    with reach(settings.broker_url) as client:
        said = purge(client, Blobs.of(settings), chosen)
        done = [letter for letter, was in _with_bar(said, len(chosen), "purging") if was]
    _tell("purged", done, stay, as_json=as_json)


# -- which letters


def _choose(
    settings: Settings, jobs: Sequence[str], *, every: bool, queue: str | None
) -> tuple[list[DeadLetter], list[Stays]]:
    """Return the letters that are meant, and why some of ``jobs`` mean none."""
    if every == bool(jobs):
        raise Refused("Name jobs, or say --all, not both. See `fleet dead list`.")
    found = _all_letters(settings, queue)
    return (found, []) if every else choose(found, jobs)


def choose(
    found: Iterable[DeadLetter], names: Iterable[str]
) -> tuple[list[DeadLetter], list[Stays]]:
    """Return the one letter that each of ``names`` means, and why some mean none."""
    meant: dict[str, list[DeadLetter]] = {name: [] for name in names}
    for letter in found:
        for name in _names(letter) & meant.keys():
            meant[name].append(letter)
    chosen: dict[tuple[str, str], DeadLetter] = {}
    stay: list[Stays] = []
    for name, its in meant.items():
        if len(its) == 1:
            chosen[its[0].queue, its[0].letter_id] = its[0]
        elif not its:
            stay.append((name, "there is no such dead letter"))
        else:
            ids = ", ".join(f"{letter.letter_id} of {letter.queue}" for letter in its[:_NAMED])
            stay.append((name, f"{_count(its)} have this id, name one of them: {ids}"))
    return list(chosen.values()), stay


def _all_letters(settings: Settings, queue: str | None = None) -> list[DeadLetter]:
    from producer.dead import letters

    # A list, not a stream: a job that dies again while others are requeued is not among them.
    keys = Keys(prefix=settings.prefix)
    with reach(settings.broker_url) as client:
        if queue is None:
            queues = sorted(find(client, keys))
        else:
            queues = [queue if is_stream_queue(queue) else queue_of(queue)]
        return [letter for name in queues for letter in letters(client, keys, name)]


def _names(letter: DeadLetter) -> set[str]:
    return {letter.letter_id, letter.job_id} - {""}


def _name(letter: DeadLetter, end: Requeued) -> str:
    from producer.requeue import Requeued

    return letter.letter_id if end is Requeued.TWIN else letter.job_id or letter.letter_id


@contextlib.contextmanager
def _results(settings: Settings) -> Iterator[redis.Redis | None]:
    """Yield a client of the results' own server; None where it is the broker's."""
    if settings.one_server:
        yield None
        return
    with reach(settings.result_url, variable="FLEET_RESULT_URL") as client:
        yield client


# -- what is said of it


def _with_bar(ends: Iterable[T], total: int, what: str) -> Iterable[T]:
    """Show how far it is, where somebody watches and it takes a while."""
    from rich.console import Console
    from rich.progress import track

    nobody = not sys.stderr.isatty() or total < _WORTH_A_BAR
    console = Console(stderr=True)
    return track(ends, what, total, console=console, transient=True, disable=nobody)


def _tell(word: str, done: Sequence[DeadLetter], stay: Sequence[Stays], *, as_json: bool) -> None:
    """Say what was done; what was not is one line on standard error and exit code 2."""
    if as_json:
        ids = [
            {"queue": each.queue, "job_id": each.job_id, "letter_id": each.letter_id}
            for each in done
        ]
        print_json({word: ids, "refused": [{"id": name, "why": why} for name, why in stay]})
    elif done or not stay:
        click.echo(f"{_count(done) if done else 'No dead letters'} {word}.")
    if stay:
        reasons = [f"{name}: {why}" for name, why in stay]
        if len(reasons) > _NAMED:
            reasons[_NAMED:] = [f"and {len(reasons) - _NAMED} more (--json names them)"]
        raise Refused(f"{len(stay)} not {word}. {'; '.join(reasons)}.")


def _count(letters: Sequence[DeadLetter]) -> str:
    return "1 dead letter" if len(letters) == 1 else f"{len(letters):,} dead letters"


def _row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        letter.queue,
        letter.job_id or f"(none; letter {letter.letter_id})",
        letter.code,
        str(letter.attempts),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.buried_unix_s)),
        letter.reason,
    )
