"""`headrace bench`: measurements of Headrace beside a comparison, in one call."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headrace.cli.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure, side by side, in one call.", no_args_is_help=True)
    group.command("loop")(loop)
    group.command("engine")(engine)
    group.command("delivery")(delivery)
    group.command("train")(train)
    group.command("journal")(journal)
    app.add_typer(group, name="bench")


def loop(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL_OR_SHAPE]", help="A model directory or a named shape; none is a tiny one.")
    ] = "",
    versions: Annotated[int, typer.Option(help="Versions that are counted; 0 takes 30, 6 with a model.")] = 0,
    in_flight: Annotated[int, typer.Option(help="With a model: answers that are generated together.")] = 256,
    lengths: Annotated[str, typer.Option(help="With a model: equal:N or lognormal:MEAN:CUT.")] = "lognormal:256:2048",
    prompt: Annotated[int, typer.Option(help="With a model: tokens of each prompt.")] = 64,
    group_size: Annotated[int, typer.Option(help="With a model: answers to one prompt.")] = 8,
    depth: Annotated[
        int,
        typer.Option(help="With a model: of the asynchronous run; 0 takes what the longest answer lasts.", min=0),
    ] = 0,
    micro_batch_tokens: Annotated[int, typer.Option(help="With a model: tokens that a training pass holds.")] = 16384,
    one_gpu: Annotated[str, typer.Option(help="With a model: turns, slices or mps.")] = "turns",
    device: Annotated[str, typer.Option(help="With a model: auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="With a model: of weights, prompts and lengths.", min=0)] = 0,
    keep: Annotated[str, typer.Option(help="With a model: leave both runs in this directory, with timelines.")] = "",
    long_tail: Annotated[
        bool, typer.Option("--long-tail", help="Without a model: one answer in ten is longer.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="With --long-tail: how often each depth is measured.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the whole loop, synchronous against asynchronous, in one call.

    Without a model, a tiny one is measured on a balanced workload, with one compute thread per process. With
    --long-tail, answers have lognormal lengths, and one in ten is ten times longer.
    """

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if long_tail:
        from headrace.bench import long_tail as tail

        tail.check_options(model, versions)
        found = tail.bench_long_tail(versions or tail.VERSIONS, rounds, say)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(tail.lines(found)))
        return
    if not model:
        from headrace.bench.loop import bench_loop

        found = bench_loop(versions or 30, say)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
        return
    from headrace.bench.shared_work import SharedBench, check_options

    options = SharedBench(
        model=model,
        versions=versions or 6,
        in_flight=in_flight,
        lengths=lengths,
        prompt=prompt,
        group_size=group_size,
        depth=depth,
        micro_batch_tokens=micro_batch_tokens,
        one_gpu=one_gpu,
        device=device,
        seed=seed,
        keep=keep,
    )
    check_options(options)
    from headrace.bench.shared import bench_shared
    from headrace.bench.shared_table import table

    found = bench_shared(options, say)
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(table(found)))


