"""The judge of the storm finds what must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.account import Account, Doom
from tests.chaos.invariants import Verdicts, verdicts
from tests.chaos.memory import Sample, slopes_mb
from tests.chaos.sender import answer_of


@pytest.fixture
def account(tmp_path: Path) -> Account:
    """Return the books of ten jobs that were started and answered once, by the process 1."""
    answers = [f"job-{n} {answer_of(n)}" for n in range(1, 11)]
    (tmp_path / "c1.accepted").write_text("".join(f"{n} job-{n}\n" for n in range(1, 11)))
    (tmp_path / "c1.outcomes").write_text("\n".join(answers) + "\n")
    starts = [f"start {n} 1 fp32 8 {100 + n}" for n in range(1, 11)]
    (tmp_path / "starts.log").write_text("\n".join(starts) + "\n")
    account = Account(tmp_path)
    account.follow(tmp_path, "c1")
    account.update()
    return account


def judged(account: Account, **seen: object) -> Verdicts:
    given = {"told": {}, "stored": {}, "fenced": set(), "dooms": [], **seen}
    return verdicts(account, **given)  # type: ignore[arg-type]


def write(folder: Path, name: str, line: str, account: Account) -> None:
    with (folder / name).open("a") as file:
        file.write(f"{line}\n")
    account.update()


def test_nothing_is_found_where_nothing_happened(account: Account) -> None:
    told = {f"job-{n}": 1 for n in range(1, 11)}

    assert not list(judged(account, told=told, fenced={"job-1"}).lines())


def test_a_job_that_nobody_answered_is_lost(tmp_path: Path, account: Account) -> None:
    write(tmp_path, "c1.accepted", "11 job-11", account)

    assert judged(account).lost == ("job-11",)


def test_another_answer_than_the_right_one_is_wrong(tmp_path: Path, account: Account) -> None:
    write(tmp_path, "c1.accepted", "11 job-11", account)
    write(tmp_path, "c1.outcomes", f"job-11 {answer_of(12)}", account)
    stored = {"job-1": answer_of(1), "job-2": "WorkerLost"}

    wrong = judged(account, stored=stored).wrong

    assert [line.partition(" ")[0] for line in wrong] == ["job-2", "job-11"]


def test_a_job_that_is_told_read_or_stored_twice_is_doubled(
    tmp_path: Path, account: Account
) -> None:
    write(tmp_path, "c1.outcomes", f"job-3 {answer_of(3)}", account)

    found = judged(
        account, told={"job-1": 2, "job-2": 1}, stored={"job-5": answer_of(5)}, fenced={"job-5"}
    )

    assert found.doubled == ("job-1", "job-3", "job-5")


def test_a_second_start_is_excused_by_the_death_of_a_holder_alone(
    tmp_path: Path, account: Account
) -> None:
    for n in (1, 2):
        write(tmp_path, "starts.log", f"start {n} 2 fp32 1 150", account)

    # The process 1 began job 1 at 101 and job 2 at 102.
    assert judged(account).restarted == (1, 2)
    assert judged(account, dooms=[Doom(1, 100.5)]).restarted == (2,)
    assert judged(account, dooms=[Doom(1, 110)]).restarted == ()
    # It died long after it had ended them.
    assert judged(account, dooms=[Doom(1, 140)]).restarted == (1, 2)


def test_a_start_by_one_that_woke_up_is_excused_and_no_later_one(
    tmp_path: Path, account: Account
) -> None:
    for n, second in ((1, 149), (2, 170)):
        write(tmp_path, "starts.log", f"start {n} 2 fp32 1 {second}", account)

    assert judged(account, dooms=[Doom(2, 130, 150)]).restarted == (2,)


def test_memory_grows_by_what_each_process_takes_more_as_it_ages() -> None:
    megabyte, samples = 1024 * 1024, []
    for pid, base in ((1, 50), (2, 80)):
        for minute in range(20):
            grown = base * megabyte + minute * megabyte // 10
            for second, burst in ((0, 5 * megabyte), (30, 0)):
                samples.append(
                    Sample(kind="parent", pid=pid, age_s=60 * minute + second, nbytes=grown + burst)
                )
    flat = [Sample(kind="instance", pid=3, age_s=60 * m, nbytes=megabyte) for m in range(20)]

    slopes = slopes_mb([*samples, *flat], from_age_s=180)

    assert slopes == pytest.approx({"parent": 1.0, "instance": 0.0}, abs=0.01)
