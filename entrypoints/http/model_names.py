"""What a request's `model` may name: the base model, or an adapter that its tenant may use."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, ModelNotFound
from ...core.lora_request import AdapterCard, AdapterRef, check_adapter_name, unknown_adapter
from ...core.tenancy import Tenant


async def find_adapter(
    engine: AsyncEngine, name: str | None, tenant: Tenant, implied_tag: str = ""
) -> AdapterRef | None:
    """Return the adapter that a request's `model` names; None: it names the base model.

    Besides an adapter's name, "base:adapter" is one, as in SGLang. implied_tag: an ending of names
    that means nothing, unless a served name has it. Raises ModelNotFound, with the same message for
    an adapter that the tenant may not use and one that nobody has.
    """
    names = engine.served_model_names
    if name is not None and name not in names and implied_tag:
        name = name.removesuffix(implied_tag)
    if name is None or name in names:
        return None
    if engine.config.enable_lora:
        base, _, adapter = name.partition(":")
        for each in (name, adapter) if base in names and adapter else (name,):
            ref = AdapterRef(each, tenant=tenant.owner, shared=tenant.limits.may_use(each))
            if await _is_there(engine, ref):
                return ref
    raise unknown_adapter(name, names)


async def _is_there(engine: AsyncEngine, ref: AdapterRef) -> bool:
    try:
        check_adapter_name(ref.name, engine.served_model_names)
        await engine.find_adapter(ref)
    except InvalidRequest:  # A name that no adapter can have.
        return False
    except ModelNotFound:
        return False
    return True


def model_name(engine: AsyncEngine, name: str | None) -> str:
    """Return the response's model name: the request's, which `find_adapter` has found."""
    return engine.served_model_names[0] if name is None else name


def usable(cards: Iterable[AdapterCard], tenant: Tenant) -> list[AdapterCard]:
    """Return the adapters that a tenant may use, its own before everyone's of the same name."""
    card_of: dict[str, AdapterCard] = {}
    for card in cards:
        if card.owner == tenant.owner:
            card_of[card.name] = card
        elif not card.owner and tenant.limits.may_use(card.name):
            card_of.setdefault(card.name, card)
    return list(card_of.values())
