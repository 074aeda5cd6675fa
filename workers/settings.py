"""What one worker is told: configs/fleet.toml, the table of its machine and FLEET_* are read here,
once, and checked.

Where the broker is belongs to `producer.contract.settings`; what a model needs belongs to its
own model.toml.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from producer.contract.errors import ConfigError
from workers.instances.driver import SUPPORTED, DriverRange
from workers.tables import Table, nearest

#: The configs/ of the clone that this file lies in.
DEFAULT_CONFIG_DIR: Final = Path(__file__).resolve().parent.parent / "configs"

_FILE: Final = "fleet.toml"
_ENV_PREFIX: Final = "FLEET_"

#: Names a file beside fleet.toml and a table in it, such as ``b300.mig``: what else holds on this
#: machine.
_MACHINE: Final = "FLEET_MACHINE"

#: What an instance may be called: as NVML calls it, with a slot or without; a CPU slot by number.
_INSTANCE: Final = re.compile(r"(GPU|MIG)-\S+|cpu/\d+")

#: Variables of the same prefix that are read elsewhere, so that none is taken for a slip.
_READ_ELSEWHERE: Final = frozenset(
    {
        "FLEET_BROKER_URL",
        "FLEET_RESULT_URL",
        "FLEET_CONFIG",
        "FLEET_CACHE",
        _MACHINE,
        "FLEET_PREFIX",
        "FLEET_REPLY_TIMEOUT_S",
        "FLEET_MAX_BODY_BYTES",
        "FLEET_MEMORY_WATERMARK",
        "FLEET_INLINE_MAX_BYTES",
        "FLEET_BLOB_TTL_S",
        "FLEET_BLOB_URL",
        "FLEET_INSTANCE_KEY",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker; see configs/fleet.toml for what each is for."""

    #: Holds fleet.toml and models/.
    config_dir: Path = DEFAULT_CONFIG_DIR
    #: The models to serve; empty means every folder of models/.
    models: tuple[str, ...] = ()
    #: The instances that this worker may use: so many, or those named; 0 means all of the host.
    instances: int | tuple[str, ...] = 0
    #: Processes that share one GPU or MIG slice.
    slots_per_gpu: int = 1
    #: NVIDIA's drivers that a worker may run on, where it runs on a GPU.
    driver: DriverRange = SUPPORTED
    #: Instances that stay when nothing waits; more run as the queue asks. 0: all, always.
    min_instances: int = 0
    #: With `min_instances`: what waits should be answered within this time.
    target_drain_s: float = 5.0
    #: With `min_instances`: an instance that was not needed for so long is given up.
    down_after_s: float = 60.0
    #: Cores, and threads of the runtime, of one CPU instance.
    threads: int = 1
    #: A claim that nobody renewed for so long may be taken over.
    claim_ttl_s: float = 15.0
    #: A worker that did not renew its hold on an instance for so long has lost it.
    lease_ttl_s: float = 15.0
    #: How long a worker may take to end; what still runs 2 s before that is given back. 0: at once.
    grace_s: float = 20.0
    #: A batch that runs longer is ended with its process; a model may say otherwise.
    batch_timeout_s: float = 300.0
    #: Starts a job gets before it becomes a dead letter.
    max_attempts: int = 3
    #: How long an outcome waits for its reader.
    result_ttl_s: float = 3600.0
    #: How long a job id stays taken after its reader deleted the outcome.
    fence_ttl_s: float = 60.0
    #: Memory an instance may use for one runtime; overrides every model's own. None: theirs.
    memory_limit_bytes: int | None = None
    #: The first piece the runtime takes; overrides every model's own. None: theirs.
    memory_first_chunk_bytes: int | None = None
    #: Whether Celery's events are sent, which Flower shows.
    events: bool = True

    def __post_init__(self) -> None:
        if text := next(_contradictions(self), None):
            raise ConfigError(text)

    @classmethod
    def load(
        cls, config_dir: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> WorkerSettings:
        """Read the file, the table of the machine, then the environment: the later wins.

        ConfigError names what is wrong.
        """
        environ = os.environ if environ is None else environ
        folder = _config_dir(config_dir, environ)
        machine = _from_machine(folder, environ.get(_MACHINE, "").strip())
        values = _from_file(folder / _FILE) | machine | _from_environ(environ)
        return cls(config_dir=folder, **values)


def _config_dir(config_dir: Path | None, environ: Mapping[str, str]) -> Path:
    if config_dir is None and not environ.get("FLEET_CONFIG"):
        return DEFAULT_CONFIG_DIR
    folder = config_dir or Path(environ["FLEET_CONFIG"])
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; FLEET_CONFIG names the one that holds {_FILE} and models/."
        )
    return folder.resolve()


def _from_file(path: Path) -> dict[str, Any]:
    return _values(Table.read(path)) if path.exists() else {}


def _from_machine(folder: Path, machine: str) -> dict[str, Any]:
    """Read the table that ``machine`` names; every table of its file must be sound."""
    if not machine:
        return {}
    file, _, name = machine.partition(".")
    path = folder / f"{Path(file).name}.toml"
    if not path.exists():
        raise ConfigError(f"{_MACHINE} is {machine}, and there is no {path}.")
    table = Table.read(path)
    found = {known: _values(table.table(known)) for known in table.names()}
    if name not in found:
        raise ConfigError(
            f"{_MACHINE} is {machine}: {table.where} has no table {name!r}.{nearest(name, found)}"
        )
    return found[name]


