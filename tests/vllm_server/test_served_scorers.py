"""A teacher and a judge behind a plain vLLM server, without Headrace's plugin: both against Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import PYTHON, served
from headrace.config.schema import EngineConfig
from headrace.engines.vllm.server import HOST, VllmServer
from headrace.scoring.base import ScoreError
from headrace.scoring.replies import UrlReplies
from headrace.scoring.teachers import UrlTeacher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = Path("examples/smollm2/model")
NAME = "big"
MOST_LOGPROBS = 8
MESSAGES = [{"role": "user", "content": "What is 2 + 2? Answer with the number only."}]


class PlainServer(VllmServer):
    """A server as its users start it."""

    def arguments(self, python: str, port: int) -> list[str]:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model.absolute())]
        command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", "256", "--max-num-seqs", "4", "--max-logprobs", str(MOST_LOGPROBS)]
        return [*command, "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = EngineConfig(kind="vllm", python=PYTHON, device="cpu", slots=4)
    log = tmp_path_factory.mktemp("plain") / "vllm.log"
    for server in served(PlainServer(model=MODEL, config=config, log=log, key="", max_length=256)):
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("k", [0, MOST_LOGPROBS])
async def test_a_teacher_behind_a_server_scores_as_hugging_face_does(url: str, model: Any, k: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) + "The answer is 4."
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    teacher = UrlTeacher(url, NAME, key="", concurrency=2, k=k, vocabulary=len(tokenizer), longest=256)
    await teacher.start()
    try:
        scores = await teacher.score(tokens, np.ones(len(tokens), np.float32))
    finally:
        await teacher.close()
    with torch.no_grad():
        rows = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1].double().log_softmax(-1)
    assert scores.versions.tolist() == [-1] + [0] * (len(tokens) - 1)
    own = rows.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], own.numpy(), atol=2e-3)
    if k:
        # Which of two nearly equal tokens is the k-th likeliest is a matter of rounding; their probabilities agree.
        named = torch.from_numpy(scores.top_ids[1:].astype(np.int64))
        np.testing.assert_allclose(scores.top_logprobs[1:], rows.gather(1, named).numpy(), atol=2e-3)
        best = rows.topk(k).values.sort().values
        np.testing.assert_allclose(np.sort(scores.top_logprobs[1:]), best.numpy(), atol=2e-3)
        tails = 1 - rows.gather(1, named).exp().sum(1)
        np.testing.assert_allclose(np.exp(scores.tails[1:]), tails.numpy(), atol=2e-3)


async def test_a_server_that_allows_fewer_tokens_than_are_asked_for_is_an_error_in_one_line(url: str) -> None:
    teacher = UrlTeacher(url, NAME, key="", concurrency=1, k=MOST_LOGPROBS + 1, vocabulary=49152, longest=256)
    await teacher.start()
    try:
        with pytest.raises(ScoreError) as caught:
            await teacher.score(np.array([1, 2, 3], np.int32), np.ones(3, np.float32))
    finally:
        await teacher.close()
    assert "\n" not in str(caught.value) and "logprobs" in str(caught.value)


async def test_a_judge_behind_a_server_replies_as_hugging_face_does(url: str, model: Any) -> None:
    replies = UrlReplies(url, NAME, key="", max_tokens=8, temperature=0.0, concurrency=2)
    await replies.start()
    try:
        [said] = await replies.sample(MESSAGES, 1, seed=0)
    finally:
        await replies.close()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert said == tokenizer.decode(ids, skip_special_tokens=True)
