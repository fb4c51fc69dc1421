"""A judge: a language model that is asked about every answer, and whose replies become one number.

    prompt, answer ──template──▶ question ──▶ replies (an engine of ours, or a URL) ──▶ numbers ──▶ one score

Replies are foreign text. A reply without a number is left out. If fewer than half of the replies have a number, or none
comes in time, the rollout fails with a line that says why, and the run goes on.
"""

import asyncio
import hashlib
import json
import re
import string
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.config.scorers import JudgeConfig
from headrace.errors import ConfigError, one_line
from headrace.scoring.asking import Asking, NoUseToRetry
from headrace.scoring.base import Ended, ScoreError, Scorer, ScorerProcess, number
from headrace.scoring.functions import Question
from headrace.scoring.replies import Replies
from headrace.types import Prompt, Score

NUMBER = r"(?:(?<![\w.])-)?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d+)?"
"""A number in a text. A minus sign that follows a word or a number is a hyphen, as in "1-5"."""
SHOWN = 80
"""How much of a reply without a number is shown, in characters."""
LONGEST = 20_000
"""Of a longer reply, only its last characters are read."""
NOT_VERSION = {"weight", "concurrency", "timeout", "retries", "patience", "gpus", "memory_fraction", "threads", "cores",
               "slots", "cache", "api_key", "template"}  # fmt: skip
"""The keys of a section that do not change what a judge says."""


@dataclass(eq=False)
class _Asked:
    """A question that is under way, and the number of rollouts that wait for its answer."""

    task: asyncio.Task[Score]
    waiting: int = 0


