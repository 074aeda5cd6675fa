# One image for the workers and for Flower. The models in it are those of configs/; compose.yaml
# lays the clone's own configs/ over them, so that a new model needs no new image.

FROM python:3.11-slim AS build
# compose.gpu.yaml asks for worker-gpu in place of worker: both bring the module onnxruntime.
ARG EXTRAS=cli,worker,flower
WORKDIR /app
RUN python -m venv /opt/fleet
ENV PATH=/opt/fleet/bin:$PATH
# Only what the packages depend on, so that a change of the sources does not install them anew.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY producer/__init__.py producer/
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]"

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin fleet
WORKDIR /app
ENV PATH=/opt/fleet/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/fleet /opt/fleet
# The installation is an editable one: it finds both packages here, side by side.
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY producer producer
COPY workers workers
# The user below may write nothing, so bytecode is made now.
RUN python -m compileall -q producer workers
# What workers build for their GPU; a named volume that is laid over it belongs to them as well.
RUN mkdir /cache && chown fleet /cache
USER fleet
# `fleet worker` becomes Celery itself: signals reach it as process 1, without a shell between. Until
# it handles SIGTERM the signal is held back, since process 1 would never see it otherwise.
ENTRYPOINT ["env", "--block-signal=TERM", "fleet"]
CMD ["worker"]
