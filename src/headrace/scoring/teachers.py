"""Teachers outside of the trainer: each sampled token of a rollout gets the teacher's log-probabilities.

    a rollout that has ended ──▶ the prompt's teacher (an engine of ours, or a URL) ──▶ scores beside its tokens

A rollout is scored as soon as it has ended, while the others of its group are generated. Every score names the version
of the teacher that gave it. A score without a proved version is never used: its rollout fails.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from headrace.channel.codec import Message
from headrace.config.scorers import TeacherConfig
from headrace.delivery.base import Manifest, Proof
from headrace.engines.serving import LikeliestScored, ScoreLikeliest
from headrace.errors import one_line
from headrace.scoring.asking import Asking, NoUseToRetry, Unreachable
from headrace.scoring.base import Ended, MovingProcess, ScoreError, ScorerProcess, Taught
from headrace.scoring.model_process import ModelEngine, ModelProcess
from headrace.scoring.open_questions import OpenQuestions
from headrace.scoring.server import SHOWN, Server
from headrace.types import NO_VERSION, Float32Array, Int32Array, Prompt, Score, TeacherScores, Trace

M = TypeVar("M", bound=Message)

SMALLEST_TAIL = 1e-9
"""The smallest probability of a tail that is computed as one minus the sum of others."""
LOGPROB_BYTES = 256
"""About how many bytes a server needs to write down one log-probability."""


class Teacher(Protocol):
    """A model that scores sequences."""

    label: str
    """A name that identifies the model. It is recorded with every score."""

    @property
    def process(self) -> ScorerProcess | None:
        """The process of the model, if it has one."""

    async def start(self) -> None:
        """Prepare the teacher, before the first sequence."""

    async def close(self) -> None:
        """Release what the teacher holds. Idempotent."""

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        """Return the scores of these tokens, all but the first. Raises `ScoreError`."""


class EngineTeacher:
    """A teacher on an engine of ours, in a worker process of its own."""

    def __init__(self, process: ModelProcess, label: str, *, k: int, vocabulary: int) -> None:
        """`vocabulary` is the number of tokens that the policy can draw. The likeliest tokens are among them."""
        self.process = process
        self.label = label
        self._k = k
        self._vocabulary = vocabulary

    async def start(self) -> None:
        """See `Teacher.start`. The process is started with the others of the run."""

    async def close(self) -> None:
        """See `Teacher.close`. The process belongs to its launcher."""

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        """See `Teacher.score`."""
        question = ScoreLikeliest(
            token_ids=token_ids, temperatures=temperatures, k=self._k, vocabulary=self._vocabulary
        )
        return (await self.process.ask(question, LikeliestScored)).scores


class TeacherProcess(ModelEngine):
    """The process of a teacher that follows the policy. It scores nothing before it has proved a version."""

    def __init__(self, name: str, *, timeout: float, load_deadline: float | None = None) -> None:
        super().__init__(name, timeout=timeout, load_deadline=load_deadline)
        self.proved = NO_VERSION
        self.known: set[int] = set()
        """Every version that this process, or one before it, has proved."""

    def lost(self, reason: str) -> None:
        """See `ModelProcess.lost`. The weights are lost with the process."""
        super().lost(reason)
        self.proved = NO_VERSION

    async def load(self, manifest: Manifest) -> Proof:
        """See `MovingProcess.load`."""
        if not self.serves:
            raise ScoreError(f"{self.name} is away")
        engine = await self.engine()
        proof = await engine.load(manifest)
        if proof.accepted:
            self.proved = proof.version
            self.known.add(proof.version)
        elif proof.quarantined:
            self.proved = NO_VERSION
        return proof

    async def ask(self, message: Message, reply: type[M]) -> M:
        """See `ModelProcess.ask`. Raises `Unreachable` while no version is proved."""
        if self.proved == NO_VERSION:
            raise Unreachable(f"{self.name} has proved no version of the teacher")
        return await super().ask(message, reply)


class MovingTeacher(EngineTeacher):
    """A teacher that follows the policy. Only scores of versions that it has proved are used."""

    def __init__(self, process: TeacherProcess, label: str, *, k: int, vocabulary: int) -> None:
        super().__init__(process, label, k=k, vocabulary=vocabulary)
        self.moving = process

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        """See `Teacher.score`."""
        scores = await super().score(token_ids, temperatures)
        if strange := set(scores.versions[1:].tolist()) - self.moving.known:
            raise ScoreError(f"it gave scores of version {min(strange)}, which was not proved")
        return scores


class UrlTeacher:
    """A teacher behind the URL of a vLLM server, which returns log-probabilities of a prompt's tokens."""

    process = None

    def __init__(
        self, url: str, model: str, *, key: str, concurrency: int, k: int, vocabulary: int, longest: int
    ) -> None:
        """`longest` is the length of the longest sequence, in tokens."""
        size = (k + 2) * longest * LOGPROB_BYTES
        self._server = Server(f"{url.rstrip('/')}/completions", key=key, concurrency=concurrency, longest=size)
        self._model = model
        self._k = k
        self._vocabulary = vocabulary
        self.label = model

    async def start(self) -> None:
        """See `Teacher.start`."""
        await self._server.start()

    async def close(self) -> None:
        """See `Teacher.close`."""
        await self._server.close()

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        """See `Teacher.score`. Servers score at temperature 1. The model has version 0."""
        if (temperatures != 1.0).any():
            other = float(temperatures[temperatures != 1.0][0])
            raise NoUseToRetry(f"{self._server.url} scores at temperature 1, and tokens were sampled at {other:g}")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._k,
        }
        text = await self._server.post(body)
        try:
            answer = msgspec.json.decode(text, type=_Completion)
        except msgspec.MsgspecError as error:
            why = one_line(str(error), SHOWN)
            raise ScoreError(f"{self._server.url} did not answer as vLLM does: {why}") from error
        if answer.model != self._model:
            raise NoUseToRetry(f"{self._server.url} answered as {answer.model[:80]!r}, not as {self._model!r}")
        found = answer.choices[0].prompt_logprobs if answer.choices else None
        if found is None or len(found) != len(token_ids):
            raise NoUseToRetry(f"{self._server.url} gave no log-probabilities of the prompt (prompt_logprobs)")
        return self._read(found, token_ids)

    def _read(self, found: Sequence[dict[int, "_Logprob"] | None], token_ids: Int32Array) -> TeacherScores:
        scores = TeacherScores.of_unscored(len(token_ids), self._k)
        for at, (entry, token) in enumerate(zip(found, token_ids.tolist(), strict=True)):
            if at == 0:
                continue
            top = {} if entry is None else {id: one.logprob for id, one in entry.items() if 0 < one.rank <= self._k}
            known = entry is not None and token in entry and len(top) == self._k
            if entry is None or not known or not all(0 <= id < self._vocabulary for id in top):
                raise NoUseToRetry(f"{self._server.url} gave no {self._k} likeliest tokens of the policy at token {at}")
            ids = sorted(top)
            scores.logprobs[at] = entry[token].logprob
            scores.versions[at] = 0
            scores.top_ids[at] = ids
            scores.top_logprobs[at] = [top[id] for id in ids]
            if self._k:
                scores.tails[at] = math.log(max(SMALLEST_TAIL, 1.0 - sum(math.exp(value) for value in top.values())))
        return scores


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Completion(msgspec.Struct):
    """The part of vLLM's answer that a teacher reads."""

    model: str
    choices: list[_Choice]


