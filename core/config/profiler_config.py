"""Options of profiles: `EngineConfig.profiler_config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .annotations import doc


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of profiles. Names are vLLM's, but `max_seconds`."""

    profiler: Annotated[
        Literal["torch"] | None, doc("Kind of profile, as vLLM has it; torch is the one there is.")
    ] = None
    torch_profiler_dir: Annotated[
        str | None, doc("Folder for traces of /start_profile; default: no profiles.")
    ] = None
    torch_profiler_with_stack: Annotated[bool, doc("Trace Python's calls, too.")] = False
    torch_profiler_record_shapes: Annotated[bool, doc("Note the shapes of operations.")] = False
    torch_profiler_with_memory: Annotated[bool, doc("Note allocations.")] = False
    max_iterations: Annotated[int, doc("Steps after which a profile ends.", ge=1, le=10000)] = 200
    max_seconds: Annotated[float, doc("Seconds after which a profile ends.", gt=0.0, le=600.0)] = (
        60.0
    )
