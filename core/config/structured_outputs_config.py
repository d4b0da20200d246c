"""Options of structured outputs: `EngineConfig.structured_outputs_config`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .annotations import doc


class StructuredOutputsConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of structured outputs. The first two names are vLLM's."""

    backend: Annotated[
        str,
        doc("Grammar backend by name; auto: the best one for each grammar.", min_length=1),
    ] = "auto"
    disable_any_whitespace: Annotated[
        bool, doc("JSON in one line: one space after each comma and colon, none elsewhere.")
    ] = False
    max_grammar_bytes: Annotated[
        int, doc("Largest schema, expression or grammar of a request, in bytes.", ge=1)
    ] = 131072
    max_grammar_depth: Annotated[
        int, doc("Deepest nesting of a schema, expression or grammar.", ge=1, le=500)
    ] = 64
    max_grammar_references: Annotated[
        int,
        doc("Longest chain of a schema's references or a grammar's rules.", ge=1, le=1000),
    ] = 256
    compile_timeout: Annotated[
        float, doc("Seconds that a grammar may take to compile.", gt=0.0, le=3600.0)
    ] = 10.0
    compile_memory: Annotated[
        float,
        doc("GiB that a sandbox process, which tries grammars, may add.", gt=0.0, le=1024.0),
    ] = 2.0
    compile_threads: Annotated[int, doc("Grammars compiled at once.", ge=1, le=64)] = 2
    cache_size: Annotated[int, doc("Compiled grammars kept.", ge=1)] = 256
    mask_timeout: Annotated[
        float,
        doc(
            "Seconds of processor time that one token's mask may take; a slower request fails "
            "alone.",
            gt=0.0,
        ),
    ] = 0.5
