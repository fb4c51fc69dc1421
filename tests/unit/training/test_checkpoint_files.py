"""The file side of checkpoints: whole or absent, whatever happens in between."""

from __future__ import annotations

import pytest

from headrace.errors import UserError
from headrace.training.checkpoints import base as checkpoint
from headrace.training.checkpoints.base import TrainerState, clean, copy_companions, latest, prune, read_state


def write_checkpoint(directory, state, fill):
    partial = checkpoint.partial_path(directory, state)
    checkpoint.begin_checkpoint(partial)
    fill(partial)
    return checkpoint.finish_checkpoint(partial, state)


def write(directory, steps, content="weights"):
    def fill(path):
        (path / "model.safetensors").write_text(content)
        (path / "trainer" / "optimizer.safetensors").write_text("moments")

    return write_checkpoint(directory, TrainerState(steps_done=steps), fill)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_found_and_says_where_it_stood(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    write(tmp_path, 9)
    newest = write(tmp_path, 10)
    assert latest(tmp_path) == newest == tmp_path / "step-00000010"
    assert read_state(newest) == TrainerState(steps_done=10)
    assert names(tmp_path) == ["step-00000009", "step-00000010"]


@pytest.mark.parametrize("failing", ["write", "sync", "rename"])
def test_a_crash_while_writing_leaves_the_old_one(tmp_path, monkeypatch, failing):
    kept = write(tmp_path, 1)

    class Crash(BaseException):
        pass

    def crash(*args, **kwargs):
        raise Crash

    with monkeypatch.context() as broken, pytest.raises(Crash):
        if failing == "write":
            write_checkpoint(tmp_path, TrainerState(steps_done=2), crash)
        elif failing == "sync":
            broken.setattr("os.fsync", crash)
            write(tmp_path, 2)
        else:
            broken.setattr(type(tmp_path), "rename", crash)
            write(tmp_path, 2)
    assert latest(tmp_path) == kept
    assert len(names(tmp_path)) == 2
    clean(tmp_path)
    assert names(tmp_path) == [kept.name]
    assert latest(tmp_path) == kept
    assert write(tmp_path, 2) == latest(tmp_path)


def test_a_damaged_checkpoint_is_not_taken_for_whole(tmp_path):
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    (bad / "model.safetensors").write_text("weig")
    assert latest(tmp_path) == good
    with pytest.raises(UserError, match="step-00000002 is not a complete checkpoint"):
        read_state(bad)
    bad = write(tmp_path, 3)
    (bad / "trainer" / "optimizer.safetensors").unlink()
    assert latest(tmp_path) == good
    bad = write(tmp_path, 4)
    (bad / "trainer" / "state.json").write_text('{"format": 1')
    assert latest(tmp_path) == good


def test_the_same_step_again_replaces_the_old_branch(tmp_path):
    write(tmp_path, 5, "old")
    again = write(tmp_path, 5, "new branch")
    assert (again / "model.safetensors").read_text() == "new branch"
    assert names(tmp_path) == ["step-00000005"]


def test_pruning_keeps_the_newest(tmp_path):
    for steps in (3, 20, 100_000_000, 7):
        write(tmp_path, steps)
    (tmp_path / "notes.txt").write_text("not ours")
    for _ in range(2):
        prune(tmp_path, 2)
        assert names(tmp_path) == ["notes.txt", "step-00000020", "step-100000000"]


def test_companions_are_copied_and_weights_are_not(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    companions = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
    ]
    others = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "config.json", "README.md"]
    for name in companions + others:
        (source / name).write_text(name)
    copy_companions(source, target)
    assert names(target) == sorted(companions)
    assert all((target / name).read_text() == name for name in companions)


def test_what_is_ahead_of_the_journal_is_deleted_and_what_is_incomplete_is_named(tmp_path):
    for steps in (3, 5, 7):
        write_checkpoint(
            tmp_path, TrainerState(steps_done=steps + 2, policy_steps=steps), lambda path: (path / "a").write_text("b")
        )
    assert checkpoint.incomplete(tmp_path) == []
    checkpoint.delete_ahead(tmp_path, 7)
    assert names(tmp_path) == ["step-00000005", "step-00000007", "step-00000009"]
    checkpoint.delete_ahead(tmp_path, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000007"]
    (tmp_path / "step-00000007" / "a").write_text("longer")
    assert checkpoint.incomplete(tmp_path) == ["step-00000007"]
    assert latest(tmp_path) == tmp_path / "step-00000005"
    checkpoint.delete_ahead(tmp_path / "nowhere", 0)
    assert checkpoint.incomplete(tmp_path / "nowhere") == []
