"""Makes an engine's scheduler, by configuration and worker."""

from __future__ import annotations

from collections.abc import Callable

from ..config import EngineConfig
from ..errors import PluginError
from ..loading.model_config import ModelConfig
from ..protocols.executors import ExecutorInfo, SchedulePolicy
from ..registry import Plugins
from ..scheduling.parts.guarded_connector import GuardedConnector
from ..scheduling.scheduler import Scheduler
from .admission import request_limits
from .other_engines import OtherEngines
from .scheduler_parts import scheduler_parts


def make_scheduler(
    config: EngineConfig,
    model_config: ModelConfig,
    info: ExecutorInfo,
    plugins: Plugins,
    connector: GuardedConnector | None,
    engines: OtherEngines | None,
    describe: Callable[[Exception], str],
) -> Scheduler:
    """engines: with which this one has rounds; None: none. describe: see `Scheduler`. Raises
    ConfigError and PluginError.
    """
    limits = request_limits(config, model_config, info)
    return Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_blocks=info.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        policy=_schedule_policy(config.scheduling_policy, plugins),
        policy_name=plugins["schedule_policy"].described(config.scheduling_policy),
        hash_key=None if info.kv_layout is None else info.kv_layout.fingerprint,
        groups=info.cache_groups,
        num_snapshots=info.num_snapshots,
        parts=scheduler_parts(
            config, info, limits.max_model_len, connector, plugins, model_config.media, engines
        ),
        ttft_target=config.ttft_target_ms / 1000,
        itl_target=config.itl_target_ms / 1000,
        describe=describe,
    )


def _schedule_policy(name: str, plugins: Plugins) -> SchedulePolicy:
    """Return a new schedule policy. Raises PluginError."""
    registry = plugins["schedule_policy"]
    policy_class = registry.load(name)
    try:
        policy: SchedulePolicy = policy_class()
        if not callable(policy.key):
            raise TypeError("`key` cannot be called")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(f"{registry.described(name)} cannot be made: {reason}") from error
    return policy
