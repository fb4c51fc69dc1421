"""Teachers outside of the trainer: which one scores a prompt, what a server says, and which scores are never used."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.algorithms.assemble import assemble
from headrace.channel.codec import decode, encode
from headrace.config import make_config
from headrace.config.schema import EngineConfig
from headrace.config.scorers import TeacherConfig
from headrace.delivery.base import Canary, Manifest, Proof
from headrace.engines.embedded.core import EngineCore
from headrace.engines.serving import LikeliestScored, Load, LoadProved
from headrace.errors import ConfigError, HeadraceError, UserError
from headrace.models.attention import ATTENTION
from headrace.scoring.base import Ended, ScoreError, Scorer, Stage, Turn
from headrace.scoring.teachers import MovingTeacher, TeacherProcess, Teachers, UrlTeacher
from headrace.types import NO_VERSION, Float32Array, Group, Int32Array, Prompt, Rollout, Score, TeacherScores, Trace

SECTION = TeacherConfig(model="m", retries=0, timeout=5.0)
VOCABULARY = 8


class Fixed:
    """A teacher that gives every token the same log-probability, under one version."""

    process = None

    def __init__(self, value: float, version: int = 3, label: str = "fixed") -> None:
        self.value, self.version, self.label = value, version, label
        self.asked: list[list[int]] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        self.asked.append(token_ids.tolist())
        found = TeacherScores.of_unscored(len(token_ids), 0)
        found.logprobs[1:], found.versions[1:] = self.value, self.version
        return found


class One(Scorer):
    async def score(self, ended: Ended) -> list[Score]:
        return [Score(value=1.0)]


class Broken(Scorer):
    async def score(self, ended: Ended) -> list[Score]:
        raise ScoreError("broken")


def ended(*, heldout: bool = False, **data: Any) -> Ended:
    """Two tokens of context, three sampled tokens, and a last one of context."""
    trace = Trace(
        token_ids=np.arange(6, dtype=np.int32),
        trained=np.array([False, False, True, True, True, False]),
        logprobs=np.array([0, 0, -1, -2, -3, 0], np.float32),
        versions=np.array([-1, -1, 0, 0, 0, -1], np.int32),
    )
    rollout = Rollout(id="1/0", index=0, traces=[trace], ending="finished")
    return Ended(Prompt(id="p", text="q", data=data), rollout, [Turn(0, 2, 5, lambda: "a")], heldout)


def stage(scorers: dict[str, Scorer], **teachers: Fixed) -> Stage:
    sections = dict.fromkeys(teachers, SECTION)
    return Stage(scorers, teachers=Teachers(teachers, sections, field="teacher"))


async def test_scores_stand_beside_the_tokens_and_survive_the_journal() -> None:
    teacher = Fixed(-0.5)
    scored = await stage({"one": One()}, big=teacher).score(ended())
    assert teacher.asked == [[0, 1, 2, 3, 4]]
    rollout = decode(Rollout, [bytes(frame) for frame in encode(scored)])
    [trace] = rollout.traces
    assert trace.teacher.logprobs[2:5].tolist() == [-0.5] * 3
    assert trace.teacher.versions.tolist() == [-1, 3, 3, 3, 3, -1]
    assert trace.teacher.k == 0
    assert rollout.reward == 1.0
    [label] = [score.version for score in rollout.scores if score.scorer == "big"]
    assert label.endswith(":3")
    [value] = [score.value for score in rollout.scores if score.scorer == "big"]
    assert value == pytest.approx((0.5 + 1.5 + 2.5) / 3)


async def test_without_another_score_the_teacher_gives_the_reward() -> None:
    scored = await stage({}, big=Fixed(-0.5)).score(ended())
    assert scored.reward == pytest.approx(1.5)


async def test_held_out_answers_are_scored_only_if_nothing_else_scores_them() -> None:
    teacher = Fixed(-0.5)
    assert (await stage({"one": One()}, big=teacher).score(ended(heldout=True))).reward == 1.0
    assert teacher.asked == []
    assert (await stage({}, big=teacher).score(ended(heldout=True))).reward == pytest.approx(1.5)


async def test_a_field_of_the_prompt_chooses_among_several_teachers() -> None:
    left, right = Fixed(-1.0), Fixed(-2.0)
    both = stage({"one": One()}, left=left, right=right)
    scored = await both.score(ended(teacher="right"))
    assert scored.traces[0].teacher.logprobs[2] == -2.0
    assert left.asked == []
    for wrong in ({"teacher": "middle"}, {}, {"teacher": 3}):
        failed = await both.score(ended(**wrong))
        assert failed.ending == "failed"
        assert "not a teacher (left, right)" in failed.reason


async def test_a_score_of_no_proved_version_is_never_used() -> None:
    failed = await stage({"one": One()}, big=Fixed(-1.0, version=NO_VERSION)).score(ended())
    assert (failed.ending, failed.reason) == ("failed", "the teacher 'big': it gave scores of no proved version")
    assert failed.traces[0].teacher is None
    failed = await stage({"one": One()}, big=Fixed(-math.inf)).score(ended())
    assert failed.reason == "the teacher 'big': it gave log-probabilities that are not finite"


async def test_a_scorer_that_fails_leaves_no_teacher_behind() -> None:
    class Slow(Fixed):
        async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
            await asyncio.sleep(30)
            raise AssertionError

    failed = await stage({"broken": Broken()}, big=Slow(0.0)).score(ended())
    assert failed.reason == "broken"
    assert len(asyncio.all_tasks()) == 1


def test_batches_have_the_scores_and_refuse_to_mix_them() -> None:
    def group(number: int, k: int) -> Group:
        trace = ended().rollout.traces[0]
        scores = TeacherScores.of_unscored(6, k)
        scores.logprobs[:] = number
        trace = msgspec.structs.replace(trace, teacher=scores)
        rollouts = [
            Rollout(id=f"{number}/{i}", index=i, traces=[trace], ending="finished", reward=float(i)) for i in range(2)
        ]
        return Group(id=number, prompt=Prompt(id="p", text="q"), version=0, rollouts=rollouts)

    keys = {"advantage": "grpo", "normalize": "token", "group_size": 2, "max_tokens": 8, "temperature": 1.0}
    batch = assemble([group(2, 4), group(1, 4)], step=1, version=0, **keys)
    assert batch.teacher.logprobs.tolist() == [1.0] * 12 + [2.0] * 12
    assert batch.teacher.top_ids.shape == (24, 4)
    with pytest.raises(HeadraceError, match="with 3 and with 4 likeliest tokens"):
        assemble([group(1, 3), group(2, 4)], step=1, version=0, **keys)


# ---- a teacher that follows the policy


class Answers:
    """A hub on which a teacher's process proves some versions, and scores under the one that it says."""

    def __init__(self, scored: int, accepted: bool = True) -> None:
        self.scored, self.accepted = scored, accepted

    async def request(self, name: str, message: Any, reply: Any, *, timeout: float) -> Any:
        if isinstance(message, Load):
            version = message.manifest.version
            return LoadProved(proof=Proof(engine=name, version=version, accepted=self.accepted, reason="no"))
        found = TeacherScores.of_unscored(len(message.token_ids), 0)
        found.versions[1:] = self.scored
        return LikeliestScored(scores=found)


