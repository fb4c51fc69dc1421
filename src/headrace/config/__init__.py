"""The configuration of a run: a TOML file and `--set section.key=value`. It imports without torch."""

from headrace.config.load import dump_config, load_config, make_config, with_settings
from headrace.config.schema import (
    AgentTaskConfig,
    Config,
    DatasetTaskConfig,
    EngineConfig,
    EnvironmentTaskConfig,
    GymTaskConfig,
    ScorerConfig,
)

__all__ = [
    "AgentTaskConfig",
    "Config",
    "DatasetTaskConfig",
    "EngineConfig",
    "EnvironmentTaskConfig",
    "GymTaskConfig",
    "ScorerConfig",
    "dump_config",
    "load_config",
    "make_config",
    "with_settings",
]
