"""When the trainer publishes a teacher that follows it, and which answers it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import make_config
from headrace.training.serving import TeacherPublisher

SETTINGS = ["algorithm.teacher_weight=1", "scorers.self.kind=teacher", "scorers.self.policy=ema"]
SETTINGS += ["scorers.self.every=3", "delivery.transport=file", "delivery.deadline=0.5"]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[TeacherPublisher]:
    config = make_config({"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}, SETTINGS)
    built: Any = SimpleNamespace(trainer=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=9))))
    made = TeacherPublisher(config, built, tmp_path, "self", 0, "")
    yield made
    made.close()


def publish(publisher: TeacherPublisher, version: int) -> None:
    weights = {"a": torch.full((4,), float(version))}

    def canary(token_ids: Any) -> Any:
        return np.zeros(len(token_ids) - 1, np.float32)

    assert publisher.publish(version, version, weights, canary).result(timeout=5).version == version


def test_a_teacher_is_due_by_the_number_of_versions(publisher: TeacherPublisher) -> None:
    # The first version is due in any case: the process of a resumed run has none.
    assert publisher.due(4)
    publish(publisher, 4)
    publisher.answered(4)
    assert [count for count in range(5, 12) if publisher.due(count)] == list(range(6, 12))
    publish(publisher, 9)
    assert not publisher.due(12), "version 9 has no answer yet"
    publisher.answered(9)
    assert publisher.due(13), "it was due before"


def test_an_answer_to_an_earlier_version_is_not_one_to_the_newest(publisher: TeacherPublisher) -> None:
    publish(publisher, 1)
    publisher.answered(1)
    assert publisher.due(3)
    publish(publisher, 2)
    # The process was restarted, and has loaded the version before once more.
    publisher.answered(1)
    assert not publisher.due(6)
    publisher.answered(2)
    for version in range(3, 9):
        assert publisher.due(3 * version)
        publish(publisher, version)
        publisher.answered(version)