def manifest_of(version: int) -> Manifest:
    canary = Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    places = {"transport": "shm", "location": "", "entries": [], "plan_digest": 0, "digest": 0, "canary": canary}
    return Manifest(version=version, parent=-1, step=0, **places)


async def test_a_moving_teacher_scores_only_under_versions_that_it_has_proved() -> None:
    tokens, heat = np.arange(3, dtype=np.int32), np.ones(3, np.float32)
    process = TeacherProcess("scorer-0", timeout=0.2)
    teacher = MovingTeacher(process, "ema", k=0, vocabulary=VOCABULARY)
    hub = Answers(scored=4)
    with pytest.raises(ScoreError, match="scorer-0 is away"):
        await process.load(manifest_of(4))
    process.connect(hub)
    with pytest.raises(ScoreError, match="scorer-0 has proved no version of the teacher"):
        await teacher.score(tokens, heat)
    assert (await process.load(manifest_of(4))).accepted
    assert (await teacher.score(tokens, heat)).versions.tolist() == [-1, 4, 4]
    hub.accepted = False
    assert not (await process.load(manifest_of(5))).accepted
    assert process.proved == 4
    hub.scored = 5
    with pytest.raises(ScoreError, match="it gave scores of version 5, which was not proved"):
        await teacher.score(tokens, heat)
    process.lost("killed")
    process.back()
    assert process.proved == NO_VERSION
    with pytest.raises(ScoreError, match="has proved no version"):
        await teacher.score(tokens, heat)


async def test_a_rollout_waits_until_the_teacher_has_proved_a_version() -> None:
    process = TeacherProcess("scorer-0", timeout=5.0)
    teacher = MovingTeacher(process, "ema", k=0, vocabulary=VOCABULARY)
    process.connect(Answers(scored=4))
    # Neither a retry nor the time limit of an attempt is used up while there is no version.
    section = TeacherConfig(policy="ema", retries=0, timeout=0.1, patience=5.0)
    stage = Stage({"one": One()}, teachers=Teachers({"self": teacher}, {"self": section}, field="teacher"))
    scoring = asyncio.create_task(stage.score(ended()))
    await asyncio.sleep(0.3)
    assert not scoring.done()
    assert (await process.load(manifest_of(4))).accepted
    rollout = await scoring
    assert rollout.traces[0].teacher.versions[2:5].tolist() == [4] * 3


