"""A web service that awaits answers: uvicorn --app-dir examples/fastapi app:app"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from producer.client import Client
from producer.contract.errors import FleetError


class Picture(BaseModel):
    """A handwritten digit: rows of pixels from 0, paper, to 1, ink."""

    pixels: Annotated[list[list[float]], Field(min_length=1, max_length=64)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client for the process; it hears the replies to all requests."""
    with Client() as app.state.fleet:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/digit")
async def digit(picture: Picture, request: Request) -> dict[str, int]:
    """Say which digit it is. Requests that wait together run as one batch."""
    inputs = {"image": [[picture.pixels]]}
    reply = await request.app.state.fleet.infer("digits", inputs, timeout_s=5)
    return {"digit": int(np.argmax(reply.outputs["scores"])), "batch_size": reply.batch_size}


@app.exception_handler(FleetError)
async def failed(request: Request, error: FleetError) -> JSONResponse:
    """Answer what a job ended with: its code, and what to do about it."""
    body = {"code": error.code, "detail": str(error)}
    return JSONResponse(body, status_code=error.http_status)
