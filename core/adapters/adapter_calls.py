"""The methods of `AsyncEngine` for adapters (LoRA) by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..lora_request import (
    AdapterCard,
    AdapterJob,
    AdapterRef,
    FindAdapter,
    ListAdapters,
    LoadAdapter,
    LoRARequest,
    PinAdapter,
    UnloadAdapter,
)


class AdapterCalls(ABC):
    """Each is an `AdapterJob`."""

    @abstractmethod
    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do a job on the engine's adapters, and return what it says. Raises as it says."""

    async def add_lora(
        self, lora_request: LoRARequest, *, owner: str = "", pinned: bool = False
    ) -> AdapterCard:
        """Load an adapter, or with `load_inplace` another content under its name, for requests from
        now on.

        owner: the only tenant that may use it (`Tenant.owner`); "": everyone may. Raises
        InvalidRequest if it cannot be served, or its name is taken.
        """
        job = LoadAdapter(
            name=lora_request.lora_name,
            path=lora_request.lora_path,
            load_inplace=lora_request.load_inplace,
            parent=lora_request.base_model_name,
            owner=owner,
            int_id=lora_request.lora_int_id,
            pinned=pinned,
        )
        return await self.load_adapter(job)

    async def load_adapter(self, job: LoadAdapter) -> AdapterCard:
        """Load an adapter, of which more can be said. Raises InvalidRequest."""
        [card] = await self.ask_adapters(job)
        return card

    async def remove_lora(self, lora: int | str, *, tenant: str | None = None) -> bool:
        """Forget an adapter, by its `lora_int_id` or its name; requests that have it go on, and its
        memory is free when the last of them ends.

        tenant: whose it must be; None: anyone's. Return whether there was such an adapter.
        """
        return bool(await self.ask_adapters(UnloadAdapter(**_identified(lora), tenant=tenant)))

    async def pin_lora(self, lora: int | str, *, pinned: bool = True) -> bool:
        """Keep an adapter in the device's memory, or no longer. Return whether there is such an
        adapter. Raises InvalidRequest if others would have no room."""
        return bool(await self.ask_adapters(PinAdapter(**_identified(lora), pinned=pinned)))

    async def find_adapter(self, ref: AdapterRef) -> AdapterCard:
        """Return the adapter that a request would use, which a resolver may find. Raises
        ModelNotFound."""
        [card] = await self.ask_adapters(FindAdapter(ref=ref))
        return card

    async def list_loras(self) -> list[AdapterCard]:
        """Return the adapters that are known, by name; none without `enable_lora`."""
        return await self.ask_adapters(ListAdapters())


def _identified(lora: int | str) -> dict[str, Any]:
    return {"int_id": lora} if isinstance(lora, int) else {"name": lora}
