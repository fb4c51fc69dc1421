"""Rollouts are made from tokens: the turn loop, groups and evaluation."""

from headrace.rollouts.base import ChatFormat, derive_seed
from headrace.rollouts.evaluation import EvaluatedAnswer, EvaluationResult, evaluate
from headrace.rollouts.groups import cancel_group, discard_group, prepare_group, run_group
from headrace.rollouts.turns import Episode

__all__ = [
    "ChatFormat",
    "Episode",
    "EvaluatedAnswer",
    "EvaluationResult",
    "cancel_group",
    "derive_seed",
    "discard_group",
    "evaluate",
    "prepare_group",
    "run_group",
]
