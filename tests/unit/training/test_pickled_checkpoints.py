"""Checkpoints of the older format, shards with a pickled index: converted, and never executed."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil

import pytest
import torch
from random_models import model_dir, random_batch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_shards
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.config import dump_config, make_config
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.errors import UserError
from headrace.models.loading import load_model
from headrace.training.checkpoints.base import damage_of, latest, read_state
from headrace.training.checkpoints.convert import convert_checkpoint
from headrace.training.checkpoints.export import export_checkpoint
from headrace.training.trainer import Trainer


def trainer_of(path):
    return Trainer(
        load_model(path),
        AlgorithmConfig(kl="k3", kl_weight=0.5),
        TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32),
        total_steps=5,
        warm_start=WarmStartConfig(steps=1, learning_rate=5e-3),
    )


@pytest.fixture(params=["llama", "mixtral"])
def run(request, tmp_path):
    """A run directory with a checkpoint as several ranks wrote it, and the trainer that it was made of."""
    path = model_dir(tmp_path / "model", request.param)
    trainer = trainer_of(path)
    trainer.step(random_batch(1, step=1, objective="imitation"))
    trainer.step(random_batch(2, step=2))
    run_dir = tmp_path / "run"
    saved = trainer.save(run_dir / "checkpoints", version=7, source=path)
    task = {"kind": "dataset", "path": "none.jsonl", "reward": "none:none"}
    (run_dir / "config.toml").write_text(dump_config(make_config({"model": {"path": str(path)}, "task": task})))
    tensors = {f"model/{name}": tensor for name, tensor in trainer.weights().items()}
    for kind in ("optimizer", "reference"):
        from safetensors.torch import load_file

        file = saved / "trainer" / f"{kind}.safetensors"
        tensors |= {f"{kind}/{name}": tensor for name, tensor in load_file(file).items()}
        file.unlink()
    (saved / "model.safetensors").unlink()
    save_shards(tensors, storage_writer=FileSystemWriter(saved / "trainer" / "shards"), no_dist=True)
    as_older_format(saved)
    return run_dir, saved, trainer


def as_older_format(saved):
    """Make the list of files anew, as format 1 has it."""
    (saved / "SHA256SUMS").unlink(missing_ok=True)
    record = json.loads((saved / "trainer" / "state.json").read_text())
    files = [file for file in saved.rglob("*") if file.is_file() and file.name != "state.json"]
    record |= {"format": 1, "files": {str(file.relative_to(saved)): file.stat().st_size for file in files}}
    (saved / "trainer" / "state.json").write_text(json.dumps(record))


def test_friction_36_a_converted_checkpoint_goes_on_as_the_old_one_would(run, tmp_path):
    run_dir, saved, trainer = run
    with pytest.raises(UserError, match=f"`headrace convert {run_dir}` writes it anew"):
        trainer_of(tmp_path / "model").load(saved)
    with pytest.raises(UserError, match="`headrace convert"):
        export_checkpoint(saved, tmp_path / "out", "hf")
    told = CliRunner().invoke(app, ["convert", str(run_dir)])
    assert told.exit_code == 0, told.output
    assert "step-00000002 is written anew in safetensors; the old one is kept as pickled-step-00000002" in told.output
    assert latest(run_dir / "checkpoints") == saved and not damage_of(saved) and read_state(saved).version == 7
    assert (saved.with_name("pickled-step-00000002") / "trainer" / "shards").is_dir()
    again = trainer_of(tmp_path / "model")
    again.load(saved)
    assert all(torch.equal(again.weights()[name], tensor) for name, tensor in trainer.weights().items())
    assert again.step(random_batch(3, step=3)).loss == trainer.step(random_batch(3, step=3)).loss
    assert load_model(export_checkpoint(saved, tmp_path / "out", "hf")) is not None
    assert "no checkpoint has to be converted" in CliRunner().invoke(app, ["convert", str(run_dir)]).output


class Evil:
    """What a stranger may put into a pickle: a call that leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


def test_friction_36_a_prepared_index_executes_nothing(run, tmp_path):
    run_dir, saved, _ = run
    trace = tmp_path / "executed"
    index = saved / "trainer" / "shards" / ".metadata"
    index.write_bytes(pickle.dumps(Evil(trace)))
    as_older_format(saved)
    before = hashlib.sha256(index.read_bytes()).hexdigest()
    with pytest.raises(UserError, match="nothing of it was executed"):
        convert_checkpoint(saved)
    for command in (["convert", str(run_dir)], ["export", str(run_dir), "--to", "hf"]):
        assert CliRunner().invoke(app, command).exit_code != 0
    assert not trace.exists()
    assert hashlib.sha256(index.read_bytes()).hexdigest() == before and latest(run_dir / "checkpoints") == saved


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1})])
def test_friction_36_an_index_that_is_none_is_one_line(run, content):
    _, saved, _ = run
    (saved / "trainer" / "shards" / ".metadata").write_bytes(content)
    as_older_format(saved)
    with pytest.raises(UserError, match="is not an index of shards"):
        convert_checkpoint(saved)


def test_friction_36_damaged_shards_are_one_line(run):
    _, saved, _ = run
    [shard] = (saved / "trainer" / "shards").glob("*.distcp")
    shard.write_bytes(io.BytesIO(b"x" * shard.stat().st_size).read())
    with pytest.raises(UserError, match="cannot be converted"):
        convert_checkpoint(saved)
    shutil.rmtree(saved)
