"""All that `fleet doctor` looks at, in the order in which it is shown.

What is judged lies in the files beside this one and in those that a worker's start uses; here facts
are gathered and handed to them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import redis

from producer.contract.errors import ConfigError
from producer.contract.names import Keys
from producer.contract.reach import reach, why_not
from producer.contract.settings import Settings, redacted
from workers import server
from workers.doctor import host, machine, models, precisions
from workers.finding import Finding, State
from workers.instances import leases
from workers.instances.discovery import Inventory, choose, has_gpu_runtime, inventory_of
from workers.instances.driver import DriverRange
from workers.instances.nvml import Nvml
from workers.models import ONNXRUNTIME, RUNTIMES, ModelSpec
from workers.settings import WorkerSettings

_NAME_A_SERVER = "Start one (`fleet up` brings one along), or name another (docs/redis.md)."


def checkup() -> list[Finding]:
    """Look at everything; a thing that cannot be looked at is a finding too."""
    found: list[Finding] = []
    settings = _settings(found)
    where = _where(found)
    here, nvml = machine.read_machine()
    about_instances: list[Finding] = []
    inventory = _inventory(settings, nvml, about_instances)
    keys = [each.instance.key for each in here.gpus]
    keys += [each.key for each in inventory.instances] if inventory else []
    servers, holders = _servers(where, keys) if where else ([], None)

    found.append(machine.driver(here, settings.driver if settings else DriverRange("")))
    found += [machine.cuda(here), machine.tensorrt(here), machine.onnxruntime(here)]
    found += machine.gpus(here, holders)
    found += precisions.fast(_capabilities(here))
    found += about_instances
    if settings and inventory:
        found.append(host.instances(inventory, holders))
        found += _host(settings, inventory)
    found += servers
    if settings:
        found += _models(settings, here)
    return found


def _settings(found: list[Finding]) -> WorkerSettings | None:
    try:
        return WorkerSettings.load()
    except ConfigError as error:
        do = error.do or "Mend fleet.toml, or the variable."
        found.append(Finding("settings", State.ERROR, error.problem, do))
        return None


def _where(found: list[Finding]) -> Settings | None:
    try:
        return Settings.from_env()
    except ConfigError as error:
        do = error.do or "Mend the variable."
        found.append(Finding("settings", State.ERROR, error.problem, do))
        return None


def _inventory(
    settings: WorkerSettings | None, nvml: Nvml | None, found: list[Finding]
) -> Inventory | None:
    """Return what a worker would run on, whatever the driver: that has a line of its own."""
    if settings is None:
        return None
    any_driver = dataclasses.replace(settings, driver=DriverRange(""))
    try:
        if nvml is None:
            return choose(any_driver, [])
        inventory = inventory_of(nvml, any_driver, os.environ, has_runtime=has_gpu_runtime())
    except ConfigError as error:
        do = error.do or "Mend `instances`."
        found.append(Finding("instances", State.ERROR, error.problem, do))
        return None
    # What was left out is told with the GPUs.
    own = [text for text in inventory.warnings if text not in nvml.find().warnings]
    found += [Finding("instances", State.WARNING, text, "See docs/b300.md.") for text in own]
    return inventory


def _host(settings: WorkerSettings, inventory: Inventory) -> Iterator[Finding]:
    facts = host.read_host(settings.config_dir)
    slots = len(inventory.instances) if inventory.nvml is None else 0
    yield host.cores(facts, settings)
    yield host.memory(facts, settings, slots)
    yield host.cache(facts)


def _servers(
    where: Settings, instances: Sequence[str]
) -> tuple[list[Finding], Mapping[str, str] | None]:
    """Return the findings about each server, and who holds ``instances`` where one says so."""
    found, holders = _server(where, where.broker_url, "redis", "FLEET_BROKER_URL", instances)
    if where.result_url != where.broker_url:
        more, _ = _server(where, where.result_url, "results", "FLEET_RESULT_URL", ())
        found += more
    return found, holders


def _server(
    where: Settings, url: str, name: str, variable: str, instances: Sequence[str]
) -> tuple[list[Finding], Mapping[str, str] | None]:
    try:
        with reach(url, variable=variable) as client:
            facts = server.read(client, redacted(url), thorough=True)
            holders = _holders(client, where, instances)
    except ConfigError as error:
        return [Finding(name, State.ERROR, error.problem, error.do or _NAME_A_SERVER)], None
    except (redis.RedisError, OSError) as error:
        text = why_not(error, url, variable=variable)
        return [Finding(name, State.ERROR, text, _NAME_A_SERVER)], None
    watermark = where.memory_watermark
    return [
        server.version(facts, check=name, variable=variable),
        server.policy(facts, check=f"{name} policy"),
        server.memory(facts, check=f"{name} memory", watermark=watermark),
        server.persistence(facts, check=f"{name} persistence"),
    ], holders


def _holders(
    client: redis.Redis, where: Settings, instances: Sequence[str]
) -> Mapping[str, str] | None:
    """Return the worker that holds each instance; None to a user who may not ask."""
    try:
        tokens = leases.holders(client, Keys(prefix=where.prefix), instances)
    except redis.ResponseError:
        return None
    return {key: leases.node_of(token) for key, token in tokens.items()}


def _models(settings: WorkerSettings, here: machine.Machine) -> Iterator[Finding]:
    specs: list[ModelSpec] = []
    for finding, spec in models.look(settings):
        yield finding
        specs += [spec] if spec else []
    served = [(spec.name, name) for spec in specs if _may_use_gpus(spec) for name in spec.engines]
    yield from precisions.unfit(served, _capabilities(here))


def _capabilities(here: machine.Machine) -> list[tuple[int, int]]:
    """Return the compute capabilities that are here, each once."""
    found = {each.instance.compute_capability for each in here.gpus}
    return sorted(each for each in found if each)


def _may_use_gpus(spec: ModelSpec) -> bool:
    """Return whether a runtime of ours may run it on a GPU; of other runtimes we know nothing."""
    return spec.runtime in RUNTIMES and spec.runtime != ONNXRUNTIME
