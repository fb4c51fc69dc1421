"""Steps are scored while the next are sampled, in whatever parts tokens arrive, and whatever happens to the process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForTokenClassification

from headrace.channel.codec import Message
from headrace.channel.worker_link import Incoming
from headrace.config.scorers import ServedScorerSection
from headrace.engines.embedded import process_reward as server_side
from headrace.engines.embedded.process_reward import StepServer
from headrace.engines.step_values import ForgetSteps, ReadSteps, StepTokens
from headrace.models.process_reward import ProcessRewardModel, load_process_reward_model
from headrace.scoring import process_reward as scorer_side
from headrace.scoring.asking import Unreachable
from headrace.scoring.base import Ended, ScoreError, Span, Stage
from headrace.scoring.model_process import ModelProcess
from headrace.scoring.process_reward import ProcessRewardScorer
from headrace.scoring.steps import StepCutter
from headrace.types import NO_VERSION, Prompt, Rollout, Score, Trace

MARKER, OTHER_MARKER, TAG = 3, 4, 29
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Q"}])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=30, pad_token_id=0, initializer_range=0.3, max_position_embeddings=512, **sizes)
    LlamaForTokenClassification(config).save_pretrained(path)
    return path


class InThisProcess(ModelProcess):
    """The real server of a real model, without the process around it. It can be made to die."""

    def __init__(self, directory: Path, slots: int = 64) -> None:
        super().__init__("scorer-0", timeout=5.0)
        self._directory = directory
        self._slots = slots
        self.messages: list[ReadSteps] = []
        self.deaths = 0
        """The number of questions that it will not survive."""
        self.away = 0
        """The number of questions that do not reach it."""
        self.lost_verdicts = 0
        """The number of verdicts that its next answer lacks."""
        self.broken = False
        """Whether asking it raises an error that nobody expects."""
        self.gate: asyncio.Event | None = None
        """Questions wait for this event before they reach it."""
        self.restart()

    def restart(self) -> None:
        self.model: ProcessRewardModel = load_process_reward_model(self._directory)
        self.server = StepServer(self.model, "v7", self._slots)

    async def ask(self, message: Message, reply: type) -> Message:  # type: ignore[override]
        assert isinstance(message, ReadSteps)
        self.messages.append(message)
        await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        if self.broken:
            raise ZeroDivisionError("division by zero")
        if self.away:
            self.away -= 1
            raise Unreachable("scorer-0 is not ready")
        if self.deaths:
            self.deaths -= 1
            self.restart()
            raise ScoreError("scorer-0 died: it was killed")
        self.server.take(Incoming(1, message))
        [(_, read)] = self.server.answer()
        if self.lost_verdicts:
            read.answers[0].values = read.answers[0].values[self.lost_verdicts :]
            self.lost_verdicts = 0
        return read

    async def tell(self, message: Message) -> None:
        assert isinstance(message, ForgetSteps)
        self.server.take(Incoming(0, message))
        assert self.server.answer() == []


def trace_of(ids: list[int], opening: int) -> Trace:
    """A trace whose first tokens are context, and whose others were sampled."""
    context = Trace.of_context(np.array(ids[:opening], np.int32))
    n = len(ids) - opening
    return context.extended(
        np.array(ids[opening:], np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), trained=True
    )


def example(seed: int, length: int = 60) -> Trace:
    draw = random.Random(seed)
    ids = [draw.randrange(5, 29) if draw.random() < 0.8 else draw.choice([MARKER, OTHER_MARKER]) for _ in range(length)]
    return trace_of(ids, opening=7)


def parts_of(trace: Trace, seed: int) -> Iterator[tuple[int, Trace]]:
    draw, at = random.Random(seed), 0
    while at < len(trace):
        end = min(len(trace), at + draw.randint(1, 20))
        yield at, trace.part(at, end)
        at = end


def tell(scorer: ProcessRewardScorer, id: str, trace: Trace, seed: int = 0) -> None:
    for start, part in parts_of(trace, seed):
        scorer.span(Span(id, 0, 0, start, part, str))


def ended(id: str, *traces: Trace) -> Ended:
    return Ended(PROMPT, Rollout(id=id, index=0, traces=list(traces), ending="finished"), [])


@torch.no_grad()
def expected(directory: Path, trace: Trace, tag: int | None = None) -> list[tuple[int, int, float]]:
    """The steps of a trace and their values, from one plain pass of the Hugging Face model."""
    model = LlamaForTokenClassification.from_pretrained(directory).eval()
    ids, places, steps, start = [], [], [], None
    for at, (token, version) in enumerate(zip(trace.token_ids.tolist(), trace.versions.tolist(), strict=True)):
        ids.append(token)
        if version == NO_VERSION:
            start = None
            continue
        start = at if start is None else start
        if token in (MARKER, OTHER_MARKER):
            ids += [] if tag is None else [tag]
            places.append(len(ids) - 1)
            steps.append((start, at + 1))
            start = None
    chances = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
    return [(*step, float(chances[place])) for step, place in zip(steps, places, strict=True)]


def found(scores: list[Score]) -> list[tuple[int, int, float]]:
    return [(score.start, score.end, pytest.approx(score.value, abs=2e-5)) for score in scores if score.level == "step"]


@pytest.mark.parametrize("tag", [None, TAG])
@pytest.mark.parametrize("streaming", [True, False])
async def test_scores_are_those_of_one_pass(directory: Path, tag: int | None, streaming: bool) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER, OTHER_MARKER], tag=tag, streaming=streaming)
    assert scorer.step_token_ids == ((MARKER, OTHER_MARKER) if streaming else ())
    traces = {f"{n}/0": example(n) for n in range(5)}
    for id, trace in traces.items():
        for start, part in parts_of(trace, seed=3):
            scorer.span(Span(id, 0, 0, start, part, str))
            await asyncio.sleep(0.001)
    for id, trace in traces.items():
        scores = await scorer.score(ended(id, trace))
        assert found(scores) == expected(directory, trace, tag)
        assert len(scores) > 3
        assert {score.version for score in scores} == {"v7"}
    assert len(process.messages) > 5 if streaming else len(process.messages) == 5
    last = {id: max(end for _, end, _ in expected(directory, trace, tag)) for id, trace in traces.items()}
    tags = 0 if tag is None else sum(len(expected(directory, trace, tag)) for trace in traces.values())
    assert process.model.computed == sum(last.values()) + tags  # Each token once, and none after the last step.


async def test_steps_that_end_together_share_a_message_and_a_pass(directory: Path) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER])
    for n in range(8):
        tell(scorer, f"{n}/0", trace_of([9, 8, 7, 6, MARKER], 2))
    await asyncio.gather(*(scorer.score(ended(f"{n}/0", trace_of([9, 8, 7, 6, MARKER], 2))) for n in range(8)))
    assert [len(message.growths) for message in process.messages] == [8]


async def test_scores_arrive_before_the_rollout_has_ended(directory: Path) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER])
    trace = trace_of([9, 8, 7, MARKER, 6, 5, MARKER, 9], 2)
    times = np.arange(len(trace), dtype=np.float64)
    for start, end in ((0, 2), (2, 4), (4, 7), (7, 8)):
        moments = None if start == 0 else times[start:end]
        scorer.span(Span("1/0", 0, 0, start, trace.part(start, end), str, moments))
        await asyncio.sleep(0.03)
    assert len(process.messages) == 2
    assert [growth.start for message in process.messages for growth in message.growths] == [0, 4]
    first, second = await scorer.score(ended("1/0", trace))
    assert (first.metrics["began"], first.metrics["ended"]) == (2.0, 3.0)
    assert (second.metrics["began"], second.metrics["ended"]) == (4.0, 6.0)
    assert first.metrics["arrived"] < second.metrics["arrived"]


async def test_the_process_frees_rollouts_that_were_scored_or_forgotten(directory: Path) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER])
    for id in ("1/0", "2/0"):
        tell(scorer, id, trace_of([9, 8, 7, MARKER], 2))
    await scorer.score(ended("1/0", trace_of([9, 8, 7, MARKER], 2)))
    scorer.forget("2/0")
    scorer.forget("3/0")
    await asyncio.sleep(0.05)
    assert process.model.rollouts == 0
    await scorer.close()


async def test_a_process_that_was_restarted_reads_the_rollout_again(directory: Path) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER, OTHER_MARKER])
    trace = example(5)
    tell(scorer, "1/0", trace.part(0, 30))
    await asyncio.sleep(0.03)
    process.restart()
    scorer.span(Span("1/0", 0, 0, 30, trace.part(30, len(trace)), str))
    assert found(await scorer.score(ended("1/0", trace))) == expected(directory, trace)
    assert [growth.start for message in process.messages for growth in message.growths][-1] == 0


@pytest.mark.parametrize("deaths", [1, 2])
async def test_steps_that_the_process_held_when_it_died_are_asked_for_again(directory: Path, deaths: int) -> None:
    process = InThisProcess(directory)
    scorer = ProcessRewardScorer(process, [MARKER, OTHER_MARKER])
    trace = example(6)
    process.deaths = deaths
    tell(scorer, "1/0", trace)
    tell(scorer, "2/0", trace)
    both = await asyncio.gather(*(scorer.score(ended(id, trace)) for id in ("1/0", "2/0")), return_exceptions=True)
    if deaths == 1:
        assert [found(scores) for scores in both] == [expected(directory, trace)] * 2
    else:
        assert [str(error) for error in both] == ["scorer-0 died: it was killed"] * 2
        tell(scorer, "3/0", trace)  # Rollouts after that are scored again.
        assert found(await scorer.score(ended("3/0", trace))) == expected(directory, trace)


async def test_rollouts_wait_for_a_process_that_is_away(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_side, "FIRST_PAUSE", 0.01)
    process, trace = InThisProcess(directory), example(6)
    process.away = 5
    patient = ProcessRewardScorer(process, [MARKER, OTHER_MARKER], limits=ServedScorerSection(retries=0))
    tell(patient, "1/0", trace)
    assert found(await patient.score(ended("1/0", trace))) == expected(directory, trace)
    process.away = 5
    hasty = ProcessRewardScorer(process, [MARKER], limits=ServedScorerSection(retries=1, patience=0.0))
    with pytest.raises(ScoreError, match=r"^scorer-0 is not ready$"):
        await hasty.score(ended("2/0", trace))
    assert process.away == 3


async def test_an_answer_with_too_few_verdicts_is_asked_for_again(directory: Path) -> None:
    process, trace = InThisProcess(directory), example(6)
    for retries, lost in ((1, 1), (0, 2)):
        scorer = ProcessRewardScorer(process, [MARKER, OTHER_MARKER], limits=ServedScorerSection(retries=retries))
        process.lost_verdicts = lost
        tell(scorer, f"{retries}/0", trace)
        if retries:
            assert found(await scorer.score(ended("1/0", trace))) == expected(directory, trace)
        else:
            with pytest.raises(ScoreError, match=r"^scorer-0 gave another number of verdicts than it was asked for$"):
                await scorer.score(ended("0/0", trace))


async def test_an_error_of_the_scorer_itself_fails_its_rollouts(directory: Path) -> None:
    process = InThisProcess(directory)
    process.broken = True
    scorer = ProcessRewardScorer(process, [MARKER])
    with pytest.raises(ScoreError, match=r"^scorer-0: ZeroDivisionError"):
        await scorer.score(ended("1/0", trace_of([9, 8, 7, MARKER], 2)))


async def test_a_rollout_that_was_given_up_while_the_process_was_away_is_freed(directory: Path) -> None:
    process = InThisProcess(directory)
    process.gate = asyncio.Event()
    scorer = ProcessRewardScorer(process, [MARKER])
    tell(scorer, "1/0", trace_of([9, 8, 7, MARKER], 2))
    await asyncio.sleep(0.02)
    scorer.forget("1/0")
    await asyncio.sleep(0.02)  # The process is told to forget it, and then its tokens arrive.
    process.gate.set()
    await asyncio.sleep(0.02)
    assert process.messages
    assert process.model.rollouts == 0


async def test_a_scorer_that_is_closed_lets_nobody_wait(directory: Path) -> None:
    process, trace = InThisProcess(directory), trace_of([9, 8, 7, MARKER], 2)
    process.gate = asyncio.Event()
    scorer = ProcessRewardScorer(process, [MARKER], limits=ServedScorerSection(concurrency=1))
    waiting = [asyncio.create_task(scorer.score(ended("1/0", trace)))]
    await asyncio.sleep(0.02)  # Its question is under way.
    waiting.append(asyncio.create_task(scorer.score(ended("2/0", trace))))
    await asyncio.sleep(0.02)  # Its question waits for a place.
    await scorer.close()
    waiting.append(asyncio.create_task(scorer.score(ended("3/0", trace))))
    async with asyncio.timeout(5):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in errors] == ["the scorer was closed"] * 3


async def test_a_rollout_that_the_model_cannot_read_fails_alone(directory: Path) -> None:
    scorer = ProcessRewardScorer(InThisProcess(directory), [MARKER])
    stage = Stage({"steps": scorer})
    long, short = trace_of([9] * 600 + [MARKER], 2), trace_of([9, 8, 7, MARKER], 2)
    for id, trace in (("1/0", long), ("2/0", short)):
        stage.span(Span(id, 0, 0, 0, trace, str))
    failed = await stage.score(ended("1/0", long))
    assert failed.ending == "failed"
    assert failed.reason == "rollout 1/0 is longer than the 512 tokens that the reward model reads"
    assert len(await scorer.score(ended("2/0", short))) == 1


@pytest.mark.parametrize("whole", ["last", "min", "mean", "product"])
async def test_scores_of_steps_make_a_score_of_the_rollout(directory: Path, whole: str) -> None:
    scorer = ProcessRewardScorer(InThisProcess(directory), [MARKER, OTHER_MARKER], whole=whole)  # type: ignore[arg-type]
    stage = Stage({"steps": scorer}, {"steps": 2.0})
    rollout = await stage.score(ended("1/0", example(8)))
    values = np.array([value for *_, value in expected(directory, example(8))])
    wanted = {"last": values[-1], "min": values.min(), "mean": values.mean(), "product": values.prod()}[whole]
    assert rollout.reward == pytest.approx(2.0 * wanted, rel=1e-4)
    assert (await stage.score(ended("2/0", trace_of([9, 8, 7], 2)))).reward == 0.0


async def test_an_agents_traces_are_scored_at_the_end(directory: Path) -> None:
    scorer = ProcessRewardScorer(InThisProcess(directory), [MARKER, OTHER_MARKER])
    one, two = example(10), example(11)
    scorer.span(Span("1/0", None, 0, 0, one, str))
    scores = await scorer.score(ended("1/0", one, two))
    assert found([score for score in scores if score.trace == 0]) == expected(directory, one)
    assert found([score for score in scores if score.trace == 1]) == expected(directory, two)


async def test_a_rollout_is_doomed_by_a_step_below_the_threshold(directory: Path) -> None:
    trace = example(12)
    values = [value for *_, value in expected(directory, trace)]
    for threshold, doomed in ((min(values) + 0.01, True), (min(values) - 0.01, False), (0.0, False)):
        stage = Stage(
            {"steps": ProcessRewardScorer(InThisProcess(directory), [MARKER, OTHER_MARKER], cancel_below=threshold)}
        )
        assert not stage.doomed("1/0")
        stage.span(Span("1/0", 0, 0, 0, trace, str))
        await asyncio.sleep(0.03)
        assert stage.doomed("1/0") is doomed
        assert not stage.doomed("2/0")


def test_context_belongs_to_no_step() -> None:
    cutter = StepCutter([MARKER])
    first = trace_of([9, MARKER, 9, 8, MARKER, 7], opening=3)
    second = trace_of([MARKER, 5, 6, MARKER], opening=2)
    times = np.array([0.0, 0, 0, 1, 2, 3])
    assert [(step.start, step.end, step.began, step.ended) for step in cutter.take(first, times)] == [(3, 5, 1.0, 2.0)]
    assert [(step.start, step.end, step.began) for step in cutter.take(second)] == [(8, 10, None)]


async def test_messages_are_joined_into_passes_of_so_many_rollouts(directory: Path) -> None:
    process = InThisProcess(directory, slots=2)
    ids = np.array([9, 8, 7], np.int32)
    for n, rollout in enumerate(["a", "b", "c", "a"]):
        start = 3 if n == 3 else 0
        growth = StepTokens(rollout=rollout, start=start, token_ids=ids, wanted=[2])
        process.server.take(Incoming(n + 1, ReadSteps(growths=[growth])))
    process.server.take(Incoming(0, ForgetSteps(rollouts=["a", "b", "c"])))
    passes = []
    while process.server.waiting:
        passes.append([incoming.request_id for incoming, _ in process.server.answer()])
    assert passes == [[1, 2], [3, 4], []]
    assert process.model.rollouts == 0


@pytest.mark.parametrize(("slots", "tokens", "passes"), [(2, 100, [2, 2, 1]), (64, 7, [2, 2, 1]), (64, 1, [1] * 5)])
async def test_one_message_with_many_rollouts_is_read_in_several_passes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, slots: int, tokens: int, passes: list[int]
) -> None:
    monkeypatch.setattr(server_side, "PASS_TOKENS", tokens)
    ids, found = np.array([9, 8, 7], np.int32), list[int]()
    growths = [StepTokens(rollout=str(n), start=0, token_ids=ids, wanted=[2]) for n in range(5)]
    process = InThisProcess(directory, slots)
    grow = process.model.grow
    monkeypatch.setattr(process.model, "grow", lambda given: found.append(len(given)) or grow(given))
    process.server.take(Incoming(1, ReadSteps(growths=growths)))
    [(_, read)] = process.server.answer()
    assert found == passes
    assert len({round(value, 5) for answer in read.answers for value in answer.values}) == 1
    assert [len(answer.values) for answer in read.answers] == [1] * 5


async def test_steps_of_one_rollout_that_wait_are_read_in_one_pass(directory: Path) -> None:
    ids = np.arange(5, 17, dtype=np.int32)
    alone = InThisProcess(directory).server
    alone.take(Incoming(1, ReadSteps(growths=[StepTokens(rollout="a", start=0, token_ids=ids, wanted=[3, 7, 11])])))
    [(_, whole)] = alone.answer()
    process = InThisProcess(directory)
    for start in (0, 4, 8):
        growths = [StepTokens(rollout="a", start=start, token_ids=ids[start : start + 4], wanted=[3])]
        if start == 4:  # The process does not know what comes before these.
            growths.append(StepTokens(rollout="b", start=4, token_ids=ids[:4], wanted=[3]))
        process.server.take(Incoming(start + 1, ReadSteps(growths=growths)))
    process.server.take(Incoming(20, ReadSteps(growths=[StepTokens(rollout="a", start=0, token_ids=ids, wanted=[3])])))
    read = process.server.answer()
    assert [incoming.request_id for incoming, _ in read] == [1, 5, 9]
    values = [answers.answers[0].values[0] for _, answers in read]
    assert values == pytest.approx(whole.answers[0].values, abs=1e-6)
    assert read[1][1].answers[1].missing
    assert process.model.computed == 12
    [(_, again)] = process.server.answer()
    assert again.answers[0].values == pytest.approx(values[:1], abs=1e-6)
