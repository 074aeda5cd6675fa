"""What the engines of a process take of its device, held against a limit of the configuration."""

from __future__ import annotations

from producer.contract.errors import ConfigError
from workers.models import ModelSpec


class DeviceBudget:
    """Bytes of weights and buffers by engine; the scratch block is one for all of them."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], int] = {}

    def take(self, spec: ModelSpec, precision: str, nbytes: int, *, scratch_bytes: int) -> None:
        """Note what an engine has taken; ConfigError where that is above `memory_limit_bytes`."""
        self._taken[spec.name, precision] = nbytes
        limit = spec.memory_limit_bytes
        if limit is None:
            return
        sharing = spec.memory_shared_by or (spec.name,)
        taken = {owner: size for owner, size in self._taken.items() if owner[0] in sharing}
        total = sum(taken.values()) + scratch_bytes
        if total > limit:
            largest = max(taken, key=lambda owner: taken[owner])
            raise ConfigError(
                f"{spec.name}: memory_limit_bytes is {limit}, but weights and buffers take {total} "
                f"on the GPU, {scratch_bytes} of it for batches; {' '.join(largest)} takes the "
                f"most, {taken[largest]}. Raise it, lower max_batch_size, or leave an engine out."
            )

    def give_back(self, spec: ModelSpec, precision: str) -> None:
        self._taken.pop((spec.name, precision), None)
