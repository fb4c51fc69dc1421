"""Prompts that are plain text, with and without BOS, against transformers' own tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from headrace.tasks.chat import ChatFormat

TINY = Path(__file__).parents[2] / "data/tiny_model"
BOS = "<|begin|>"
TEXT = "Once upon a time"


@pytest.fixture
def with_bos(tmp_path: Path) -> Path:
    """A model whose tokenizer puts a BOS token before every text, as Llama's does."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS])
    begin = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, begin)])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": BOS}))
    return model


def test_a_text_begins_with_bos_where_the_tokenizer_adds_one(with_bos: Path) -> None:
    chat, theirs = ChatFormat.load(with_bos), AutoTokenizer.from_pretrained(with_bos)
    assert chat.open_text(TEXT).tolist() == theirs(TEXT)["input_ids"]
    assert chat.open_text(TEXT)[0] == theirs.bos_token_id
    assert chat.encode(TEXT).tolist() == theirs(TEXT, add_special_tokens=False)["input_ids"]
    # A text that has its BOS already gets no second one.
    assert chat.open_text(BOS + TEXT).tolist() == chat.open_text(TEXT).tolist()


def test_a_text_has_no_bos_where_the_tokenizer_adds_none() -> None:
    chat, theirs = ChatFormat.load(TINY), AutoTokenizer.from_pretrained(TINY)
    assert chat.open_text(TEXT).tolist() == theirs(TEXT)["input_ids"] == chat.encode(TEXT).tolist()


def test_a_template_of_ones_own_takes_the_place_of_the_models() -> None:
    own = "{% for message in messages %}Q: {{ message.content }}\nA:{% endfor %}"
    messages = [{"role": "user", "content": TEXT}]
    chat, theirs = ChatFormat.load(TINY, own), AutoTokenizer.from_pretrained(TINY)
    expected = theirs.apply_chat_template(messages, chat_template=own, tokenize=False, add_generation_prompt=True)
    assert chat.open(messages).tolist() == chat.encode(expected).tolist()
