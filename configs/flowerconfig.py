"""Settings of Flower for a fleet: celery -A workers.app flower --conf=configs/flowerconfig.py

Flower runs this file as Python. Its command line and, where they are read below, its variables
win over what stands here; but a password is always asked for. See docs/flower.md.
"""

import os
import sys

from producer.contract.errors import ConfigError
from workers.telemetry import flower_access, flower_broker

try:
    access = flower_access.Access.from_env(os.environ)
except ConfigError as error:
    sys.stderr.write(f"fleet: {error}\n")
    sys.exit(2)
if access.made_up:
    sys.stderr.write(f"fleet: Flower asks for {access.how_to_log_in()}\n")
    sys.stderr.flush()

flower_access.close_every_page()
flower_broker.install()

basic_auth = list(access.logins)

# Another address is for a container or a proxy with TLS: the password travels as it is.
address = os.environ.get("FLOWER_ADDRESS", "127.0.0.1")

# The last so many jobs are kept, about 10 KB of memory each. All are counted.
max_tasks = os.environ.get("FLOWER_MAX_TASKS", "10000")

# Workers that are gone leave the table, and their numbers leave /metrics, after so many seconds.
purge_offline_workers = os.environ.get("FLOWER_PURGE_OFFLINE_WORKERS", "300")

# Nothing on disk: what Flower shows begins when it starts.
persistent = False

# The model is the name; args are shapes.
tasks_columns = os.environ.get(
    "FLOWER_TASKS_COLUMNS", "name,uuid,state,args,received,runtime,worker"
)
