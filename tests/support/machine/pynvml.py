"""Stands before the real `pynvml` on the path of a process: the machine of
`tests.support.nvml_inventories` that TEST_MACHINE names, with the driver of TEST_DRIVER.
"""

import os
import sys
from pathlib import Path

sys.path = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
del sys.modules["pynvml"]

from tests.support import nvml_inventories  # noqa: E402 - it needs the real one

_machine = getattr(nvml_inventories, os.environ["TEST_MACHINE"])()
_machine.driver = os.environ.get("TEST_DRIVER", _machine.driver)
sys.modules["pynvml"] = _machine