def _values(table: Table) -> dict[str, Any]:
    values = {key: ask(table, key) for key, ask in _ASK.items() if key in table}
    # Ask for the rest too, so that a slip is compared with every key there is.
    for key in _ASK:
        table.raw(key)
    table.finish()
    return values


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {_ENV_PREFIX + key.upper(): key for key in _ASK}
    for name in environ:
        _refuse_slip(name, names)
    given = {name: environ[name].strip() for name in names if environ.get(name, "").strip()}
    table = Table("environment", {name: _toml_value(text) for name, text in given.items()})
    return {names[name]: _ASK[names[name]](table, name) for name in given}


def _toml_value(text: str) -> object:
    """Return what the file would hold for ``text``; words that TOML would quote stay text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _refuse_slip(name: str, names: Mapping[str, str]) -> None:
    """Refuse a variable that is nearly one of ours.

    Others are left alone: Kubernetes alone sets a dozen FLEET_* for a service called "fleet".
    """
    if not name.startswith(_ENV_PREFIX) or name in names or name in _READ_ELSEWHERE:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    if near:
        raise ConfigError(f"There is no setting {name}; did you mean {near[0]}?")


def _seconds(table: Table, key: str) -> float:
    return table.number(key, 0.0)


def _at_least_one(table: Table, key: str) -> int:
    return table.whole(key, 1, least=1)


def _names(table: Table, key: str) -> tuple[str, ...]:
    value = table.raw(key)
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return table.texts(key, ())


def _instances(table: Table, key: str) -> int | tuple[str, ...]:
    """Read ``all``, a number, or names of instances."""
    value = table.raw(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return table.whole(key, 0)
    if value in ("all", ""):
        return 0
    names = _names(table, key)
    for name in names:
        if not _INSTANCE.fullmatch(name):
            kinds = "GPU-..., MIG-... and cpu/0"
            raise table.error(
                key, f"must be all, a number, or names such as {kinds}, not {name!r}."
            )
    return names


def _driver(table: Table, key: str) -> DriverRange:
    value = table.raw(key)
    try:
        if isinstance(value, str):
            return DriverRange(value)
    except ValueError:
        pass
    raise table.error(key, f'must be bounds of versions such as "{SUPPORTED.text}", not {value!r}.')


#: Every setting, and how it is read from a table.
_ASK: Final[Mapping[str, Callable[[Table, str], Any]]] = {
    "models": _names,
    "instances": _instances,
    "slots_per_gpu": _at_least_one,
    "driver": _driver,
    "min_instances": lambda table, key: table.whole(key, 0),
    "target_drain_s": _seconds,
    "down_after_s": _seconds,
    "threads": _at_least_one,
    "claim_ttl_s": _seconds,
    "lease_ttl_s": _seconds,
    "grace_s": _seconds,
    "batch_timeout_s": _seconds,
    "max_attempts": _at_least_one,
    "result_ttl_s": _seconds,
    "fence_ttl_s": _seconds,
    "memory_limit_bytes": _at_least_one,
    "memory_first_chunk_bytes": _at_least_one,
    "events": lambda table, key: table.switch(key, default=True),
}


def _contradictions(settings: WorkerSettings) -> Iterator[str]:
    """Yield what cannot work together, each with the harm it would do."""
    if settings.claim_ttl_s < 3:
        yield (
            f"claim_ttl_s = {settings.claim_ttl_s:g} is below 3: a claim is renewed several times "
            "in that time, and one late renewal would have its job run twice."
        )
    if settings.lease_ttl_s < 3:
        yield (
            f"lease_ttl_s = {settings.lease_ttl_s:g} is below 3: one late renewal would give the "
            "instance to another worker while this one still runs on it."
        )
    most = settings.instances if isinstance(settings.instances, int) else len(settings.instances)
    if most and settings.min_instances > most:
        yield (
            f"min_instances = {settings.min_instances} is above instances = {most}: "
            "there would never be as many as are asked for."
        )
    for name in ("target_drain_s", "down_after_s"):
        if getattr(settings, name) <= 0:
            yield f"{name} must be above 0: instances would start and stop at every job."
    if settings.batch_timeout_s < 1:
        yield (
            f"batch_timeout_s = {settings.batch_timeout_s:g} is below 1: processes that only run a "
            "large batch would be ended as hung, and their jobs would become dead letters."
        )
    if settings.fence_ttl_s < 4 * settings.claim_ttl_s:
        yield (
            f"fence_ttl_s = {settings.fence_ttl_s:g} is below 4 * claim_ttl_s "
            f"({4 * settings.claim_ttl_s:g}): a claim could outlive the fence of its own job, and "
            "a job that was answered and read would run again."
        )
    if settings.result_ttl_s < settings.fence_ttl_s:
        yield (
            f"result_ttl_s = {settings.result_ttl_s:g} is below fence_ttl_s "
            f"({settings.fence_ttl_s:g}): an outcome that nobody read would be forgotten before "
            "one that was, and its job could run twice."
        )
    limit, first = settings.memory_limit_bytes, settings.memory_first_chunk_bytes
    if limit is not None and first is not None and first > limit:
        yield (
            f"memory_first_chunk_bytes = {first} is above memory_limit_bytes ({limit}): no model "
            "could be loaded."
        )
