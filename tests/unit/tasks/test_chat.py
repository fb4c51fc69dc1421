"""The chat format against transformers' own tokenizer and `apply_chat_template`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from headrace.errors import ConfigError, ModelError
from headrace.tasks.chat import ChatFormat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{ bos_token }}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
) + CHATML
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\\n' + (message['content'] | trim) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKED = """{%- for message in messages %}
    {%- if message.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{{ '' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + ({'text': message.content} | tojson) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "system": CHATML_DEFAULT_SYSTEM, "gemma": GEMMA, "llama2": LLAMA2, "marked": MARKED}

CORPUS = ["What is 12 plus 30? The answer is 42.", "Hello there, assistant and user; [INST] ok [/INST]\nBe brief.\n"]
QUESTION = {"role": "user", "content": "What is 12 + 30? Ünïcode <b>&amp;</b>"}
FOLLOW_UP = {"role": "user", "content": "And 7 more?"}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=[],
        special_tokens=["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
        + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_model(path: Path, template: str | None = CHATML, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (tokenizer or byte_level()).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>" if template == LLAMA2 else "<|im_end|>",
        "chat_template": template,
    } | files.pop("settings", {})
    settings = {key: value for key, value in settings.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def rendered(reference: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_open_equals_transformers(tmp_path: Path, template: str, kind: Any) -> None:
    path = write_model(tmp_path, template, kind())
    reference = AutoTokenizer.from_pretrained(path)
    chat = ChatFormat.load(path)
    conversation = [QUESTION, {"role": "assistant", "content": "42."}, FOLLOW_UP]
    for messages in ([QUESTION], conversation):
        tokens = chat.open(messages)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == rendered(reference, messages)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_continued_turn_by_turn_equals_one_rendered_whole(
    tmp_path: Path, template: str, kind: Any, ended: bool
) -> None:
    path = write_model(tmp_path, template, kind())
    reference = AutoTokenizer.from_pretrained(path)
    chat = ChatFormat.load(path)
    end = chat.token_id("</s>" if template == LLAMA2 else "<|im_end|>")

    whole = rendered(reference, [QUESTION, {"role": "assistant", "content": "42."}, FOLLOW_UP])
    opening, following = chat.open([QUESTION]).tolist(), chat.continue_([FOLLOW_UP], ended=ended).tolist()
    between = whole[len(opening) : -len(following)]

    assert whole == opening + between + following
    # What is left between the two is the policy's own turn: its words, and its end token exactly if it gave one.
    words = chat.decode(between).strip()
    assert words == "42."
    assert (between[-1] == end) is ended


def test_several_messages_follow_a_turn(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    reference = AutoTokenizer.from_pretrained(path)
    chat = ChatFormat.load(path)
    tools = [{"role": "tool", "content": "12*34 = 408"}, {"role": "tool", "content": "</calc> \n  = 7"}]
    turn = {"role": "assistant", "content": "let me see"}
    whole = rendered(reference, [QUESTION, turn, *tools])
    following = chat.continue_(tools, ended=False).tolist()
    assert whole == chat.open([QUESTION]).tolist() + chat.encode("let me see").tolist() + following


def test_what_the_policy_said_is_not_part_of_the_continuation(tmp_path: Path) -> None:
    """The continuation is a function of the new messages alone, even if they quote the placeholder of the turn."""
    chat = ChatFormat.load(write_model(tmp_path))
    quoting = {"role": "user", "content": "QzJvTurnAlpha WxKpTurnBeta"}
    text = chat.decode(chat.continue_([quoting], ended=True), skip_special=False)
    assert text == "\n<|im_start|>user\nQzJvTurnAlpha WxKpTurnBeta<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        # drops earlier answers; writes another end once something follows; looks at the words
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content + ('<|im_end|>' if loop.last else '<|endoftext|>') }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content | length }}",
        "{% for m in messages %}{{ m.content | lower }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_turns_is_refused(tmp_path: Path, template: str) -> None:
    chat = ChatFormat.load(write_model(tmp_path, template))
    with pytest.raises(ModelError, match="rewrites an assistant's turn"):
        chat.continue_([FOLLOW_UP], ended=True)


THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3 does it: thinking stays until a user speaks again."""
FORGETS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
"""As DeepSeek-R1 does it: no earlier turn keeps its thinking."""


def test_friction_56_a_template_that_removes_earlier_thinking_is_refused(tmp_path: Path) -> None:
    line = r"removes the thinking \(<think>\) of an assistant's turn when messages follow it; episodes of several turns"
    for name, template in (("qwen", THINKS), ("deepseek", FORGETS)):
        chat = ChatFormat.load(write_model(tmp_path / name, template))
        assert len(chat.open([QUESTION]))
        with pytest.raises(ModelError, match=line):
            chat.continue_([FOLLOW_UP], ended=True)
    # Where a tool answers, thinking stays: what follows is what the template writes.
    tool = {"role": "tool", "content": "408"}
    chat = ChatFormat.load(tmp_path / "qwen")
    text = chat.decode(chat.continue_([tool], ended=True), skip_special=False)
    assert text == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"


def test_what_a_template_refuses_is_one_line(tmp_path: Path) -> None:
    chat = ChatFormat.load(write_model(tmp_path, GEMMA))
    with pytest.raises(ModelError, match=r"refuses a conversation of \(system, user\): no system here$"):
        chat.open([{"role": "system", "content": "x"}, QUESTION])
    with pytest.raises(ModelError, match="roles must alternate"):
        chat.continue_([{"role": "tool", "content": "4"}, FOLLOW_UP], ended=True)
    with pytest.raises(ModelError, match="does not compile"):
        ChatFormat.load(write_model(tmp_path, "{% for m in %}"))


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    chat = ChatFormat.load(write_model(tmp_path, "{{ messages.__class__.__base__.__subclasses__() }}"))
    with pytest.raises(ModelError, match="unsafe"):
        chat.open([QUESTION])


def test_stop_tokens_come_from_everywhere_that_names_them(tmp_path: Path) -> None:
    ids = {name: i for i, name in enumerate(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])}
    one = ChatFormat.load(write_model(tmp_path / "one", generation_config={"eos_token_id": [4, 1]}))
    assert one.stop_token_ids == (1, 3, 4)
    settings = {"eos_token": {"content": "</s>", "__type": "AddedToken"}}
    two = ChatFormat.load(write_model(tmp_path / "two", None, settings=settings, config={"eos_token_id": 4}))
    assert two.stop_token_ids == (ids["</s>"], ids["<|endoftext|>"])
    # The template ends a turn with a token that no other file calls an end.
    three = ChatFormat.load(write_model(tmp_path / "three", CHATML, settings={"eos_token": "<|endoftext|>"}))
    assert three.stop_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])


def test_decode_and_encode(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    chat, reference = ChatFormat.load(path), AutoTokenizer.from_pretrained(path)
    text = "The answer is 42.<|im_end|>\n<|im_start|>"
    assert chat.encode(text).tolist() == reference.encode(text, add_special_tokens=False)
    assert chat.decode(chat.encode(text)) == "The answer is 42.\n"
    assert chat.decode(chat.encode(text), skip_special=False) == text
    assert chat.token_id("<|im_end|>") == 3
    assert chat.token_id("7") == chat.encode("7")[0]
    with pytest.raises(ConfigError, match=r"\[rollouts\] stop: '</answer>' is not one token"):
        chat.token_id("</answer>")


def test_limits_saved_with_a_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=50, pad_id=0, pad_token="<s>")
    chat = ChatFormat.load(write_model(tmp_path, tokenizer=tokenizer))
    assert chat.decode(chat.encode("Hello there, assistant")) == "Hello there, assistant"


def test_a_special_token_that_only_the_settings_declare_is_one_token(tmp_path: Path) -> None:
    """As transformers does it: the vocabulary's own entry becomes special."""
    tokenizer = byte_level()
    vocabulary = json.loads(tokenizer.to_str())
    vocabulary["added_tokens"] = [token for token in vocabulary["added_tokens"] if token["content"] != "<|im_end|>"]
    path = write_model(tmp_path, tokenizer=Tokenizer.from_str(json.dumps(vocabulary)))
    chat, reference = ChatFormat.load(path), AutoTokenizer.from_pretrained(path)
    assert chat.open([QUESTION]).tolist() == rendered(reference, [QUESTION])
    assert chat.encode("<|im_end|>").tolist() == [3]
    assert chat.decode([3]) == ""


def test_the_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    path = write_model(tmp_path, "wrong")
    (path / "chat_template.jinja").write_text(CHATML)
    chat, reference = ChatFormat.load(path), AutoTokenizer.from_pretrained(path)
    assert chat.open([QUESTION]).tolist() == rendered(reference, [QUESTION])


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": CHATML}]
    chat = ChatFormat.load(write_model(tmp_path / "a", settings={"chat_template": named}))
    assert chat.decode(chat.open([FOLLOW_UP]), skip_special=False).endswith("<|im_start|>assistant\n")
    with pytest.raises(ModelError, match="none is the default"):
        ChatFormat.load(write_model(tmp_path / "b", settings={"chat_template": named[:1]}))


def test_unusable_directories_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        ChatFormat.load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        ChatFormat.load(tmp_path)
    path = write_model(tmp_path / "plain", None)
    plain = ChatFormat.load(path)
    assert plain.decode(plain.encode("Hello")) == "Hello"
    with pytest.raises(ModelError, match="has no chat template"):
        plain.open([QUESTION])
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        ChatFormat.load(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        ChatFormat.load(path)


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    token = {"content": "<|im_end|>", "special": True}
    with pytest.raises(ModelError, match=r"disagree about '<\|im_end\|>'"):
        ChatFormat.load(write_model(tmp_path / "a", settings={"added_tokens_decoder": {"77": token}}))
    with pytest.raises(ModelError, match=r"eos_token '<end>' is not in tokenizer\.json"):
        ChatFormat.load(write_model(tmp_path / "b", settings={"eos_token": "<end>"}))


def test_added_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("</answer>", special=False, normalized=False)])
    path = write_model(tmp_path, tokenizer=tokenizer)
    chat = ChatFormat.load(path)
    assert chat.token_id("</answer>") == tokenizer.get_vocab_size() - 1
    assert chat.decode(chat.encode("4</answer>")) == "4</answer>"


def test_tasks_and_scoring_import_neither_torch_nor_transformers() -> None:
    modules = ["chat", "dataset", "gym", "calculator", "source"]
    imports = [f"headrace.tasks.{name}" for name in modules]
    imports += [f"headrace.scoring.{name}" for name in ("base", "rewards", "functions", "worker_main")]
    heavy = ("torch", "transformers", "reasoning_gym")
    program = f"import sys, {', '.join(imports)}\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
