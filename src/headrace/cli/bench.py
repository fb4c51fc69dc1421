"""`headrace bench`: measurements, side by side, in one call."""

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
    app.add_typer(group, name="bench")


def loop(
    versions: Annotated[int, typer.Option(help="Versions that each run trains.", min=2)] = 30, as_json: AsJson = False
) -> None:
    """The whole loop: depth 0 against depth 2 on one balanced workload, one compute thread a process."""
    from headrace.bench.loop import bench_loop

    found = bench_loop(versions, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def engine(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_SHAPE", help="A Hugging Face directory, or a named shape.")],
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 256,
    requests: Annotated[int, typer.Option(help="Requests in all; 0 takes as many as --batch.")] = 0,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
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
    """The embedded engine: tokens/s, a step's time and bytes, and the ceiling that the memory's bandwidth sets."""
    from headrace.bench.engine_work import EngineBench, check_options

    options = EngineBench(
        model=model,
        random_weights=random_weights,
        batch=batch,
        requests=requests,
        prompt=prompt,
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
    # Before torch is loaded: a mistake is answered at once.
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
    """Delivery of weights: publish to acknowledged, beside plain copies of the same bytes."""
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
    # Before torch is loaded: a mistake is answered at once.
    check_options(options)
    from headrace.bench.delivery import bench_delivery
    from headrace.bench.delivery_table import table

    found = bench_delivery(options, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(table(found)))


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
