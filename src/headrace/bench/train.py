"""`headrace bench train`: measures how fast the trainer trains, and compares that with the arithmetic that it needs.

After a few steps of warm-up, whole optimizer steps of the real trainer are timed: packing, passes, gradients, the
optimizer and the refresh of the 16-bit weights. Padding stands for the work of a trainer without packing: it is tokens
before a sequence that are computed but not trained. Every token but the first of a sequence is trained.

MFU is the number of floating-point operations per second that training needs (`FORMULA`), as a share of the GPU's peak.
Work on padding, masked work and recomputation are not counted, and neither are embeddings, norms, softmax and the
optimizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import transformers

from headrace.bench.base import begin, free_memory, load, vocabulary_of
from headrace.bench.options import Say, Timed, TrainBench
from headrace.bench.workload import make_lengths
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.training.layers import compiled_layers
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer
from headrace.types import Batch

Lengths = npt.NDArray[np.int64]

WARM_STEPS = 2
WHOLE = 1 << 62
"""A size of chunks that is large enough for the logits of any row, so that rows are not divided into chunks."""
VARIANTS: dict[str, dict[str, bool]] = {
    "without packing": {"pack": False},
    "without chunks": {"chunk": False},
    "without compilation": {"compile": False},
}
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Part of a GPU's name -> its peak of dense bfloat16 operations per second."""
FORMULA = {
    "a_sequence": "n * (a_token + a_target) + n * (n + 1) / 2 * a_pair",
    "a_token": "6 * parameters",
    "a_pair": "12 * heads * head_size * layers",
    "a_target": "6 * hidden_size * vocabulary",
}
"""The operations of a sequence of n + 1 tokens, forward and backward. A pair is a query and a key that it sees. Of the
parameters of experts, only those that a token goes through count."""