class Teachers:
    """The teachers of a run. A prompt names its teacher in a field, if there are several."""

    def __init__(self, teachers: Mapping[str, Teacher], sections: Mapping[str, TeacherConfig], *, field: str) -> None:
        """`sections` maps each teacher's name to the section with the limits of its questions."""
        self.questions = OpenQuestions()
        """See `Teaching.questions`. Each trace of a rollout is a question of its own."""
        self._teachers = dict(teachers)
        # A process keeps the time limit itself, so that the reason says whether it died, was slow or was not ready.
        self._asking = {name: Asking(sections[name], timed=one.process is None) for name, one in teachers.items()}
        self._field = field

    @property
    def processes(self) -> list[ScorerProcess]:
        """The processes of the teachers' models."""
        return [one.process for one in self._teachers.values() if one.process is not None]

    @property
    def moving(self) -> dict[str, MovingProcess]:
        """The processes of the teachers that follow the policy, by the names of the teachers."""
        return {name: one.moving for name, one in self._teachers.items() if isinstance(one, MovingTeacher)}

    async def start(self) -> None:
        """Prepare all teachers."""
        for teacher in self._teachers.values():
            await teacher.start()

    async def close(self) -> None:
        """Release what the teachers hold. Idempotent."""
        for teacher in self._teachers.values():
            await teacher.close()

    async def teach(self, ended: Ended) -> Taught:
        """Return the rollout's traces with the scores of its tokens. Raises `ScoreError`."""
        name = self._name_of(ended.prompt)
        try:
            traces = [await self._taught(name, trace) for trace in ended.rollout.traces]
        except ScoreError as error:
            raise ScoreError(f"the teacher {name!r}: {error}") from error
        gaps = np.concatenate([_gaps(trace) for trace in traces])
        versions = np.unique(np.concatenate([_versions(trace) for trace in traces])).tolist()
        label = hashlib.blake2b(self._teachers[name].label.encode(), digest_size=6).hexdigest()
        return Taught(
            traces,
            Score(
                value=float(gaps.mean()) if len(gaps) else 0.0,
                scorer=name,
                version=f"{label}:{'-'.join(map(str, versions))}",
            ),
        )

    def _name_of(self, prompt: Prompt) -> str:
        if len(self._teachers) == 1:
            return next(iter(self._teachers))
        name = prompt.data.get(self._field)
        if not isinstance(name, str) or name not in self._teachers:
            known = ", ".join(self._teachers)
            raise ScoreError(f"the field {self._field!r} of prompt {prompt.id} is {name!r}, not a teacher ({known})")
        return name

    async def _taught(self, name: str, trace: Trace) -> Trace:
        places = np.flatnonzero(trace.trained)
        if not len(places):
            return trace
        end = int(places[-1]) + 1
        token_ids = trace.token_ids[:end]
        # Context may have been sampled too, at another temperature, before its rollout was salvaged.
        heat = np.where(trace.trained, trace.temperature_of_tokens(1.0), 1.0)[:end].astype(np.float32)
        asking = self._asking[name]
        with self.questions.ask(f"the teacher {name!r}", asking.longest):
            scores = await asking.ask(lambda attempt: self._teachers[name].score(token_ids, heat))
        if len(scores.logprobs) != end or (scores.versions[places] == NO_VERSION).any():
            raise ScoreError("it gave scores of no proved version")
        numbers = (scores.logprobs[places], scores.top_logprobs[places], scores.tails[places])
        if not all(np.isfinite(each).all() for each in numbers[:2]) or np.isnan(numbers[2]).any():
            raise ScoreError("it gave log-probabilities that are not finite")
        rest = len(trace) - end
        whole = TeacherScores.joined([(end, scores), (rest, TeacherScores.of_unscored(rest, scores.k))])
        return msgspec.structs.replace(trace, teacher=whole)


def _gaps(trace: Trace) -> Float32Array:
    """Return log(teacher / sampler) of the trained tokens."""
    if trace.teacher is None:
        return np.zeros(0, np.float32)
    return trace.teacher.logprobs[trace.trained] - trace.logprobs[trace.trained]


def _versions(trace: Trace) -> Int32Array:
    return np.zeros(0, np.int32) if trace.teacher is None else trace.teacher.versions[trace.trained]
