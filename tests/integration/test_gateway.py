"""The gateway over real engines: recorded tokens are what plain Hugging Face code computes, and agents train a run."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from runs import ROOT, headrace, start
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import Run
from headrace.config import EngineConfig
from headrace.engines.base import Sampling
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.gateway.gateway import Gateway
from headrace.gateway.session import Session
from headrace.models.loading import load_model
from headrace.tasks.chat import ChatFormat
from headrace.types import Prompt

pytestmark = pytest.mark.slow

MODEL = ROOT / "examples/quickstart/model"
NOWHERE = Path("nowhere.py")
EXAMPLE = ROOT / "examples/agent/agent.toml"
SMALL = (
    "run.versions=2", "run.name=run", "warm_start.steps=2", "warm_start.batch=8", "rollouts.group_size=2",
    "buffer.groups=2", "evaluate.prompts=4", "observe.display=plain", "task.timeout=60",
)  # fmt: skip


def settings(directory: Path, *more: str) -> list[str]:
    every = [*SMALL, f"run.directory={directory}", *more]
    return [part for setting in every for part in ("--set", setting)]


def ledger(run_dir: Path) -> dict[str, int]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())


async def test_what_is_recorded_is_what_plain_code_computes() -> None:
    config = EngineConfig(slots=4, device="cpu")
    engine = EmbeddedEngine.from_path(MODEL, config, max_length=100, weights="random", version=0)
    chat = ChatFormat.load(MODEL)
    gateway = Gateway(engine, chat, model="m", max_length=100, max_tokens=60)
    await gateway.listen(0, "k" * 16)
    try:
        session = Session(
            chat=chat, prompt=Prompt(id="p"), max_turns=4, seconds=60,
            sampling=Sampling(max_tokens=40, temperature=0.7, seed=3, stop_token_ids=chat.stop_token_ids),
        )  # fmt: skip
        gateway.sessions.add(session)
        async with AsyncOpenAI(base_url=gateway.base_url, api_key=session.key, max_retries=0) as api:
            history = [{"role": "user", "content": "cab"}]
            for text in ("again", "more"):
                pieces = await api.chat.completions.create(model="m", messages=history, max_tokens=10, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])
                history += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
            await api.chat.completions.create(model="m", messages=[*history[:2], history[-1]], max_tokens=10)
    finally:
        await gateway.close()
        await engine.close()

    weights = load_model(MODEL, weights="random", dtype="float32", seed=0, device="cpu").state_dict()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), attn_implementation="eager").eval()
    model.load_state_dict(weights)
    main, fork = session.conversation.traces()
    for trace in (main, fork):
        tokens = torch.tensor(trace.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0].double() / 0.7
        reference = torch.log_softmax(logits[:-1], -1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        sampled = trace.versions == 0
        assert sampled.sum() >= 10
        np.testing.assert_allclose(trace.logprobs[sampled], reference[sampled[1:]], atol=1e-4)


def test_the_example_agent_trains_a_run(tmp_path: Path) -> None:
    done = headrace("train", str(EXAMPLE), *settings(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the gateway listens at http://127.0.0.1:" in done.stdout
    assert ledger(tmp_path / "run") == {"trained": 4}
    assert not (tmp_path / "run" / "gateway.json").exists()


HEARING = """
from headrace.scoring.base import Scorer
from headrace.types import Score

class Hearing(Scorer):
    def __init__(self):
        self._heard = {}

    def span(self, span):
        sampled = int((span.tokens.versions >= 0).sum())
        self._heard[span.rollout] = self._heard.get(span.rollout, 0) + sampled

    async def score(self, ended):
        return [Score(value=float(self._heard.pop(ended.rollout.id)))]
"""


def test_a_scorer_hears_the_tokens_of_agents(tmp_path: Path) -> None:
    (tmp_path / "hearing.py").write_text(HEARING)
    scorer = f"scorers.hearing.scorer={tmp_path / 'hearing.py'}:Hearing"
    done = headrace("train", str(EXAMPLE), *settings(tmp_path, scorer))
    assert done.returncode == 0, done.stderr
    ended = [rollout for rollout in Run(tmp_path / "run").rollouts() if rollout.ending in ("finished", "truncated")]
    assert len(ended) >= 8
    for rollout in ended:
        own, heard = rollout.scores
        assert (own.scorer, heard.scorer) == ("agent", "hearing")
        assert heard.value == rollout.trained_tokens > 0
        assert rollout.reward == own.value + heard.value


def test_agents_from_outside_train_a_run(tmp_path: Path) -> None:
    process = start("gateway", str(EXAMPLE), *settings(tmp_path, "evaluate.prompts=1"))
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.communicate(timeout=240)))
    reader.start()
    try:
        where = tmp_path / "run" / "gateway.json"
        deadline = time.monotonic() + 120
        while not where.is_file() or not where.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output
            time.sleep(0.05)
        told = json.loads(where.read_text())
        api = OpenAI(**told, max_retries=0)
        for _ in range(10):  # Held out before, 2 versions x 2 groups x 2 rollouts, held out after.
            session = api.post("/sessions", body={"wait": 30}, cast_to=dict)
            own = api.with_options(api_key=session["api_key"])
            answer = own.chat.completions.create(model="any", messages=session["prompt"]["messages"])
            text = answer.choices[0].message.content or ""
            reward = float(text[:1] == session["prompt"]["data"]["answer"][:1])
            own.post(f"/sessions/{session['id']}/reward", body={"reward": reward}, cast_to=dict)
    finally:
        reader.join(timeout=120)
        if process.poll() is None:
            process.kill()
            reader.join(timeout=60)
    assert process.returncode == 0, output
    assert ledger(tmp_path / "run") == {"trained": 4}


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (f"task.agent={NOWHERE}:agent", f"headrace: [task] agent: there is no file {NOWHERE.absolute()}"),
        ('task.command=["x"]', "headrace: [task] command: give an agent or a command, not both"),
        ("gateway.bind=0.0.0.0", "headrace: [gateway] bind: 0.0.0.0 is every interface; name the one"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, setting: str, line: str) -> None:
    done = headrace("train", str(EXAMPLE), *settings(tmp_path, setting))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(line), done.stderr
    assert not (tmp_path / "run").exists()


def test_only_agents_come_from_outside() -> None:
    done = headrace("gateway", str(ROOT / "examples/quickstart/quickstart.toml"))
    assert (done.returncode, done.stderr) == (
        2,
        'headrace: headrace gateway needs [task] kind = "agent", not "dataset"\n',
    )


def test_the_gateway_needs_no_torch() -> None:
    code = "import sys, headrace.gateway.gateway; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
