"""Train a process-reward model for this example: it says of every step whether the step is right.

    python examples/steps/make_reward_model.py --out examples/steps/reward_model

The model learns from answers that this script makes up to the prompts of `train.jsonl`, with mistakes of several kinds.
It never sees `heldout.jsonl`. A step is right if every traveller goes on from where the answer has left it, to where
the map leads. The steps before it may be wrong.

The model is a token classifier with two labels, read at the `;` of each step. With `--kind causal` it is a causal
language model whose next token at the `;` is `+` for a right step and `-` for a wrong one.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from make import LETTERS, SHAPE, STEPS, TRAVELLERS, VOCABULARY, onward, step, write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

HERE = Path(__file__).parent
IDS = {token: id for id, token in enumerate(VOCABULARY)}
MARKER, GOOD, BAD = IDS[";"], IDS["+"], IDS["-"]
LONGEST = STEPS + 2
"""The most steps of a made-up answer. Steps beyond those that are asked for are wrong."""


SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
"""The shape of the reward model, which is smaller than the policy."""


def made_up(prompt: str, draw: random.Random) -> tuple[str, list[int], list[str]]:
    """Return an answer with mistakes, whether the step of each token is right so far, and which token would be right.

    The last is empty for tokens after a mistake in the same step.
    """
    place = prompt
    right_share = draw.choice([0.3, 0.6, 0.9])
    steps, right, ideal = list[str](), list[int](), list[str]()
    for number in range(draw.choice([STEPS, STEPS, draw.randint(1, LONGEST)])):
        best = given = step(place, onward(place))
        if draw.random() > right_share:
            match draw.choice(["stay", "stay", "value", "letter", "begin", "swap", "noise", "shape", "shape"]):
                case "stay":
                    share = draw.random()
                    moves = zip(place, onward(place), strict=True)
                    given = step(place, "".join(a if draw.random() < share else b for a, b in moves))
                case "shape":
                    # A step that is too short, down to nothing but its end, or too long.
                    given = (best[:-1] * 2)[: draw.choice([0, 0, *range(1, 2 * len(best) - 2)])] + ";"
                case "value":
                    at = 2 * draw.randrange(TRAVELLERS) + 1
                    given = best[:at] + draw.choice(LETTERS.replace(best[at], "")) + best[at + 1 :]
                case "letter":
                    at = draw.randrange(2 * TRAVELLERS)
                    other = draw.choice(LETTERS)
                    given = best[:at] + (other if at % 2 else other.upper()) + best[at + 1 :]
                case "begin":
                    begin = "".join(draw.sample(LETTERS, TRAVELLERS))
                    given = step(begin, onward(begin))
                case "swap":
                    given = step(place, "".join(draw.sample(best[1:-1:2], TRAVELLERS)))
                case "noise":
                    given = step(draw.choices(LETTERS, k=TRAVELLERS), draw.choices(LETTERS, k=TRAVELLERS))
        steps.append(given)
        same = sum(best.startswith(given[: at + 1]) for at in range(len(given)))
        right += [int(number < STEPS and at < same) for at in range(len(given))]
        # After a wrong token, the tokens of the right step are no guide any more.
        ideal += [*best[: same + 1], *[""] * len(given)][: len(given)]
        place = _places(place, given)
    return "".join(steps), right, ideal


def _places(before: str, given: str) -> str:
    """Return where the travellers are after a step. Those that the step leaves out stay where they were."""
    ends = given[1:-1:2][:TRAVELLERS]
    return ends.lower() + before[len(ends) :]


def batch_of(prompts: list[str], draw: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, whether the step of each token is right so far, and which token would be right after it.

    All are [B, T], padded at the end. -1 stands for tokens that have no verdict or no right successor.

    The verdict on a step is the one at its `;`. The model learns faster if it is also told where a step goes wrong, and
    what would have been right.
    """
    rows = []
    for prompt in prompts:
        answer, right, ideal = made_up(prompt, draw)
        opening = ["<|user|>", *prompt, "<|end|>", "<|assistant|>"]
        before = [-1] * len(opening)
        successors = [*before[1:], *(IDS.get(token, -1) for token in ideal), -1]
        rows.append(([IDS[token] for token in [*opening, *answer]], before + right, successors))
    longest = max(len(ids) for ids, *_ in rows)
    ids, verdicts, successors = (
        torch.tensor([row[part] + [filler] * (longest - len(row[part])) for row in rows])
        for part, filler in enumerate((0, -1, -1))
    )
    return ids, verdicts, successors


def make_model(kind: str) -> Any:
    """Return a model with random weights."""
    if kind == "causal":
        return LlamaForCausalLM(LlamaConfig(**SMALL))
    labels = {0: "bad", 1: "good"}
    return LlamaForTokenClassification(
        LlamaConfig(**SMALL, id2label=labels, label2id={name: id for id, name in labels.items()})
    )


def logits_of(model: Any, ids: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the verdicts (wrong, right), [B, T, 2], and of the right successors, [B, T, tokens]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    tokens = torch.nn.functional.linear(hidden, model.model.embed_tokens.weight)
    return tokens[..., [BAD, GOOD]] if kind == "causal" else model.score(hidden), tokens


def train(prompts: list[str], *, kind: str, steps: int, batch: int, rate: float, seed: int) -> tuple[Any, list[float]]:
    """Return the trained model and the share of right verdicts in each step of training, before the update."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    shares, started = [], time.monotonic()
    for number in range(1, steps + 1):
        ids, labels, successors = batch_of(draw.sample(prompts, batch), draw)
        marked = (ids == MARKER) & (labels >= 0)
        logits, tokens = logits_of(model, ids, kind)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        # The successor of a `;` is left to the verdict, which is a token too if the model is a language model.
        successors = successors.masked_fill(ids == MARKER, -1)
        loss = loss + torch.nn.functional.cross_entropy(tokens.flatten(0, 1), successors.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shares.append((logits.argmax(-1) == labels)[marked].float().mean().item())
        if number % 50 == 0 or number == steps:
            recent = shares[-50:]
            sys.stdout.write(
                f"step {number}: loss {loss.item():.4f}, right verdicts {sum(recent) / len(recent):.4f}, "
                f"{time.monotonic() - started:.0f} s\n"
            )
            sys.stdout.flush()
    return model.eval(), shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "reward_model")
    parser.add_argument("--kind", choices=["classifier", "causal"], default="classifier")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [json.loads(line)["prompt"] for line in (HERE / "train.jsonl").read_text().splitlines()]
    model, _ = train(
        prompts,
        kind=arguments.kind,
        steps=arguments.steps,
        batch=arguments.batch,
        rate=arguments.rate,
        seed=arguments.seed,
    )
    model.save_pretrained(arguments.out)
    write_tokenizer(arguments.out)


if __name__ == "__main__":
    main()
