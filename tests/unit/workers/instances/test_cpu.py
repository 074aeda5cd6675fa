"""Cores: what affinity and cgroups grant, and how many instances that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.instances import cpu


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
