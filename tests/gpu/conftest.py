"""Every test of this folder runs on one GPU or MIG slice, the same for all; without one it is
skipped and says why.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from workers.instances.discovery import visible
from workers.instances.instance import Instance
from workers.instances.nvml import NoGpus, Nvml, open_nvml


def _nvml() -> Nvml:
    try:
        return open_nvml()
    except NoGpus as why:
        pytest.skip(f"no NVIDIA GPU here: {str(why) or 'there is no driver, or no nvidia-ml-py'}")


@pytest.fixture(scope="session")
def nvml() -> Nvml:
    return _nvml()


@pytest.fixture(scope="session", autouse=True)
def card(nvml: Nvml) -> Iterator[Instance]:
    """Return the GPU or slice that is tested; this process sees no other, as an instance would."""
    found = visible(nvml.find(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        pytest.skip("no NVIDIA GPU here: the driver finds none that may be used")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found[0].environ(threads=1).items():
            patch.setenv(name, value)
        # Workers that a test starts choose by themselves.
        patch.delenv("FLEET_INSTANCE_KEY")
        yield found[0]


@pytest.fixture
def cuda(card: Instance) -> None:
    """Skip a test that calls CUDA itself where its package is missing."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
