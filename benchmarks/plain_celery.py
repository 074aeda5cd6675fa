"""The app that the fleet is measured against: the usual Celery task around an ONNX file.

Where Redis is, Celery reads from CELERY_BROKER_URL and CELERY_RESULT_BACKEND. All other settings
are Celery's own.
"""

from __future__ import annotations

import functools
import os
from typing import Final

import numpy as np
import onnxruntime as ort
from celery import Celery

#: The variable that names the ONNX file.
ONNX_FILE: Final = "PLAIN_ONNX_FILE"

Rows = list[list[float]]

# Not the current app: the benchmark's process has the fleet's app as well.
app = Celery("plain", set_as_current=False)


@app.task(name="plain.infer")
def infer(rows: Rows) -> Rows:
    """Return the model's answer to ``rows``."""
    (scores,) = session(os.environ[ONNX_FILE]).run(None, {"x": np.asarray(rows, dtype=np.float32)})
    answer: Rows = scores.tolist()
    return answer


@functools.cache
def session(path: str) -> ort.InferenceSession:
    """Open the file once per process, with one thread as the fleet's instance has."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
