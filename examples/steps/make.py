"""Write the model directory (a config and a tokenizer, no weights) and the data of this example. Run once; the results
are committed.

The task is to follow a map, six steps far. Each of 16 letters leads to another one, always to the same. A prompt says
where four travellers begin, and in every step each traveller goes on to the next letter.

    prompt   acfh                       the travellers begin at a, c, f and h
    answer   AdCaFgHo;DhAdGbOl;...      from A to d, from C to a, from F to g, from H to o; then from D to h, ...

`;` ends a step. In the demonstrations of the warm start a traveller sometimes stays where it is, and the steps after
that go on from there.
"""

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
LETTERS, TRAVELLERS, STEPS = "abcdefghijklmnop", 4, 6
LEADS = dict(zip(LETTERS, "dkahmgbofcpnejli", strict=True))
"""The map: where each letter leads."""
SPECIAL = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
VOCABULARY = [*SPECIAL, *LETTERS, *LETTERS.upper(), ";", "+", "-", "?"]
"""The tokens. `+` and `-` are for the verdicts of a reward model that is a causal language model."""
STAY = 0.1
"""The probability that a traveller stays where it is in a step of a demonstration. So 2 of 3 steps are right."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
"""The shape of the policy, a Llama of 0.6M parameters."""


def step(begin: str, end: str) -> str:
    """Return the step in which the travellers go from these letters to those."""
    return "".join(a.upper() + b for a, b in zip(begin, end, strict=True)) + ";"


def onward(place: str) -> str:
    """Return the letters to which these lead."""
    return "".join(LEADS[letter] for letter in place)


def walk(prompt: str, draw: random.Random, stay: float, steps: int = STEPS) -> str:
    """Return an answer in which each traveller stays where it is with this probability, in each step."""
    place, answer = prompt, ""
    for _ in range(steps):
        begin, place = place, "".join(a if draw.random() < stay else LEADS[a] for a in place)
        answer += step(begin, place)
    return answer


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of one token a character."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_data(path: Path, count: int, taken: set[str], draw: random.Random, steps: int = STEPS) -> None:
    """Write lines with a prompt, its answer and a demonstration. No prompt is in two files."""
    lines = []
    while len(lines) < count:
        prompt = "".join(draw.sample(LETTERS, TRAVELLERS))
        if prompt not in taken:
            taken.add(prompt)
            answer, shown = (walk(prompt, draw, stay, steps) for stay in (0.0, STAY))
            lines.append(json.dumps({"prompt": prompt, "answer": answer, "demonstration": shown}))
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tokenizer(HERE / "model")
    config = {"architectures": ["LlamaForCausalLM"], **SHAPE}
    (HERE / "model" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    taken: set[str] = set()
    draw = random.Random(0)
    write_data(HERE / "heldout.jsonl", 500, taken, draw)
    write_data(HERE / "train.jsonl", 4000, taken, draw)