class Judge(Scorer):
    """A judge as a scorer. It gives one score to a whole rollout, based on the text of its last turn."""

    keeps_deadlines = True

    def __init__(
        self,
        config: JudgeConfig,
        template: str,
        replies: Replies,
        *,
        process: ScorerProcess | None = None,
        weights: str = "",
    ) -> None:
        """`template` is the text of the template. `weights` tells the weights of a model from others."""
        self.process = process
        self._config = config
        self._template = Template(template)
        self._replies = replies
        # The replies of an engine keep the time limit themselves: it counts from when the engine serves.
        self._asking = Asking(config, timed=process is None)
        self.answers_within = self._asking.longest
        self._known: OrderedDict[bytes, Score] = OrderedDict()
        """The judgements that are remembered, by the digests of their questions."""
        self._asked: dict[bytes, _Asked] = {}
        said = {key: getattr(config, key) for key in config.__struct_fields__ if key not in NOT_VERSION}
        about = msgspec.json.encode([said, template, weights])
        self.version = hashlib.blake2b(about, digest_size=6).hexdigest()

    async def start(self) -> None:
        """See `Scorer.start`."""
        await self._replies.start()

    async def close(self) -> None:
        """See `Scorer.close`."""
        await self._replies.close()

    async def score(self, ended: Ended) -> list[Score]:
        """Return the judgement as a score. The same question is asked once, as far as judgements are remembered."""
        asked = self.question(ended.prompt, ended.completion)
        if not self._config.cache:
            return [await self._answer(asked)]
        key = hashlib.blake2b(asked.encode(errors="surrogatepass"), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return [known]
        score = self._known[key] = await self._shared(key, asked)
        while len(self._known) > self._config.cache:
            self._known.popitem(last=False)
        return [score]

    def question(self, prompt: Prompt, completion: str) -> str:
        """Return the question about an answer. Raises `ScoreError` if the prompt lacks a field of the template."""
        asked = Question(completion=completion, messages=prompt.messages or [], text=prompt.text, data=prompt.data)
        return self._template.fill({**asked.fields(), "prompt": prompt_text(asked)})

    async def _shared(self, key: bytes, asked: str) -> Score:
        """Return the answer to a question that several rollouts may ask at the same time."""
        open = self._asked.get(key)
        if open is None:
            open = self._asked[key] = _Asked(asyncio.create_task(self._answer(asked), name="ask a judge"))
            # If all rollouts that wait for it are cancelled, nobody asks for its error.
            open.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        open.waiting += 1
        try:
            return await asyncio.shield(open.task)
        finally:
            open.waiting -= 1
            if not open.waiting:
                open.task.cancel()
                del self._asked[key]

    async def _answer(self, asked: str) -> Score:
        messages = [{"role": "user", "content": asked}]
        if self._config.system is not None:
            messages.insert(0, {"role": "system", "content": self._config.system})
        return await self._asking.ask(lambda attempt: self._judge(messages, attempt))

    async def _judge(self, messages: Sequence[Mapping[str, str]], attempt: int) -> Score:
        count = self._config.samples
        replies = await self._replies.sample(messages, count, seed=attempt * count)
        found = [value for reply in replies if (value := read_number(reply, self._config)) is not None]
        if 2 * len(found) < max(1, len(replies)) or not found:
            # A reply that is drawn at random may be better the next time.
            failure = ScoreError if self._config.temperature else NoUseToRetry
            unread = next(reply for reply in replies if read_number(reply, self._config) is None)
            raise failure(f"the judge gave no number: {one_line(unread, SHOWN)!r}")
        value = sum(found) / len(found)
        if self._config.combine == "majority":
            [(value, _)] = Counter(found).most_common(1)
        metrics = {"spread": max(found) - min(found)} if count > 1 else {}
        return Score(value=value, metrics=metrics)


class Template:
    """The template of a question: text with `{prompt}`, `{completion}` and fields of the prompt."""

    def __init__(self, text: str) -> None:
        """Raises `ConfigError` if the text is not a template."""
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"it is not a template: {error} (write {{{{ and }}}} for braces)") from error
        self._parts = [(before, name) for before, name, _, _ in parts]
        for _, name, form, conversion in parts:
            if name is not None and (form or conversion):
                raise ConfigError(f"it is not a template: {{{name}}} has a format (write {{{{ and }}}} for braces)")
            if name is not None and not name.isidentifier():
                raise ConfigError(f"it is not a template: {{{name}}} names no field (write {{{{ and }}}} for braces)")
        if not any(name == "completion" for _, name in self._parts):
            raise ConfigError("the template has no {completion}, so the judge would not see the answer")

    def fill(self, fields: Mapping[str, Any]) -> str:
        """Return the text with the values of these fields. Raises `ScoreError` if one is missing."""
        for _, name in self._parts:
            if name is not None and name not in fields:
                known = ", ".join(sorted(fields))
                raise ScoreError(f"the template wants {name!r}, which this prompt does not have (it has {known})")
        return "".join(before + ("" if name is None else str(fields[name])) for before, name in self._parts)


def prompt_text(question: Question) -> str:
    """Return the prompt as one text. Several messages are written one below the other, with their roles."""
    prompt = question.fields()["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def read_number(reply: str, config: JudgeConfig) -> float | None:
    """Return the number of a reply; None if it has none."""
    reply = reply[-LONGEST:]
    found: Any
    if config.field:
        found = next((one[config.field] for one in json_objects(reply) if config.field in one), None)
    else:
        matches = list(re.finditer(config.pattern or _default_pattern(config), reply, re.IGNORECASE))
        found = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    if isinstance(found, str):
        words = {word.lower(): value for word, value in config.words.items()}
        found = words.get(found.strip().lower(), found.strip())
        if isinstance(found, str) and not re.fullmatch(NUMBER, found):
            return None
    if found is None or isinstance(found, bool):
        return None
    try:
        return number(float(found) if isinstance(found, str) else found, "")
    except ScoreError:
        return None


def _default_pattern(config: JudgeConfig) -> str:
    words = "|".join(rf"\b{re.escape(word)}\b" for word in config.words)
    return words or NUMBER


def json_objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a text that are not part of others, the last one first."""
    decoder, found, place = json.JSONDecoder(), list[dict[str, Any]](), text.find("{")
    while place >= 0:
        try:
            one, end = decoder.raw_decode(text, place)
            found.insert(0, one)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found
