"""Compiled layers: the same gradients as uncompiled ones, one compilation for all lengths, a failure that is said."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch
from random_models import model_dir, random_batch

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.attention import AttentionCall, attending
from headrace.models.loading import load_model
from headrace.training.attention import PackedAttention
from headrace.training.layers import compile_model, compiled_layers, decoder_layers
from headrace.training.rows import plan
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=1e-3, micro_batch_tokens=48, device="cpu")


def trained(path, *, backend=None, checkpointing=False):
    model = load_model(path)
    if backend:
        compile_model(model, decoder_layers(model), backend=backend)
    training = msgspec.structs.replace(TRAINING, activation_checkpointing=checkpointing)
    prepare_model(model, training)
    trainer = Trainer(model, AlgorithmConfig(), training, total_steps=3, warm_start=WarmStartConfig())
    reports = [trainer.step(random_batch(step, step=step)) for step in range(1, 3)]
    return reports, trainer


def test_compiled_and_uncompiled_training_agree(tmp_path):
    # Recomputed layers with capped scores and a window: everything that a compiled backward pass must find again.
    path = model_dir(tmp_path / "model", "gemma2")
    expected, plain = trained(path)
    torch._dynamo.reset()
    found, compiled = trained(path, backend="aot_eager", checkpointing=True)
    layers = compiled_layers(compiled.model)
    assert layers is not None
    assert layers.on
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(compiled.weights()[name], tensor, rtol=1e-3, atol=2e-4)


def test_one_compilation_serves_all_layers_and_lengths(tmp_path):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    reports, _ = trained(model_dir(tmp_path / "model"), backend=backend)
    assert all(report.micro_batches > 1 for report in reports)
    assert len(graphs) == 1


def test_a_failed_compilation_is_said_and_training_goes_on(tmp_path, caplog):
    path = model_dir(tmp_path / "model")
    expected, _ = trained(path)
    torch._dynamo.reset()

    def backend(*_):
        raise ValueError("there is no compiler here")

    with caplog.at_level(logging.WARNING):
        found, trainer = trained(path, backend=backend)
    layers = compiled_layers(trainer.model)
    assert layers is not None
    assert not layers.on
    assert [r.loss for r in found] == [r.loss for r in expected]
    assert "layers are trained uncompiled: backend='backend' raised" in caplog.text


def test_the_operation_of_compiled_layers_is_differentiated_as_autograd_does():
    row = plan(random_batch(3), micro_batch_tokens=10_000, share_prefixes=True)[0]
    torch.manual_seed(0)
    tensors = [torch.randn(1, h, len(row), 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    context = PackedAttention(row)
    with attending(context):
        found, _, _ = torch.ops.headrace.attend_trained(*tensors, sinks, 0.3, 5, 2.0)
    query, key, value = tensors
    expected = context.attend(
        AttentionCall(layer=0, query=query, key=key, value=value, scaling=0.3, window=5, softcap=2.0, sinks=sinks)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(found)
    # The context is found again by its number, wherever the backward pass runs.
    wanted, grads = (torch.autograd.grad(x, [*tensors, sinks], gradient) for x in (expected, found))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_context_that_is_gone_is_said():
    row = plan(random_batch(3), micro_batch_tokens=10_000, share_prefixes=True)[0]
    tensors = [torch.randn(1, h, len(row), 8, requires_grad=True) for h in (4, 2, 2)]
    with attending(PackedAttention(row)):
        found, _, _ = torch.ops.headrace.attend_trained(*tensors, None, 0.3, None, None)
    with pytest.raises(RuntimeError, match="was dropped before its backward pass"):
        found.sum().backward()
