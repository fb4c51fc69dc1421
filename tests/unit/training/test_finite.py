"""A batch with a number that is not finite ends in one line, before anything is computed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from random_models import model_dir, poisoned, random_batch

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.errors import HeadraceError
from headrace.models.loading import load_model
from headrace.training.finite import check_numbers
from headrace.training.trainer import Trainer
from headrace.types import Batch, TeacherScores

K = 3


def taught() -> Batch:
    batch = random_batch(1)
    scores = TeacherScores.of_unscored(len(batch.token_ids), K)
    scores.versions[:] = 0
    heat = np.where(batch.trained, 0.9, 0.0).astype(np.float32)
    return msgspec.structs.replace(batch, teacher=scores, temperatures=heat, rewards=np.zeros_like(batch.weights))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("logprobs", "recorded log-probability"),
        ("advantages", "advantage"),
        ("weights", "weight"),
        ("rewards", "reward"),
        ("teacher.logprobs", "teacher's log-probability"),
        ("teacher.top_logprobs", "teacher's log-probability of its likeliest tokens"),
    ],
)
def test_the_line_names_the_token(field: str, said: str, value: float) -> None:
    batch = taught()
    owner: Any = batch.teacher if "." in field else batch
    values = getattr(owner, field.rpartition(".")[2])
    first = int(batch.lengths[0])
    at = first + int(np.flatnonzero(batch.trained[first:])[0])
    # Numbers of tokens that are not trained have no meaning.
    values[~batch.trained] = value
    check_numbers(batch)
    values.reshape(len(values), -1)[at, -1] = value
    line = f"step 1: the {said} of token {at - first} of sequence 1 is {value}, which is no number to train on"
    with pytest.raises(HeadraceError, match=f"^{line}$"):
        check_numbers(batch)


def test_a_tail_may_have_no_probability_and_a_temperature_is_above_zero() -> None:
    batch = taught()
    assert batch.teacher is not None and batch.temperatures is not None
    batch.teacher.tails[:] = -np.inf
    check_numbers(batch)
    batch.teacher.tails[batch.trained] = np.nan
    with pytest.raises(HeadraceError, match="the teacher's tail of token"):
        check_numbers(batch)
    batch.teacher.tails[:] = 0.0
    batch.temperatures[:] = 0.0
    with pytest.raises(HeadraceError, match="the temperature of token"):
        check_numbers(batch)
    with pytest.raises(HeadraceError, match=r"the batch has the temperature 0\.0"):
        check_numbers(msgspec.structs.replace(random_batch(1), temperature=0.0))
    # Numbers that are large are not refused: whether a loss is finite shows when it is computed.
    check_numbers(poisoned(random_batch(1)))
    nothing = random_batch(1)
    nothing.trained[:] = False
    check_numbers(nothing)


def test_a_trainer_refuses_such_a_batch(tmp_path: Any) -> None:
    model = load_model(model_dir(tmp_path / "model"))
    trainer = Trainer(model, AlgorithmConfig(), TrainingConfig(), total_steps=9, warm_start=WarmStartConfig())
    batch = random_batch(1)
    batch.logprobs[np.flatnonzero(batch.trained)[0]] = np.nan
    with pytest.raises(HeadraceError, match="step 1: the recorded log-probability of token"):
        trainer.step(batch)
    assert trainer.steps_done == 0