# ---- a server


def logits_of(tokens: list[int]) -> torch.Tensor:
    """What the model of the server gives at each token: made up, but always the same."""
    made = [[math.sin(3 * token + 2 * other + at) for other in range(VOCABULARY)] for at, token in enumerate(tokens)]
    return torch.tensor(made, dtype=torch.float64).log_softmax(-1)


def prompt_logprobs(tokens: list[int], k: int) -> list[dict[str, Any] | None]:
    """The list that vLLM returns: the k likeliest tokens, and the token itself with its rank."""
    found: list[dict[str, Any] | None] = [None]
    for row, token in zip(logits_of(tokens)[:-1], tokens[1:], strict=True):
        order = row.argsort(descending=True).tolist()
        chosen = dict.fromkeys([*order[:k], token])
        found.append(
            {str(id): {"logprob": float(row[id]), "rank": order.index(id) + 1, "decoded_token": "x"} for id in chosen}
        )
    return found


@asynccontextmanager
async def served(k: int, change: Any = None) -> AsyncIterator[UrlTeacher]:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["prompt_logprobs"] == k
        found = prompt_logprobs(body["prompt"], k)
        reply = {"model": body["model"], "choices": [{"text": "", "prompt_logprobs": found}]}
        if change is not None:
            change(reply)
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        teacher = UrlTeacher(url, "big", key="", concurrency=2, k=k, vocabulary=VOCABULARY, longest=64)
        await teacher.start()
        try:
            yield teacher
        finally:
            await teacher.close()


@pytest.mark.parametrize("k", [0, 3])
async def test_a_server_scores_by_the_log_probabilities_of_a_prompt(k: int) -> None:
    tokens = np.array([1, 5, 2, 7, 7], np.int32)
    async with served(k) as teacher:
        scores = await teacher.score(tokens, np.ones(5, np.float32))
    assert scores.versions.tolist() == [-1, 0, 0, 0, 0]
    for at in range(1, 5):
        row = logits_of(tokens.tolist())[at - 1]
        assert scores.logprobs[at] == pytest.approx(float(row[tokens[at]]), abs=1e-6)
        ids = sorted(row.topk(k).indices.tolist())
        assert scores.top_ids[at].tolist() == ids
        np.testing.assert_allclose(scores.top_logprobs[at], row[ids].numpy(), atol=1e-6)
        if k:
            assert scores.tails[at] == pytest.approx(math.log(1 - float(row[ids].exp().sum())), abs=1e-6)


async def test_a_server_scores_no_token_of_another_temperature() -> None:
    def fail(reply: Any) -> None:
        raise AssertionError("it was asked")

    async with served(0, fail) as teacher:
        with pytest.raises(ScoreError, match=r"scores at temperature 1, and tokens were sampled at 0\.5"):
            await teacher.score(np.array([1, 5], np.int32), np.array([1.0, 0.5], np.float32))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda reply: reply.update(model="other"), "answered as 'other', not as 'big'"),
        (lambda reply: reply.pop("model"), "did not answer as vLLM does"),
        (lambda reply: reply.update(choices=[]), r"gave no log-probabilities of the prompt"),
        (lambda reply: reply["choices"][0].update(prompt_logprobs=None), "gave no log-probabilities of the prompt"),
        (lambda reply: reply["choices"][0]["prompt_logprobs"][2].clear(), "gave no 3 likeliest tokens .* at token 2"),
    ],
)
async def test_a_server_that_says_something_else_is_refused(change: Any, why: str) -> None:
    async with served(3, change) as teacher:
        with pytest.raises(ScoreError, match=why):
            await teacher.score(np.array([1, 5, 2], np.int32), np.ones(3, np.float32))


# ---- an engine


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=20, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()


