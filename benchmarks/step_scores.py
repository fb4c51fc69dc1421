"""Measures what a process-reward model costs and what it is good for, on the task of `examples/steps`.

    python benchmarks/step_scores.py timeline --reward-model DIR      when scores of steps arrive
    python benchmarks/step_scores.py speed --reward-model DIR         tokens per second with and without the scorer
    python benchmarks/step_scores.py credit --reward-model DIR        held-out accuracy with and without credit per step

`examples/steps/make_reward_model.py --out DIR` makes the reward model. `--smoke` makes each subcommand a matter of a
minute or two, to see that it works. Its figures mean nothing.

The settings are stated here before the measurements. The task and the reward model of the example were chosen by
looking at runs with seed 0, and the settings of `credit` with seeds from 9 on, so `credit` measures others. The
settings of `slower` were chosen by shorter runs. In all measured runs of `timeline` and `speed` the engine and the
trainer share core 0, and the process of the reward model has core 1. The controller and its reward worker may use both.
In `credit` no process is pinned.

    timeline   the example with a policy of 3.4M parameters. A score of step k is in time if it arrives before the
               engine samples the first token of step k + 2. Wanted: all scores in time.
               The example's own policy has 0.6M parameters and samples a step of 9 tokens in 0.15 s. When all answers
               begin together, the controller and the scorer need as long as that, and up to 4% of the scores are late.
    speed      beside: the run of `timeline` (depth 1), after a warm start of 60 steps, with and without the scorer.
               Wanted: at least 0.95 of the tokens per second that the run without it trains.
               slower: the scorer is the slower part. Batches have 24 answers (depth 0), the policy has 0.4M
               parameters, and the reward model has 13M and random weights. One warm start teaches the policy to answer
               in 7 steps of 33 tokens, and all runs begin with it. The learning rate of the runs is 1e-7, so that their
               answers are alike: random scores teach nothing. Printed are the share of the time for which each process
               computes, which tells whether the scorer is the slower part, and how many answers have exactly 7 steps.
               The steps are scored one by one, or after the last token. Wanted: 1.3 times as many tokens per second.
    credit     the task of the example, harder: in its demonstrations a traveller stays where it is with probability
               0.25, so that about 1 answer in 1,000 is right before training. Versions have 8 groups of 8 answers
               (depth 0, where a run gives the same result each time). Each seed has a warm start of its own, with which
               both arms begin. The arm `outcome` has no scorer and one advantage for each answer. The learning rate of
               each arm is the best of three, by the mean over the seeds 9 to 11:
               `credit --seeds 9 10 11 --rates 5e-4 3e-4 7e-4`. The measured seeds are others. Wanted: a higher held-out
               accuracy after equally many trained tokens, with every seed.
               With `--stay 0.2` 1 answer in 200 is right before training. There 5e-4 is the best of six learning rates
               for both arms (5e-5, 1e-4, 2e-4, 3e-4, 5e-4 and 1e-3), and the seeds 1 to 3 were measured.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from headrace.api import Run
from headrace.buffer.reader import open_readonly
from headrace.types import Score

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/steps"
SHARED_CORE, SCORER_CORE = 0, 1
LONG_STEPS, MORE_TRAVELLERS, ROOM = 7, 16, 256
"""The steps of an answer, the travellers in each step, and the room in tokens, where the scorer is the slower part."""
CREDIT_STAY, CREDIT_GROUPS, CREDIT_VERSIONS = 0.25, 8, 20
"""In `credit`: the probability that a traveller of a demonstration stays where it is, the groups of a version, and the
versions."""
RATES = {"steps": 5e-4, "outcome": 7e-4}
"""The learning rates of the arms of `credit`."""
POLICY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
POLICY |= {"num_key_value_heads": 2, "max_position_embeddings": ROOM}
WIDE_POLICY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE_POLICY |= {"num_key_value_heads": 4}
SLOW_MODEL = {"hidden_size": 448, "intermediate_size": 1344, "num_hidden_layers": 5, "num_attention_heads": 7}
SLOW_MODEL |= {"num_key_value_heads": 7, "max_position_embeddings": ROOM}

Sections = dict[str, dict[str, Any]]


def main() -> None:
    """Run the subcommand, and print its result as lines for people and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("subcommand", choices=["timeline", "speed", "credit"])
    parser.add_argument("--reward-model", type=Path, default=EXAMPLE / "reward_model")
    parser.add_argument("--only", choices=["beside", "slower"], help="speed: one of the two comparisons")
    parser.add_argument("--repeats", type=int, default=3, help="speed: runs of each arm, taken by turns")
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6], help="credit")
    parser.add_argument(
        "--stay", type=float, default=CREDIT_STAY, help="credit: how often a traveller of a demonstration stays"
    )
    parser.add_argument("--rates", type=float, nargs="+", help="credit: learning rates that both arms take by turns")
    parser.add_argument("--runs", type=Path, help="where the runs are made and kept; by default they are deleted")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    given.reward_model = given.reward_model.resolve()
    if not (given.reward_model / "config.json").is_file():
        sys.exit(f"step_scores.py: {given.reward_model} is no model (examples/steps/make_reward_model.py makes one)")
    directory = given.runs or Path(tempfile.mkdtemp(prefix="step_scores-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        result = {"timeline": timeline, "speed": speed, "credit": credit}[given.subcommand](given, directory.resolve())
    finally:
        if given.runs is None:
            shutil.rmtree(directory)
    print(json.dumps(result))


# ---- when scores arrive


def timeline(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Compare the moments at which scores arrived with those at which the engine sampled."""
    sections = _wide(given, directory, versions=3 if given.smoke else 15)
    run = _trained(directory / "timeline", sections, pinned=True)
    rollouts = [scores for rollout in run.rollouts("state = 'trained'") if len(scores := _steps(rollout.scores)) > 2]
    rows = [row for scores in rollouts for row in _moments(scores)]
    late = [row for row in rows if row["score"] >= row["next_but_one"]]
    print("one answer, in milliseconds after the end of its first step:")
    for k, row in enumerate(_moments(rollouts[len(rollouts) // 2])):
        print(
            f"  step {k}: ended {row['ended']:7.1f}, scored {row['score']:7.1f}, "
            f"first token of step {k + 2} sampled {row['next_but_one']:7.1f}"
        )
    delays = sorted(row["score"] - row["ended"] for row in rows)
    print(
        f"{len(rows) - len(late)} of {len(rows)} scores of a step arrived before the step after the next began; "
        f"delay: median {median(delays):.1f} ms, 99% within {delays[int(0.99 * (len(delays) - 1))]:.1f} ms"
    )
    return {"scores": len(rows), "late": len(late), "median_delay_ms": median(delays), "longest_delay_ms": delays[-1]}


def _steps(scores: list[Score]) -> list[Score]:
    return [score for score in scores if score.level == "step" and "began" in score.metrics]


def _moments(scores: list[Score]) -> list[dict[str, float]]:
    """Return the moments of each step that has a step after the next, in milliseconds after the first step's end."""
    begin = scores[0].metrics["ended"]
    return [
        {
            "ended": 1e3 * (one.metrics["ended"] - begin),
            "score": 1e3 * (one.metrics["arrived"] - begin),
            "next_but_one": 1e3 * (later.metrics["began"] - begin),
        }
        for one, later in zip(scores, scores[2:], strict=False)
    ]


# ---- what scores cost


def speed(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Compare the trained tokens per second of arms that differ in the scorer alone."""
    result: dict[str, Any] = {}
    if given.only != "slower":
        sections = _wide(given, directory, versions=4 if given.smoke else 20)
        sections["warm_start"]["steps"] = 40 if given.smoke else 60
        arms = {"without": _without_scorer(sections), "scored": sections}
        result["beside"] = _compare(given, directory / "beside", arms, "scored", "without")
    if given.only != "beside":
        sections = _slower(given, directory)
        arms = {"at the end": _with(sections, {"scorers": {"steps": {"when": "end"}}}), "step by step": sections}
        result["slower"] = _compare(given, directory / "slower", arms, "step by step", "at the end")
        run = Run(directory / "slower" / "step-by-step-0")
        steps = [len(_steps(rollout.scores)) for rollout in run.rollouts("state = 'trained'")]
        print(f"slower: {steps.count(LONG_STEPS)} of {len(steps)} answers of a run have exactly {LONG_STEPS} steps")
    return result


def _compare(
    given: argparse.Namespace, directory: Path, arms: Mapping[str, Sections], one: str, other: str
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(1 if given.smoke else given.repeats):
        # By turns, and in the other order every other time: what else the machine does then matters less.
        for arm in sorted(arms, reverse=turn % 2 == 1):
            run = _trained(directory / f"{arm.replace(' ', '-')}-{turn}", arms[arm], pinned=True)
            rates[arm].append(run.summary["tokens_per_second"])
            busy = ", ".join(f"{name} {share:.2f}" for name, share in _busy(run).items())
            print(f"{directory.name}, {arm}: {rates[arm][-1]:.0f} trained tokens/s (busy: {busy})", flush=True)
    ratio = median(rates[one]) / median(rates[other])
    print(f"{directory.name}: {one} trains {ratio:.3f} times the tokens per second of {other} (medians)")
    return {"rates": rates, "ratio": ratio}


def _busy(run: Run) -> dict[str, float]:
    """Return the share of the training time for which each process computed."""
    with open_readonly(run.path / "journal.db") as journal:
        window = journal.training_window()
        if window is None:
            return {}
        idle = {name: journal.idle_fraction(f"{name}-*", window) for name in ("engine", "trainer", "scorer")}
    return {name: 1 - share for name, share in idle.items() if share is not None}


def _wide(given: argparse.Namespace, directory: Path, *, versions: int) -> Sections:
    """Return the sections of the example with a policy of 3.4M parameters in the place of its own one."""
    make = _make()
    make.write_tokenizer(directory / "wide_policy")
    shape = {"architectures": ["LlamaForCausalLM"], **make.SHAPE, **WIDE_POLICY}
    (directory / "wide_policy" / "config.json").write_text(json.dumps(shape))
    return _with(_example(given, versions=versions), {"model": {"path": str(directory / "wide_policy")}})


def _make() -> Any:
    """Return the module `make` of the example, which makes its data and its tokenizer."""
    sys.path.insert(0, str(EXAMPLE))
    import make

    return make


def _slower(given: argparse.Namespace, directory: Path) -> Sections:
    """Make data, a reward model and a policy with its warm start, so that scoring takes longer than generation."""
    from transformers import LlamaConfig, LlamaForTokenClassification

    make = _make()
    made, make.TRAVELLERS = directory / "made", MORE_TRAVELLERS
    for part in ("policy", "reward_model"):
        make.write_tokenizer(made / part)
    shape = {"architectures": ["LlamaForCausalLM"], **make.SHAPE, **POLICY}
    (made / "policy" / "config.json").write_text(json.dumps(shape))
    LlamaForTokenClassification(LlamaConfig(**{**make.SHAPE, **SLOW_MODEL})).save_pretrained(made / "reward_model")
    make.write_data(made / "train.jsonl", 2000, set(), random.Random(1), LONG_STEPS)
    step_tokens = 2 * make.TRAVELLERS + 1
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": str(made / "policy")},
        "task": {"path": str(made / "train.jsonl"), "heldout_path": ""},
        "warm_start": {"steps": 20 if given.smoke else 200, "learning_rate": 3e-3},
        "scorers": {"steps": {"model": str(made / "reward_model"), "good": ""}},
        "engine": {"slots": 24, "max_length": ROOM},
        "rollouts": {"group_size": 4, "max_tokens": LONG_STEPS * step_tokens},
        "buffer": {"groups": 6, "depth": 0},
        "training": {"learning_rate": 1e-7},
    }
    sections = _with(_example(given, versions=4 if given.smoke else 10), changes)
    return _after_warm_start(sections, directory / "warm")


def _after_warm_start(sections: Sections, path: Path) -> Sections:
    """Run the warm start of these sections in this directory, and return the sections of runs that begin with it."""
    alone = {"run": {"versions": 1}, "training": {"learning_rate": 1e-9}, "evaluate": {"prompts": 0}}
    policy = _trained(path, _with(_without_scorer(sections), alone), pinned=False).model_dir
    return _with(sections, {"model": {"path": str(policy), "weights": "load"}, "warm_start": {"steps": 0}})


# ---- what scores are good for


def credit(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train with credit per step and with the outcome alone, and compare the held-out accuracy."""
    make = _make()
    make.STAY = given.stay
    make.write_data(directory / "train.jsonl", 4000, set(_prompts(EXAMPLE / "heldout.jsonl")), random.Random(1))
    rows = []
    for seed in given.seeds[: 1 if given.smoke else None]:
        arms = _arms(given, directory, seed)
        for turn in range(len(given.rates or [0])):
            row: dict[str, Any] = {"seed": seed}
            for arm, sections in arms.items():
                rate = given.rates[turn] if given.rates else RATES[arm]
                with_rate = _with(sections, {"training": {"learning_rate": rate}})
                summary = _trained(directory / f"{arm}-{seed}-{turn}", with_rate, pinned=False).summary
                row[arm] = {key: summary[key] for key in ("heldout_before", "heldout_after", "tokens_trained")}
                row[arm]["learning_rate"] = rate
                print(
                    f"seed {seed}, {arm}, learning rate {rate:g}: held out {summary['heldout_before']:.3f} -> "
                    f"{summary['heldout_after']:.3f}, {summary['tokens_trained']} tokens",
                    flush=True,
                )
            rows.append(row)
    for rate in given.rates or []:
        same = [row for row in rows if row["steps"]["learning_rate"] == rate]
        print(f"learning rate {rate:g}: {_means(same)}")
    if not given.rates:
        wins = sum(row["steps"]["heldout_after"] > row["outcome"]["heldout_after"] for row in rows)
        print(f"{_means(rows)}; credit per step is better with {wins} of {len(rows)} seeds")
    return {"runs": rows}


def _prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def _arms(given: argparse.Namespace, directory: Path, seed: int) -> dict[str, Sections]:
    """Return the sections of both arms of `credit`, which begin with the same warm start."""
    own: dict[str, dict[str, Any]] = {
        "run": {"seed": seed},
        "task": {"path": str(directory / "train.jsonl")},
        "buffer": {"groups": 4 if given.smoke else CREDIT_GROUPS, "depth": 0},
        "evaluate": {"prompts": 50 if given.smoke else 500},
    }
    sections = _with(_example(given, versions=3 if given.smoke else CREDIT_VERSIONS), own)
    sections = _after_warm_start(sections, directory / f"warm-{seed}")
    return {"steps": sections, "outcome": _without_scorer(sections)}


def _means(rows: list[dict[str, Any]]) -> str:
    """Return the mean held-out accuracy of both arms as a text."""
    steps, outcome = (fmean(row[arm]["heldout_after"] for row in rows) for arm in ("steps", "outcome"))
    return f"credit per step: {steps:.3f}, outcome alone: {outcome:.3f}"


# ---- runs


def _example(given: argparse.Namespace, *, versions: int) -> Sections:
    """Return the sections of the example, for a run of this many versions without evaluations."""
    sections: Sections = tomllib.loads((EXAMPLE / "steps.toml").read_text())
    changes: dict[str, dict[str, Any]] = {
        "run": {"versions": versions},
        "model": {"path": str(EXAMPLE / "model")},
        "task": {
            "path": str(EXAMPLE / "train.jsonl"),
            "heldout_path": str(EXAMPLE / "heldout.jsonl"),
            "reward": f"{EXAMPLE / 'reward.py'}:reward",
        },
        "scorers": {"steps": {"model": str(given.reward_model), "cores": [SCORER_CORE]}},
        "evaluate": {"prompts": 0},
        "observe": {"display": "none"},
    }
    if given.smoke:
        changes |= {"warm_start": {"steps": 40}, "buffer": {"groups": 4}}
    return _with(sections, changes)


def _without_scorer(sections: Sections) -> Sections:
    """Return the sections of the same run without the process-reward model: the outcome alone is trained on."""
    own = {name: dict(section) for name, section in sections.items() if name != "scorers"}
    own["algorithm"] = {key: value for key, value in own["algorithm"].items() if key not in ("credit", "discount")}
    return own


def _with(sections: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections in which some values are others."""
    merged = dict(sections)
    for key, value in changes.items():
        merged[key] = _with(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def _trained(path: Path, sections: Sections, *, pinned: bool) -> Run:
    """Train in this directory, and return the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = _with(sections, {"run": {"name": path.name, "directory": str(path.parent)}})
    if not pinned and "scorers" in whole:
        steps = {key: value for key, value in whole["scorers"]["steps"].items() if key != "cores"}
        whole["scorers"] = {"steps": steps}
    file = path.parent / f"{path.name}.toml"
    file.write_text("".join(_lines(whole)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "headrace", "train", str(file), "--overwrite"]
    with (path.parent / f"{path.name}.log").open("w+") as log:
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        while run.poll() is None:
            if pinned:
                _pin(path)
            time.sleep(0.5)
        if run.returncode:
            log.seek(0)
            sys.exit(f"step_scores.py: {path} failed:\n{log.read()}")
    return Run(path)


def _lines(sections: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a TOML file. JSON's texts, numbers and lists are those of TOML."""
    for name, section in sections.items():
        yield f"[{prefix}{name}]\n"
        inner = {key: value for key, value in section.items() if isinstance(value, Mapping)}
        yield from (f"{key} = {json.dumps(value)}\n" for key, value in section.items() if key not in inner)
        yield from _lines(inner, f"{prefix}{name}.")


def _pin(run_dir: Path) -> None:
    """Put the engine and the trainer of a run on one core, and the process of its scorer on the other."""
    cores = {"engine": SHARED_CORE, "trainer": SHARED_CORE, "scorer": SCORER_CORE}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "headrace.cluster.worker_main" in words and str(run_dir) in words:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), {cores[words[words.index("--role") + 1]]})
        except OSError:
            continue  # The process has ended meanwhile.


if __name__ == "__main__":
    main()