def bench_train(options: TrainBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    device, found = begin("train", options)
    found |= {"transformers": transformers.__version__, **_measured(options, device, say), "flop_formula": FORMULA}
    if options.compare:
        found["variants"] = {}
        for name, changes in VARIANTS.items():
            say(f"the same sequences {name}")
            found["variants"][name] = _variant(msgspec.structs.replace(options, **changes), device, say, found)
    return found


def _variant(options: TrainBench, device: str, say: Say, base: dict[str, Any]) -> dict[str, Any]:
    try:
        found = _measured(options, device, say)
    except torch.OutOfMemoryError as error:
        return {"ran": False, "why": str(error).partition("\n")[0]}
    return {"ran": True, **found, "slower": base["tokens_per_second"] / found["tokens_per_second"]}


def _measured(options: TrainBench, device: str, say: Say) -> dict[str, Any]:
    free_memory(device)
    say(f"loading {options.model} on {device}")
    with Timed() as loading:
        model = load(options.model, "float32", device, options.seed)
        flops, vocabulary = count_flops(model), vocabulary_of(model)
        training = TrainingConfig(
            device="cuda" if device == "cuda" else "cpu",
            compile=options.compile,
            micro_batch_tokens=options.micro_batch_tokens,
        )
        trainer = Trainer(
            prepare_model(model, training),
            AlgorithmConfig(),
            training,
            total_steps=WARM_STEPS + options.steps,
            warm_start=WarmStartConfig(),
            chunk_elements=None if options.chunk else WHOLE,
        )
        del model
    lengths = draw_sequences(options)
    widths = lengths if options.pack else padded(lengths, options.micro_batch_tokens)
    batches = [make_batch(lengths, widths, vocabulary, i, options.seed) for i in range(WARM_STEPS + options.steps)]
    say(f"warming up on {len(lengths)} sequences of {int(lengths.sum())} tokens, {int(widths.sum())} with padding")
    with Timed(device) as warming:
        trainer.warm_up()
        for batch in batches[:WARM_STEPS]:
            trainer.step(batch)
    say(f"{options.steps} steps")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for batch in batches[WARM_STEPS:]:
        with Timed(device) as step:
            report = trainer.step(batch)
        seconds.append(step.seconds)
    mean = sum(seconds) / len(seconds)
    needed = flops.of(lengths.tolist())
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    peak = next((peak for name, peak in PEAKS.items() if name in gpu), None)
    layers = compiled_layers(trainer.model)
    return {
        "load_seconds": loading.seconds,
        "warm_up_seconds": warming.seconds,
        "compute_dtype": str(trainer.model.dtype).removeprefix("torch."),
        "compiled": layers is not None and layers.on,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "computed_tokens": report.tokens,
        "micro_batches": report.micro_batches,
        "step_seconds": mean,
        "best_step_seconds": min(seconds),
        "tokens_per_second": int(lengths.sum()) / mean,
        "flops_a_step": needed,
        "flops": {"a_token": flops.a_token, "a_pair": flops.a_pair, "a_target": flops.a_target},
        "flops_per_second": needed / mean,
        "peak_flops_per_second": peak,
        "mfu": None if peak is None else needed / mean / peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "loss": report.loss,
    }


def draw_sequences(options: TrainBench) -> Lengths:
    """Return the lengths of a step's sequences. Their sum is `tokens` or a little more."""
    drawn = make_lengths(options.mix, options.tokens, options.seed)
    drawn = np.maximum(drawn, 2)
    return drawn[: int(np.searchsorted(drawn.cumsum(), options.tokens)) + 1]


def padded(lengths: Lengths, budget: int) -> Lengths:
    """Return the length to which each sequence is padded: that of the longest sequence in its micro-batch.

    Micro-batches are filled in the given order, up to `budget` tokens with padding.
    """
    found = np.zeros_like(lengths)
    start = 0
    for end in range(1, len(lengths) + 1):
        longest = int(lengths[start : end + 1].max())
        if end == len(lengths) or longest * (end + 1 - start) > budget:
            found[start:end] = lengths[start:end].max()
            start = end
    return found


def make_batch(lengths: Lengths, widths: Lengths, vocabulary: int, step: int, seed: int) -> Batch:
    """Return a batch of random tokens. Sequence i has `lengths[i]` tokens, and `widths[i]` tokens with padding."""
    draw = np.random.default_rng([seed, step])
    total, own = int(widths.sum()), int((lengths - 1).sum())
    ends = widths.cumsum()
    place = np.arange(total) - np.repeat(ends - widths, widths)
    trained = place > np.repeat(widths - lengths, widths)
    return Batch(
        step=step,
        version=0,
        token_ids=draw.integers(0, vocabulary, total).astype(np.int32),
        lengths=widths.astype(np.int32),
        groups=np.arange(len(widths), dtype=np.int32),
        trained=trained,
        logprobs=np.where(trained, -np.log(vocabulary), 0).astype(np.float32),
        versions=np.zeros(total, np.int32),
        advantages=np.repeat(draw.standard_normal(len(widths)), widths).astype(np.float32),
        weights=np.where(trained, 1 / own, 0).astype(np.float32),
    )


@dataclass(frozen=True)
class Flops:
    """The operations of one model by the terms of `FORMULA`."""

    a_token: int
    a_pair: int
    a_target: int

    def of(self, lengths: Iterable[int]) -> int:
        """Return the operations of a step over sequences of these lengths. All tokens but the first are targets."""
        # The last token of a sequence is only a target and is not computed itself.
        own = [int(length) - 1 for length in lengths]
        return sum(n * (self.a_token + self.a_target) + n * (n + 1) // 2 * self.a_pair for n in own)


def count_flops(model: Any) -> Flops:
    """Return the coefficients of the formula for this model."""
    config = model.config.get_text_config()
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    parameters = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in outer:
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
        parameters += parameter.numel() * share
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Flops(
        a_token=round(6 * parameters),
        a_pair=12 * heads * size * int(config.num_hidden_layers),
        a_target=6 * int(model.get_output_embeddings().weight.numel()),
    )
