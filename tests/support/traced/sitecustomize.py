"""What somebody puts on the PYTHONPATH of every process to have it watched, by Sentry or by
OpenTelemetry, as TRACED_BY says. Each span becomes a line of the file TRACED_TO: trace, process,
kind, name.
"""

import os
from pathlib import Path
from typing import Any

TRACED_BY, TRACED_TO = os.environ.get("TRACED_BY"), Path(os.environ.get("TRACED_TO", os.devnull))


def note(trace: str, kind: str, name: str) -> None:
    """Write one line."""
    who = os.environ["TRACED_WHO"]
    with TRACED_TO.open("a") as file:
        file.write(f"{trace} {who} {kind} {name}\n")


def watch_with_sentry() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    def keep(event: Any, hint: Any) -> None:
        trace = event["contexts"]["trace"]
        note(trace["trace_id"], trace["op"], event["transaction"])

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        before_send_transaction=keep,
    )


def watch_with_opentelemetry() -> None:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

    class Lines(SpanExporter):
        def export(self, spans: Any) -> None:
            for span in spans:
                note(f"{span.context.trace_id:032x}", span.kind.name.lower(), span.name)

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Lines()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


if TRACED_BY == "sentry":
    watch_with_sentry()
elif TRACED_BY == "opentelemetry":
    watch_with_opentelemetry()
