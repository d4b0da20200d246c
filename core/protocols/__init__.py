"""Typed contracts of the plugin kinds that the hooks of `hooks.py` register.

One module per kind; plugins import from here. Everything is structural typing or a small ABC;
docstrings name shapes, units and errors.
"""

from __future__ import annotations

from .adapters import AdapterFormat, AdapterResolver
from .all2all import All2All, All2AllSetup, Dispatched
from .attention import (
    AttentionBackend,
    AttentionSpec,
    BackendSetup,
    LayerSpec,
    PagedBackend,
    ProjectedLayer,
    Projection,
)
from .audio import SpeechChat
from .collectives import Collectives, CollectivesSetup
from .executors import (
    EngineHosts,
    EngineProcess,
    Executor,
    ExecutorInfo,
    RankState,
    SchedulePolicy,
)
from .grammars import Grammar, GrammarBackend, GrammarMatcher, GrammarSpec, Vocabulary
from .kv import KVConnector, KVConnectorScheduler, KVConnectorSetup, KVConnectorWorker, KVLayout
from .kv_compressors import KVCompressor
from .latent_attention import ChosenTokens, LatentAttentionBackend, LatentAttentionSpec
from .loaders import CheckpointFormat, WeightLoader
from .logits_processors import LogitsProcessor, LogitsProcessorSetup, ProcessedRows
from .media import (
    AudioProcessor,
    ImageProcessor,
    MediaEncoder,
    MediaModel,
    MediaProcessor,
    MediaSetup,
    ProcessedMedia,
    RopeSections,
    Spans,
)
from .models import CheckpointConfig, Model, PlainConfig, PoolingModel
from .parsers import (
    ArgumentForm,
    CallForm,
    CallText,
    Content,
    ParserEvent,
    PlainText,
    Reasoning,
    ReasoningParser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from .parts import PartSetup, StepPart
from .quantization import QuantizationMethod
from .speculators import (
    ComputedTokens,
    DraftRows,
    Drafts,
    DraftSite,
    KnownTokens,
    RequestText,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)

__all__ = [
    "AdapterFormat",
    "AdapterResolver",
    "All2All",
    "All2AllSetup",
    "ArgumentForm",
    "AttentionBackend",
    "AttentionSpec",
    "AudioProcessor",
    "BackendSetup",
    "CallForm",
    "CallText",
    "CheckpointConfig",
    "CheckpointFormat",
    "ChosenTokens",
    "Collectives",
    "CollectivesSetup",
    "ComputedTokens",
    "Content",
    "Dispatched",
    "DraftRows",
    "DraftSite",
    "Drafts",
    "EngineHosts",
    "EngineProcess",
    "Executor",
    "ExecutorInfo",
    "Grammar",
    "GrammarBackend",
    "GrammarMatcher",
    "GrammarSpec",
    "ImageProcessor",
    "KVCompressor",
    "KVConnector",
    "KVConnectorScheduler",
    "KVConnectorSetup",
    "KVConnectorWorker",
    "KVLayout",
    "KnownTokens",
    "LatentAttentionBackend",
    "LatentAttentionSpec",
    "LayerSpec",
    "LogitsProcessor",
    "LogitsProcessorSetup",
    "MediaEncoder",
    "MediaModel",
    "MediaProcessor",
    "MediaSetup",
    "Model",
    "PagedBackend",
    "ParserEvent",
    "PartSetup",
    "PlainConfig",
    "PlainText",
    "PoolingModel",
    "ProcessedMedia",
    "ProcessedRows",
    "ProjectedLayer",
    "Projection",
    "QuantizationMethod",
    "RankState",
    "Reasoning",
    "ReasoningParser",
    "RequestText",
    "RopeSections",
    "SchedulePolicy",
    "Spans",
    "Speculator",
    "SpeculatorNeeds",
    "SpeculatorSetup",
    "SpeechChat",
    "StepPart",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolParser",
    "Vocabulary",
    "WeightLoader",
]
