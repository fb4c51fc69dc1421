"""Broken files of a model: each is one line that names the file, and no tensor is made up in silence."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

sys.path += [str(Path(__file__).parents[1] / "training"), str(Path(__file__).parents[2] / "attack")]

from mutations import as_json, damaged, mutated_json
from random_models import model_dir

from headrace.config.model_dir import INDEX, WEIGHTS, check_model_dir, model_facts
from headrace.errors import ModelError
from headrace.models.loading import load_model
from headrace.review.recompute import PlainModel
from headrace.tasks.chat import ChatFormat

TOKENIZER = Path(__file__).parents[2] / "data" / "tiny_model"
FAMILIES = ("llama", "qwen3", "mixtral")
"""A tied head, an untied head, and experts that transformers renames."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {family: model_dir(directory / family, family) for family in FAMILIES}


@pytest.fixture
def model(models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the model with a tied head, with its weights in two files."""
    path = tmp_path / "model"
    shutil.copytree(models["llama"], path)
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (at >= 4)}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        model_facts(path, "load")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path: Path, family: str, models: dict[str, Path], edit) -> Path:
    shutil.copytree(models[family], path)
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_loaded_and_counted(models, family):
    loaded = load_model(models[family])
    counted = sum(p.numel() for p in loaded.parameters())
    assert model_facts(models[family], "load").parameters == counted


@pytest.mark.parametrize("family", FAMILIES)
def test_friction_31_a_missing_tensor_is_refused(models, tmp_path, family):
    path = change(tmp_path / "model", family, models, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"do not fit its config\.json: model\.norm\.weight is missing$"):
        load_model(path)


def test_friction_31_an_untied_head_may_not_be_missing_and_a_tied_one_may(models, tmp_path):
    path = change(tmp_path / "untied", "qwen3", models, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_model(path)
    assert "lm_head.weight" not in load_file(models["llama"] / WEIGHTS)
    written = change(
        tmp_path / "tied",
        "llama",
        models,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    for path in (written, models["llama"]):
        tied = load_model(path)
        assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_friction_31_another_shape_and_an_unknown_tensor_are_refused(models, tmp_path):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors["model.surplus"] = torch.zeros(2)

    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[\d+\] and not \[\d+\] \(and 1 more"):
        load_model(change(tmp_path / "cut", "llama", models, cut))
    surplus = change(tmp_path / "surplus", "llama", models, lambda t: t.update({"model.surplus": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"the model has no model\.surplus$"):
        load_model(surplus)


def test_friction_31_rotary_frequencies_in_old_files_are_ignored(models, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = change(tmp_path / "model", "llama", models, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert load_model(path) is not None


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, "is a pointer of git-lfs and not the weights (git lfs pull fetches them)"),
        (b"", "is not a whole safetensors file: it has 0 bytes"),
        (b"\x01\x02", "is not a whole safetensors file: it has 2 bytes"),
        (b"\xff" * 64, "is not a whole safetensors file: it has 64 bytes"),
        ((8).to_bytes(8, "little") + b"nonsense", "is not a safetensors file: its header is damaged"),
        ((8).to_bytes(8, "little") + b'{"\x8e":{}}', "is not a safetensors file: its header is damaged"),
        ((4).to_bytes(8, "little") + b"[{}]", "is not a safetensors file: its header is damaged"),
        ((13).to_bytes(8, "little") + b'{"a": {"b":2}}'[:13], "is not a safetensors file: its header is damaged"),
    ],
)
def test_friction_35_a_file_that_holds_no_weights_is_named(models, tmp_path, content, said):
    path = tmp_path / "model"
    shutil.copytree(models["llama"], path)
    (path / WEIGHTS).write_bytes(content)
    assert refused(path) == f"[model] path: {path / WEIGHTS} {said}"


def test_friction_35_cut_weights_and_files_that_an_index_names(model):
    first, second = sorted(model.glob("*.safetensors"))
    assert AutoModelForCausalLM.from_pretrained(model) is not None and model_facts(model, "load").parameters
    whole = first.read_bytes()
    first.write_bytes(whole[:-4])
    assert f"{first} is not whole: it has {len(whole) - 4} bytes" in refused(model)
    first.write_bytes(whole)
    held = second.read_bytes()
    second.unlink()
    assert refused(model) == f"[model] path: {model / INDEX} names '{second.name}', and there is no such file"
    second.write_bytes(whole)
    assert f"{second} does not hold " in refused(model)
    second.write_bytes(held)
    (model / INDEX).write_text('{"weight_map": 3}')
    assert refused(model) == f"[model] path: {model / INDEX} has no weight_map"
    (model / INDEX).write_text('{"weight_map"')
    assert f"{model / INDEX} is not JSON" in refused(model)
    (model / INDEX).unlink()
    assert refused(model) == f"[model] path: {model} has neither {WEIGHTS} nor {INDEX}"


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "{",
        '{"model_type": 3}',
        '{"model_type": "llama", "hidden_size": "a"}',
        "[" * 100_000,
        "\0",
        '{"a": 1e999}',
    ],
)
def test_friction_35_a_configuration_that_is_none_is_named(models, tmp_path, config):
    path = tmp_path / "model"
    shutil.copytree(models["llama"], path)
    (path / "config.json").write_text(config)
    assert str(path / "config.json") in refused(path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "intermediate_size"])
def test_friction_35_a_size_that_the_weights_cannot_have_takes_no_memory(models, tmp_path, key):
    path = tmp_path / "model"
    shutil.copytree(models["llama"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: 9000 if "layers" in key else 10**9}))
    with pytest.raises(ModelError, match=f"{key}.* is more than the weights have"):
        load_model(path)


def test_friction_35_no_damage_of_250_is_a_traceback(model, models, tmp_path):
    """What is left of a model is read, or refused in one line: its headers always, and every fifth time its weights."""
    for path in (model, models["llama"]):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, path / name)
    refusals = 0
    for seed in range(250):
        random = Random(seed)
        copy = tmp_path / "copy"
        shutil.copytree(model if seed % 2 else models["llama"], copy)
        victim = random.choice([*sorted(copy.glob("*.safetensors")), *sorted(copy.glob("*.json"))])
        if victim.suffix == ".json" and random.random() < 0.5:
            victim.write_bytes(as_json(mutated_json(json.loads(victim.read_text()), random)))
        else:
            victim.write_bytes(damaged(victim.read_bytes(), random)[0])
        try:
            check_model_dir(copy, "load", tokenizer=True)
            model_facts(copy, "load")
            ChatFormat.load(copy)
            if seed % 5 == 0:
                load_model(copy)
        except ModelError as error:
            refusals += 1
            assert "\n" not in str(error) and len(str(error)) < 1000, f"seed {seed}: {str(error)[:200]}"
        shutil.rmtree(copy)
    assert refusals > 50


def test_an_audit_names_a_checkpoint_whose_weights_cannot_be_read(models, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(models["llama"], path)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"^{path} cannot be loaded as a causal language model: "):
        PlainModel(path, "float32")