def test_an_engine_without_a_proved_version_scores_nothing() -> None:
    config = EngineConfig(slots=2, block_size=4)
    tokens, heat = np.arange(6, dtype=np.int32), np.ones(6, np.float32)
    unproved = EngineCore(tiny(), config, name="e", max_length=8)
    with pytest.raises(UserError, match="the teacher has no proved version"):
        unproved.score_likeliest(tokens, heat, 2, 20)
    core = EngineCore(tiny(), config, name="e", max_length=8, version=5)
    assert core.score_likeliest(tokens, heat, 2, 20).versions.tolist() == [-1, 5, 5, 5, 5, 5]
    # An embedding that is padded: no token beyond those of the policy is among the likeliest.
    assert core.score_likeliest(tokens, heat, 2, 4).top_ids[1:].max() < 4
    for wrong, why in [
        ((np.arange(9, dtype=np.int32), heat, 2, 20), "longer than the teacher's limit of 8"),
        ((np.array([25], np.int32), heat, 2, 20), "outside of the vocabulary of 20"),
        ((tokens, heat, 2, 24), "the teacher has 20 tokens"),
        ((tokens, heat, 20, 20), "20 likeliest tokens are asked for among 20"),
    ]:
        with pytest.raises(UserError, match=why):
            core.score_likeliest(*wrong)


# ---- the configuration

MINIMAL = {"model": {"path": "m"}, "task": {"kind": "dataset", "path": "p.jsonl", "reward": "r.py:r"}}
TEACHER = ["algorithm.loss=distillation", "scorers.big.kind=teacher"]
HELD = [*TEACHER, "scorers.big.model=m", "scorers.big.in_trainer=true"]
SERVER = ["scorers.big.url=http://x/v1", "scorers.big.served_model=n", "scorers.big.tokenizer=t"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (TEACHER, r"\[scorers.big\] model: give the model of the teacher, the url"),
        ([*TEACHER, "scorers.big.url=http://x"], r"\[scorers.big\] served_model: it is given with url"),
        ([*TEACHER, "scorers.big.model=m", "scorers.big.tokenizer=t"], r"\[scorers.big\] tokenizer: it is given with"),
        ([*TEACHER, *SERVER, "scorers.big.url=x"], r"\[scorers.big\] url: 'x' is not a URL"),
        ([*TEACHER, *SERVER, "rollouts.temperature=0.9"], r"\[scorers.big\] url: a server scores at temperature 1"),
        (
            [*TEACHER, *SERVER, "evaluate.temperature=0.6", "task.reward=[]"],
            r"\[evaluate\] temperature: 0.6 is neither",
        ),
        ([*TEACHER, "scorers.big.model=m", "rollouts.top_p=0.9"], r"\[scorers.big\]: a teacher outside of the trainer"),
        ([*TEACHER, "scorers.big.model=m", "algorithm.teacher=t"], r"\[algorithm\] teacher: \[scorers.big\] is a"),
        ([*TEACHER, "scorers.big.model=m", "algorithm.teacher_field=f"], r"\[algorithm\] teacher_field: there are"),
        ([*TEACHER, "scorers.big.model=m", "scorers.big.policy=ema"], r"\[scorers.big\] model: give the model"),
        ([*TEACHER, "scorers.big.model=m", "scorers.big.every=2"], r"\[scorers.big\] every: only policy = 'ema' or"),
        ([*TEACHER, "scorers.big.policy=ema", "scorers.big.versions_ago=2"], r"versions_ago: only policy = 'earlier'"),
        ([*TEACHER, "scorers.big.policy=ema", "training.ranks=2"], r"\[scorers.big\] policy: not with several"),
        ([*TEACHER, "scorers.big.policy=ema", "scorers.big.dtype=bfloat16"], r"\[scorers.big\] dtype: a teacher that"),
        ([*TEACHER, "scorers.big.policy=ema", "scorers.big.in_trainer=true"], r"\[scorers.big\] in_trainer: the"),
        ([*HELD, "task.reward=[]"], r"\[task\] reward is required, or a scorer in its place"),
        ([*HELD, "scorers.big.gpus=[0]"], r"\[scorers.big\] gpus: with in_trainer = true nothing looks at it"),
        ([*HELD, "algorithm.teacher=t"], r"\[algorithm\] teacher: \[scorers.big\] model is held by the trainer too"),
        ([*HELD, "scorers.more.kind=teacher", "scorers.more.model=m"], r"\[scorers.big\] model: \[scorers.more\] is a"),
        ([*HELD, "algorithm.loss=grpo"], r"\[scorers.big\] model: only loss 'distillation' learns from one"),
        ([*TEACHER, "scorers.big.model=m", "algorithm.loss=grpo"], r"\[scorers.big\]: nothing learns from a teacher"),
    ],
)
def test_mistakes_are_one_line(settings: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make_config(MINIMAL, settings)


def test_a_server_that_is_not_alone_need_not_score_held_out_answers() -> None:
    make_config(MINIMAL, [*TEACHER, *SERVER, "evaluate.temperature=0.6"])
    make_config(MINIMAL, [*TEACHER, *SERVER, "evaluate.temperature=1", "task.reward=[]"])
