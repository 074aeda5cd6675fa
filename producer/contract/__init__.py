"""What both sides agree on: names, messages, the wire format, errors, settings, the Celery app."""
