"""The configuration of a run: a TOML file and `--set section.key=value`. It imports without torch."""

from headrace.config.load import dump_config as dump_config
from headrace.config.load import load_config as load_config
from headrace.config.load import make_config as make_config
from headrace.config.load import with_settings as with_settings
from headrace.config.schema import AgentTaskConfig as AgentTaskConfig
from headrace.config.schema import Config as Config
from headrace.config.schema import DatasetTaskConfig as DatasetTaskConfig
from headrace.config.schema import EngineConfig as EngineConfig
from headrace.config.schema import EnvironmentTaskConfig as EnvironmentTaskConfig
from headrace.config.schema import GymTaskConfig as GymTaskConfig
from headrace.config.schema import MixtureConfig as MixtureConfig
from headrace.config.schema import TaskConfig as TaskConfig
from headrace.config.scorers import FunctionScorerConfig as FunctionScorerConfig
from headrace.config.scorers import JudgeConfig as JudgeConfig
from headrace.config.scorers import ProgramConfig as ProgramConfig
from headrace.config.scorers import ScorerConfig as ScorerConfig
from headrace.config.scorers import TeacherConfig as TeacherConfig