def engine(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_SHAPE", help="A Hugging Face directory, or a named shape.")],
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 256,
    requests: Annotated[int, typer.Option(help="Requests in all; 0 takes as many as --batch.")] = 0,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    group_size: Annotated[int, typer.Option(help="Requests to one prompt, one after the other.")] = 1,
    generate: Annotated[int, typer.Option(help="Tokens of each answer (without --lengths).")] = 512,
    lengths: Annotated[str, typer.Option(help="lognormal:MEAN:CUT draws the length of each answer.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; by default the second on a GPU.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    graphs: Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="CUDA graphs.")] = None,
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compiled layers.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the cache; 0 takes the engine's.", min=0)] = 0,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens a step; 0 takes the engine's.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 takes torch's default.")] = 0,
    rescore: Annotated[float, typer.Option(help="Share of rows that the plain model scores again.")] = 0.01,
    tail: Annotated[str, typer.Option(help="ROWS:LENGTH, the last rows run on to so many tokens.")] = "",
    swap_every: Annotated[float, typer.Option(help="Seconds between two swaps of weights; 0 swaps none.")] = 0.0,
    fork: Annotated[str, typer.Option(help="N:AT, so many continuations from a pivot at token AT.")] = "",
    peer: Annotated[list[str] | None, typer.Option(help="Also run: transformers, generate. May be repeated.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Use the directory's config alone.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, prompts, lengths and sampling.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the embedded engine: tokens/s, time and bytes of a step, and the limit that memory bandwidth sets."""
    from headrace.bench.engine_work import EngineBench, check_options

    options = EngineBench(
        model=model,
        random_weights=random_weights,
        batch=batch,
        requests=requests,
        prompt=prompt,
        group_size=group_size,
        generate=generate,
        lengths=lengths,
        tail=tail,
        fork=fork,
        swap_every=swap_every,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        dtype=dtype,
        device=device,
        graphs=graphs,
        compile=compile_,
        block_size=block_size,
        prefill_chunk=prefill_chunk,
        threads=threads,
        rescore=rescore,
        peers=tuple(peer or ()),
        seed=seed,
    )
    # Checked before torch is loaded, so that a mistake is reported at once.
    check_options(options)
    from headrace.bench.engine import bench_engine
    from headrace.bench.engine_table import table

    found = bench_engine(options, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(table(found)))


def delivery(
    model_shape: Annotated[str, typer.Option(help="A named shape, or a Hugging Face directory.")] = "smollm2-135m",
    transport: Annotated[list[str] | None, typer.Option(help="How weights travel. May be repeated.")] = None,
    send: Annotated[list[str] | None, typer.Option(help="full, delta or adapter. May be repeated.")] = None,
    engines: Annotated[int, typer.Option(help="Engine processes.")] = 1,
    versions: Annotated[int, typer.Option(help="Versions that are measured, after two others.")] = 5,
    changed: Annotated[float, typer.Option(help="Share of words in which a version differs from the last.")] = 0.01,
    per_parameter: Annotated[bool, typer.Option("--per-parameter", help="nccl: also tensor by tensor.")] = False,
    decode: Annotated[int, typer.Option(help="Sequences that every engine decodes meanwhile.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; by default the second on a GPU.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Compute threads of each process.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the weights and of what changes.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the delivery of weights, from publish to acknowledged, beside plain copies of the same bytes."""
    from headrace.bench.delivery_options import DeliveryBench, check_options

    options = DeliveryBench(
        model=model_shape,
        transports=tuple(transport or ["shm"]),
        sends=tuple(send or ["full"]),
        engines=engines,
        versions=versions,
        changed=changed,
        per_parameter=per_parameter,
        decode=decode,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    # Checked before torch is loaded, so that a mistake is reported at once.
    check_options(options)
    from headrace.bench.delivery import bench_delivery
    from headrace.bench.delivery_table import table

    found = bench_delivery(options, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(table(found)))


def train(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_SHAPE", help="A Hugging Face directory, or a named shape.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a step, padding not counted.")] = 65536,
    sequence: Annotated[int, typer.Option(help="Tokens of each sequence (without --lengths).")] = 4096,
    lengths: Annotated[str, typer.Option(help="equal:N, or lognormal:MEAN:CUT.")] = "",
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 5,
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens that one pass holds.")] = 16384,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compute_dtype: Annotated[str, typer.Option(help="float32 or bfloat16; by default the second on a GPU.")] = "",
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Pack, or pad to the longest of a pass.")] = True,
    chunk: Annotated[bool, typer.Option("--chunk/--no-chunk", help="Logits by chunks, or whole.")] = True,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="GPU: compiled layers.")] = True,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Activation checkpointing.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also without packing, chunks, compilation.")] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Use the directory's config alone.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and lengths.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the trainer alone: tokens/s, MFU and peak memory of whole optimizer steps of full fine-tuning."""
    from headrace.bench.train_work import TrainBench, check_options

    options = TrainBench(
        model=model,
        random_weights=random_weights,
        tokens=tokens,
        sequence=sequence,
        lengths=lengths,
        steps=steps,
        micro_batch_tokens=micro_batch_tokens,
        device=device,
        compute_dtype=compute_dtype,
        pack=pack,
        chunk=chunk,
        compile=compile_,
        checkpointing=checkpointing,
        compare=compare,
        seed=seed,
    )
    # Checked before torch is loaded, so that a mistake is reported at once.
    check_options(options)
    from headrace.bench.train import bench_train
    from headrace.bench.train_table import table

    found = bench_train(options, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(table(found)))


def journal(
    pairs: Annotated[int, typer.Option(help="Blocks with the journal, and as many without.", min=2)] = 10,
    versions: Annotated[int, typer.Option(help="Versions of a block.", min=1)] = 10,
    rollouts: Annotated[int, typer.Option(help="Instead: the time to read a journal of so many.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what the journal costs a run; with --rollouts, the time to open, resume, count and query a large one."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if rollouts:
        import tempfile
        from pathlib import Path

        from headrace.bench import journal_size

        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
            found = journal_size.bench_size(Path(scratch), rollouts, say)
        lines = journal_size.lines(found)
    else:
        from headrace.bench import journal as overhead

        found = overhead.bench_overhead(pairs, versions, say)
        lines = overhead.lines(found)
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))


def _lines(found: dict[str, Any]) -> list[str]:
    def row(name: str, key: str) -> str:
        run = found[key]
        return (
            f"{name:<28}{run['tokens_per_second']:>9.0f} tok/s   idle: trainer {run['trainer_idle_fraction']:.2f}, "
            f"engine {run['engine_idle_fraction']:.2f}   lag {run['lag_mean']:.2f} (max {run['lag_max']})"
        )

    return [
        f"{found['versions']} versions; training takes {found['training_over_generation']:.2f}x as long as generation",
        row("depth 0", "depth_0"),
        row("depth 2", "depth_2"),
        row("depth 0, two threads a phase", "depth_0_two_threads"),
        f"depth 2 over depth 0: {found['ratio']:.2f}x ({found['ratio_to_two_threads']:.2f}x over two threads a phase)",
    ]
