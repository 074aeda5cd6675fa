"""A site that sends jobs and looks for their answers: python digits_site.py runserver"""

from __future__ import annotations

import json

import numpy as np
from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from producer.contract.errors import FleetError
from producer.tasks import infer

if not settings.configured:
    settings.configure(DEBUG=True, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1", "testserver"])


@csrf_exempt
@require_POST
def submit(request: HttpRequest) -> JsonResponse:
    """Send a picture, rows of pixels from 0 to 1, and say where its answer will be."""
    try:
        job = infer.delay("digits", {"image": [[json.loads(request.body)["pixels"]]]})
    except FleetError as error:  # OVERLOADED, or a model that nobody serves
        return failed(error)
    return JsonResponse({"answer": f"/digit/{job.id}"}, status=202)


def poll(request: HttpRequest, job_id: str) -> JsonResponse:
    """Say which digit it is, once that is known. Nothing waits here, and no thread is held."""
    job = infer.AsyncResult(job_id)
    if not job.ready():
        return JsonResponse({"state": job.state}, status=202)
    if isinstance(job.result, FleetError):
        return failed(job.result)
    return JsonResponse({"digit": int(np.argmax(job.result["scores"]))})


def failed(error: FleetError) -> JsonResponse:
    """Say what a job ended with: its code, and what to do about it."""
    return JsonResponse({"code": error.code, "detail": str(error)}, status=error.http_status)


urlpatterns = [path("digit", submit), path("digit/<str:job_id>", poll)]

if __name__ == "__main__":
    execute_from_command_line()
