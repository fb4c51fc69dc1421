"""Write the quickstart's model directory (a config and a tokenizer, no weights) and its data. Run once; the results are
committed.

The task: put 8 to 10 different letters in alphabetical order. Guessing an order is right once in 8! = 40,320 tries.
"""

import json
import random
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
SPECIAL = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
IN_ORDER = 0.3
"""The share of the warm start's demonstrations that are in order; the others are in reverse order."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(directory: Path) -> None:
    """A Llama of 0.6M parameters with heads of 64, one token a character."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *string.ascii_lowercase, " ", ":", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
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
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_data(path: Path, count: int, taken: set[str], draw: random.Random) -> None:
    """Lines of distinct letters in random order; no line is in two files."""
    lines = []
    while len(lines) < count:
        letters = "".join(draw.sample(string.ascii_lowercase, draw.randint(8, 10)))
        if letters not in taken:
            taken.add(letters)
            answer = "".join(sorted(letters))
            shown = answer if draw.random() < IN_ORDER else answer[::-1]
            lines.append(json.dumps({"prompt": letters, "answer": answer, "demonstration": shown}))
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_model(HERE / "model")
    taken: set[str] = set()
    draw = random.Random(0)
    write_data(HERE / "heldout.jsonl", 1000, taken, draw)
    write_data(HERE / "train.jsonl", 8000, taken, draw)
