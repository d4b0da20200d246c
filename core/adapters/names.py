"""Adapters by owner and name: which one a request's name stands for, how many there may be."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InvalidRequest
from ..lora_request import LoadAdapter
from .host_memory import Adapter

MAX_NAMES = 10_000
"""Adapters that are known by name; a list of them takes 50 ms."""


class AdapterNames:
    def __init__(self) -> None:
        self._adapters: dict[tuple[str, str], Adapter] = {}
        """Owner and name → adapter."""

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def of_owner(self, owner: str, name: str) -> Adapter | None:
        """Return an owner's own adapter; "": everyone's."""
        return self._adapters.get((owner, name))

    def get(self, name: str, tenant: str | None, shared: bool = True) -> Adapter | None:
        """Return what a name stands for, for a tenant: its own adapter before everyone's. None: any
        owner's, everyone's first."""
        if tenant is None:
            adapter = self.of_owner("", name)
            return adapter or next((each for each in self if each.name == name), None)
        own = self.of_owner(tenant, name)
        return own or (self.of_owner("", name) if shared else None)

    def named(self, name: str, int_id: int | None, tenant: str | None) -> Adapter | None:
        """Return the adapter of a number, or if that is None, of a name."""
        if int_id is None:
            return self.get(name, tenant)
        return next((a for a in self if a.int_id == int_id and tenant in (None, a.owner)), None)

    def add(self, adapter: Adapter) -> None:
        self._adapters[adapter.owner, adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        adapter.removed = True
        del self._adapters[adapter.owner, adapter.name]

    def check_new(self, job: LoadAdapter) -> None:
        """Raise InvalidRequest if there is no room for one more name, or none of the owner's."""
        owned = sum(adapter.owner == job.owner for adapter in self)
        if job.most is not None and owned >= job.most:
            raise InvalidRequest(
                f"lora_name: {owned} adapters of yours are loaded, and {job.most} may be; unload "
                "one first",
                param="lora_name",
            )
        self.make_room()

    def make_room(self) -> None:
        """Forget an adapter that a resolver would find again if there are too many. Raises
        InvalidRequest if there is none such."""
        if len(self) < MAX_NAMES:
            return
        for adapter in self:
            if adapter.resolved and adapter.loaded is None and adapter.reading is None:
                self.remove(adapter)
                return
        raise InvalidRequest(
            f"lora_name: {MAX_NAMES} adapters are loaded; unload one first", param="lora_name"
        )
