"""The project's own models through a real worker: real images in, real answers out."""

from __future__ import annotations

import numpy as np
import redis

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.servers import TestServer
from tests.support.worker import ROOT, running_worker
from workers.demo.digits import held_out

CONFIG = ROOT / "configs"


def test_held_out_digits_are_recognised_one_image_a_job(
    server: TestServer, client: redis.Redis, fleet: Client
) -> None:
    digits = held_out(CONFIG)
    infer = register(make_app(Settings(broker_url=server.url)))

    with running_worker(server, CONFIG, environ={"FLEET_MODELS": "digits"}):
        results = [infer.delay("digits", {"image": image}) for image in digits.images]
        answers = [result.get(timeout=30)["scores"] for result in results]

    taken = np.concatenate(answers).argmax(axis=1)
    assert (taken == digits.labels).mean() >= 0.98


def test_a_model_that_takes_one_row_answers_like_one_that_takes_many(
    server: TestServer, client: redis.Redis, fleet: Client
) -> None:
    images = held_out(CONFIG).images[:200]

    with running_worker(server, CONFIG, environ={"FLEET_MODELS": "digits,digits-fixed1"}):
        one_by_one = fleet.submit_many("digits-fixed1", ({"image": image} for image in images))
        together = fleet.submit("digits", {"image": np.concatenate(images)}).reply(20)
        replies = [job.reply(20) for job in one_by_one]

    alone = np.concatenate([reply.outputs["scores"] for reply in replies])
    assert {reply.batch_size for reply in replies} == {1}
    assert together.batch_size == 32
    assert np.allclose(alone, together.outputs["scores"], atol=1e-4)
