"""The file side of checkpoints: whole or absent, whatever happens in between."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config.file_digests import find_damage
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


def write_steps(directory, *policy_steps):
    return [
        write_checkpoint(
            directory, TrainerState(steps_done=steps, policy_steps=steps), lambda path: (path / "a").write_text("b")
        )
        for steps in policy_steps
    ]


def test_friction_34_what_is_ahead_of_the_journal_is_set_aside(tmp_path):
    write_steps(tmp_path, 3, 5, 7)
    assert checkpoint.set_aside(tmp_path, 7) == []
    assert names(tmp_path) == ["step-00000003", "step-00000005", "step-00000007"]
    assert checkpoint.set_aside(tmp_path, 6) == [
        "step-00000007: it is of step 7, and the journal ends at step 6; it is kept as ahead-step-00000007 and not used"
    ]
    write_steps(tmp_path, 7)
    assert len(checkpoint.set_aside(tmp_path, 6)) == 1
    assert names(tmp_path) == ["ahead-step-00000007", "ahead-step-00000007-2", "step-00000003", "step-00000005"]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["ahead-step-00000007", "ahead-step-00000007-2", "step-00000005"], "nothing is lost"
    assert latest(tmp_path) == tmp_path / "step-00000005"
    assert checkpoint.set_aside(tmp_path / "nowhere", 0) == []


@pytest.mark.parametrize("name", ["a", "trainer/state.json", "SHA256SUMS"])
def test_friction_30_a_flipped_bit_is_named_and_the_checkpoint_before_is_used(tmp_path, name):
    good, bad = write_steps(tmp_path, 3, 5)
    content = bytearray((bad / name).read_bytes())
    # Of `state.json`, the last digit of a counter: it stays valid JSON.
    content[content.rindex(b"5") if name.endswith(".json") else 0] ^= 1
    (bad / name).write_bytes(content)
    (line,) = checkpoint.set_aside(tmp_path, 5)
    assert line.startswith("step-00000005: ") and ("has other bytes than were written" in line or "SHA256SUMS" in line)
    assert name in line or name == "SHA256SUMS"
    assert latest(tmp_path) == good and (tmp_path / "damaged-step-00000005").is_dir()


def test_an_empty_list_of_digests_is_damage(tmp_path):
    newest = write(tmp_path, 5)
    (newest / "SHA256SUMS").write_text("")
    assert find_damage(newest) == find_damage(newest, everything=False) == "SHA256SUMS is empty"


@pytest.mark.parametrize("lost", ["a", "trainer/state.json", "SHA256SUMS"])
def test_friction_30_a_missing_file_is_named(tmp_path, lost):
    good, bad = write_steps(tmp_path, 3, 5)
    (bad / lost).unlink()
    (line,) = checkpoint.set_aside(tmp_path, None)
    assert line == f"step-00000005: {lost} is missing; it is kept as damaged-step-00000005 and not used"
    assert latest(tmp_path) == good


def test_friction_35_a_damaged_header_is_named_also_where_no_digests_are(tmp_path):
    good, bad = write(tmp_path, 3), write(tmp_path, 5)
    for one in (good, bad):
        save_file({"w": np.zeros(3)}, one / "model.safetensors")
        save_file({"w": np.zeros(3)}, one / "trainer" / "optimizer.safetensors")
        (one / "SHA256SUMS").unlink()
        files = {name: (one / name).stat().st_size for name in ("model.safetensors", "trainer/optimizer.safetensors")}
        record = {"format": 1, "state": {}, "files": files}
        (one / "trainer" / "state.json").write_text(json.dumps(record))
    with (bad / "model.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"####")
    (line, _) = checkpoint.set_aside(tmp_path, None)
    assert "model.safetensors is not a safetensors file: its header is damaged" in line
    assert latest(tmp_path) == good


def test_a_checkpoint_of_the_format_without_digests_is_used_and_this_is_said(tmp_path):
    (old,) = write_steps(tmp_path, 3)
    (old / "SHA256SUMS").unlink()
    state = old / "trainer" / "state.json"
    state.write_text(state.read_text().replace('"format": 2', '"format": 1'))
    assert checkpoint.set_aside(tmp_path, 3) == [
        "step-00000003 is of an older version and has no digests: only sizes were compared"
    ]
    assert latest(tmp_path) == old


def test_the_digests_are_those_of_sha256sum(tmp_path):
    (saved,) = write_steps(tmp_path, 3)
    lines = dict(reversed(line.split("  ")) for line in (saved / "SHA256SUMS").read_text().splitlines())
    assert lines == {
        name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in ("a", "trainer/state.json")
    }
