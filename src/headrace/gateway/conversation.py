"""The tokens of one session. Sampled tokens stay as they were sampled, whatever text a client sends back.

If a request's history matches a recorded turn, the request continues from that turn's own tokens, and only the messages
after it are rendered. If a client edits its history, the token stream forks at the last turn that the client left
unchanged. Every sampled token is trained in exactly one trace. In other traces it is context, with its recorded
log-probability and version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from headrace.gateway.base import Chat, Message, Tools
from headrace.scoring.base import Turn as PlacedTurn
from headrace.types import Float32Array, Int32Array, Trace

History = tuple[str, ...]
"""The messages of a conversation, each as canonical JSON. The first element is the tools that were offered."""

NOTHING = Trace.of_context(np.zeros(0, np.int32))
"""A trace without tokens."""
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
_ENCODER = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, eq=False)
class Opening:
    """The start of a request: the tokens that the policy continues."""

    parent: ConversationTurn | None
    """The turn that the request follows; None if no recorded turn matches."""
    context: Int32Array
    """The new tokens since that turn, which were not sampled."""
    history: History = ()
    text: str = ""
    """The prompt text of a plain completion; empty for other requests."""

    @property
    def token_ids(self) -> Int32Array:
        """All tokens of the prompt."""
        return self.context if self.parent is None else np.concatenate([self.parent.token_ids, self.context])


@dataclass(frozen=True, eq=False)
class ConversationTurn:
    """One turn of the policy, and everything that came before it."""

    opening: Opening
    sampled: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    token_ids: Int32Array
    """All tokens from the start of the stream to the end of this turn."""
    history: History
    """The history with this turn as its last message; empty for plain completions."""
    text: str
    """The prompt and the answer of a plain completion."""
    ended: bool
    """Whether the policy ended its turn itself, with a stop token."""


class Conversation:
    """The turns of a session, which form a tree."""

    def __init__(self, chat: Chat, listen: Callable[[int, int, Trace], None] | None = None) -> None:
        """Make an empty conversation. `listen` is called with tokens when their turn has ended.

        Its arguments are the turn's number, the position of the first token, and the tokens. Every sampled token is
        reported once, and so is the context that several answers to one request share.
        """
        self._chat = chat
        self._listen = listen
        self.turns: list[ConversationTurn] = []
        """The turns in the order in which they ended."""

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled, over all turns."""
        return sum(len(turn.sampled) for turn in self.turns)

    def open_chat(self, messages: Sequence[Message], tools: Tools = None) -> Opening:
        """Open a chat request. It continues from the longest recorded history that the messages begin with."""
        history = (_ENCODER.encode(tools or []).decode(), *map(_key, messages))
        fitting = [t for t in self.turns if t.history and t.history == history[: len(t.history)]]
        # A request must add something to the history that it continues. Otherwise there is nothing to answer, and the
        # messages are rendered anew.
        parent = max((t for t in fitting if len(t.history) < len(history)), key=lambda t: len(t.history), default=None)
        if parent is None:
            return Opening(None, self._chat.open(messages, tools=tools), history)
        following = messages[len(parent.history) - 1 :]
        return Opening(parent, self._chat.continue_(following, ended=parent.ended, tools=tools), history)

    def open_text(self, prompt: str) -> Opening:
        """Open a plain completion. It continues from the longest recorded text that the prompt begins with."""
        fitting = [t for t in self.turns if t.text and prompt.startswith(t.text)]
        parent = max(fitting, key=lambda t: len(t.text), default=None)
        rest = prompt if parent is None else prompt[len(parent.text) :]
        return Opening(parent, self._chat.encode(rest), text=prompt)

    def open_tokens(self, prompt: Sequence[int]) -> Opening:
        """Open a plain completion of tokens, which are used as they are."""
        token_ids = np.asarray(prompt, np.int32)
        fitting = [t for t in self.turns if np.array_equal(t.token_ids, token_ids[: len(t.token_ids)])]
        parent = max(fitting, key=lambda t: len(t.token_ids), default=None)
        return Opening(parent, token_ids[0 if parent is None else len(parent.token_ids) :])

    def record(
        self,
        opening: Opening,
        sampled: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        answer: Message,
    ) -> ConversationTurn:
        """Record a turn exactly as the engine reported it. `answer` is the message that the client received."""
        turn = ConversationTurn(
            opening=opening,
            sampled=np.array(sampled, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions, np.int32),
            token_ids=np.concatenate([opening.token_ids, np.asarray(sampled, np.int32)]),
            history=(*opening.history, _key(answer)) if opening.history else (),
            text=opening.text + str(answer["content"]) if opening.text else "",
            ended=bool(sampled) and sampled[-1] in self._chat.stop_token_ids,
        )
        if self._listen is not None:
            number, start = len(self.turns), len(opening.token_ids)
            if not self.turns or self.turns[-1].opening is not opening:
                self._listen(number, start - len(opening.context), Trace.of_context(opening.context))
            self._listen(number, start, NOTHING.extended(turn.sampled, turn.logprobs, turn.versions, trained=True))
        self.turns.append(turn)
        return turn

    def traces(self) -> list[Trace]:
        """Return one trace for each turn that no other turn follows, in the order of those turns."""
        traces = []
        trained: set[int] = set()
        for path in self._paths():
            trace = NOTHING
            for turn in path:
                context = Trace.of_context(turn.opening.context)
                trace = trace.extended(context.token_ids, context.logprobs, context.versions, trained=False)
                trace = trace.extended(turn.sampled, turn.logprobs, turn.versions, trained=id(turn) not in trained)
                trained.add(id(turn))
            traces.append(trace)
        return traces

    def placed_turns(self) -> list[PlacedTurn]:
        """Return the turns in their order, each with its place in the trace in which it is trained."""
        place: dict[int, int] = {}
        for number, path in enumerate(self._paths()):
            for turn in path:
                place.setdefault(id(turn), number)
        return [
            PlacedTurn(
                place[id(turn)],
                len(turn.token_ids) - len(turn.sampled),
                len(turn.token_ids),
                partial(self._chat.decode, turn.sampled[:-1] if turn.ended else turn.sampled),
            )
            for turn in self.turns
        ]

    def _paths(self) -> list[list[ConversationTurn]]:
        """Return the turns of each trace, in order: those up to a turn that no other turn follows."""
        followed = {id(turn.opening.parent) for turn in self.turns}
        paths = []
        for leaf in self.turns:
            if id(leaf) not in followed:
                path = [leaf]
                while (parent := path[0].opening.parent) is not None:
                    path.insert(0, parent)
                paths.append(path)
        return paths


def _key(message: Message) -> str:
    """Return a key that identifies a message. Clients send back more fields than they received, most of them empty."""
    compared = {name: message[name] for name in _COMPARED if message.get(name)}
    return _ENCODER.encode(compared).decode()
