"""Cores: what affinity and cgroups grant, and how many instances that is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.instances import cpu
from workers.instances.host import host_id


def cgroups(folder: Path, own: str, **files: str) -> list[float]:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("cpu_max", "cpu.max")
        path = path.with_name(path.name.replace("cfs_", "cpu.cfs_"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    (folder / "self").write_text(own, encoding="ascii")
    return [cores for _, cores in cpu._cgroup_limits(folder, folder / "self")]


def test_every_cgroup_around_the_process_counts(tmp_path: Path) -> None:
    quotas = cgroups(
        tmp_path,
        "0::/kube/pod\n",
        cpu_max="max 100000\n",
        kube__cpu_max="400000 100000\n",
        kube__pod__cpu_max="150000 100000\n",
    )

    assert quotas == [4.0, 1.5]


def test_version_1_quotas_are_read_and_minus_one_means_no_limit(tmp_path: Path) -> None:
    quotas = cgroups(
        tmp_path,
        "4:cpu,cpuacct:/job\n3:pids:/job\n",
        cpu__cfs_quota_us="-1\n",
        cpu__cfs_period_us="100000\n",
        cpu__job__cfs_quota_us="250000\n",
        cpu__job__cfs_period_us="100000\n",
    )

    assert quotas == [2.5]


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert list(cpu._cgroup_limits(tmp_path, tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("granted", "threads", "slots"), [(4.0, 1, 4), (4.0, 3, 1), (1.5, 1, 1), (0.5, 2, 1)]
)
def test_slots_are_whole_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, granted: float, threads: int, slots: int
) -> None:
    monkeypatch.setattr(cpu, "cores", lambda: granted)

    assert cpu.slots(threads=threads) == slots
    assert cpu.slots(threads=threads, wanted=7) == 7


def key_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, affinity: set[int], all_cores: int
) -> str:
    """Return the name of the first slot of a process with these cores in the cgroup ``folder``."""
    monkeypatch.setattr(cpu, "_CGROUP_ROOT", folder)
    monkeypatch.setattr(cpu, "_OWN_CGROUP", folder / "self")
    monkeypatch.setattr(cpu, "_affinity", lambda: affinity)
    monkeypatch.setattr(os, "cpu_count", lambda: all_cores)
    return cpu.instances([0])[0].key


def test_workers_that_may_use_all_cores_of_a_host_share_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        cgroups(tmp_path / name, "0::/\n", cpu_max="max 100000\n")

    keys = {
        key_of(tmp_path / name, monkeypatch, affinity=set(range(4)), all_cores=4)
        for name in ("one", "two")
    }

    assert keys == {f"CPU-{host_id()}/0"}


def test_a_container_with_cores_of_its_own_shares_them_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        cgroups(tmp_path / name, "0::/\n", cpu_max="200000 100000\n")

    keys = {
        key_of(tmp_path / name, monkeypatch, affinity=set(range(4)), all_cores=4)
        for name in ("one", "one", "two")
    }

    assert len(keys) == 2


def test_workers_on_the_same_cores_share_slots_and_those_on_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [
        key_of(tmp_path, monkeypatch, affinity=affinity, all_cores=4)
        for affinity in ({0, 1}, {0, 1}, {2, 3})
    ]

    assert keys[0] == keys[1] != keys[2]
