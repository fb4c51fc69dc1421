from __future__ import annotations

import numpy as np
from gateway_parts import END, assistant, merging_chat, user
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.session import Conversation, ConversationTurn, Opening
from headrace.types import NO_VERSION, Trace

CHAT = merging_chat()
A, B = CHAT.token_id("a"), CHAT.token_id("b")


def say(conversation: Conversation, opening: Opening, ids: list[int], version: int = 0) -> ConversationTurn:
    text = CHAT.decode([token for token in ids if token != END])
    logprobs = np.linspace(-2.0, -0.1, len(ids)).astype(np.float32).tolist()
    return conversation.record(opening, ids, logprobs, [version] * len(ids), assistant(text))


def test_a_second_turn_extends_the_sampled_tokens_although_text_would_give_others() -> None:
    conversation = Conversation(CHAT)
    opening = conversation.open_chat([user("c")])
    assert opening.token_ids.tolist() == CHAT.open([user("c")]).tolist()
    first = say(conversation, opening, [A, B, END], version=4)
    assert CHAT.encode("ab").tolist() != [A, B]  # the point of it

    second = conversation.open_chat([user("c"), assistant("ab"), user("d")])
    assert second.parent is first
    expected = [*first.token_ids.tolist(), *CHAT.continue_([user("d")], ended=True).tolist()]
    assert second.token_ids.tolist() == expected
    assert second.token_ids.tolist() != CHAT.open([user("c"), assistant("ab"), user("d")]).tolist()

    say(conversation, second, [B, END], version=5)
    (trace,) = conversation.traces()
    assert trace.token_ids.tolist() == [*expected, B, END]
    assert trace.versions[trace.trained].tolist() == [4, 4, 4, 5, 5]
    assert (trace.versions[~trace.trained] == NO_VERSION).all()
    np.testing.assert_array_equal(trace.logprobs[trace.trained], np.array([-2, -1.05, -0.1, -2, -0.1], np.float32))


def test_a_turn_that_was_cut_is_closed_for_the_policy() -> None:
    conversation = Conversation(CHAT)
    first = say(conversation, conversation.open_chat([user("c")]), [A, B])
    second = conversation.open_chat([user("c"), assistant("ab"), user("d")])
    assert second.token_ids.tolist()[len(first.token_ids)] == END


def test_edited_history_forks_from_what_was_left_alone() -> None:
    conversation = Conversation(CHAT)
    first = say(conversation, conversation.open_chat([user("c")]), [A, END], version=1)
    asked = [user("c"), assistant("a"), user("d")]
    second = say(conversation, conversation.open_chat(asked), [B, END], version=2)
    edited = conversation.open_chat([*asked[:2], user("e")])
    assert edited.parent is first
    say(conversation, edited, [A, A, END], version=3)
    rewritten = conversation.open_chat([user("c"), assistant("b"), user("d")])
    assert rewritten.parent is None
    say(conversation, rewritten, [B, B, END], version=4)

    main, fork, alone = conversation.traces()
    assert main.token_ids.tolist() == second.token_ids.tolist()
    shared = len(first.token_ids)
    assert fork.token_ids[:shared].tolist() == main.token_ids[:shared].tolist()
    assert main.versions[main.trained].tolist() == [1, 1, 2, 2]
    # The shared turn is context in the fork, with the records of its sampling.
    assert fork.versions[fork.trained].tolist() == [3, 3, 3]
    assert not fork.trained[:shared].any()
    np.testing.assert_array_equal(fork.logprobs[:shared], main.logprobs[:shared])
    np.testing.assert_array_equal(fork.versions[:shared], main.versions[:shared])
    # What the client wrote for the policy was never sampled.
    assert alone.versions[alone.trained].tolist() == [4, 4, 4]
    assert (alone.versions[~alone.trained] == NO_VERSION).all()


def test_fields_that_clients_send_back_empty_change_nothing_and_other_tools_do() -> None:
    conversation = Conversation(CHAT)
    offered = conversation.open_chat([user("c")], [{"type": "function"}])
    # The template writes how many tools there are, before all else; the tokenizer has no digits.
    assert offered.token_ids.tolist() == [CHAT.token_id("?"), *CHAT.open([user("c")]).tolist()]
    first = say(conversation, offered, [A, END])
    echoed = {**assistant("a"), "refusal": None, "tool_calls": None, "annotations": []}
    assert conversation.open_chat([user("c"), echoed, user("d")], [{"type": "function"}]).parent is first
    assert conversation.open_chat([user("c"), echoed, user("d")]).parent is None


def test_texts_and_token_ids_go_on_too() -> None:
    conversation = Conversation(CHAT)
    first = say(conversation, conversation.open_text("c"), [A, B])
    second = conversation.open_text("cabde")
    assert second.token_ids.tolist() == [CHAT.token_id("c"), A, B, *CHAT.encode("de").tolist()]
    by_ids = conversation.open_tokens([*first.token_ids.tolist(), 7])
    assert by_ids.parent is first
    assert by_ids.context.tolist() == [7]
    assert conversation.open_text("x").parent is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sampled_token_is_trained_on_once_and_every_prompt_extends_its_parent(data: st.DataObject) -> None:
    conversation = Conversation(CHAT)
    told: list[list[dict[str, str]]] = [[]]
    for version in range(data.draw(st.integers(1, 7))):
        history = data.draw(st.sampled_from(told))
        if history and data.draw(st.booleans()) and data.draw(st.booleans()):
            history = [*history[:-1], assistant("zz")]  # the client rewrites the last answer
        messages = [*history, user(data.draw(st.text("abc", min_size=1, max_size=3)))]
        opening = conversation.open_chat(messages)
        if opening.parent is not None:
            prefix = opening.parent.token_ids
            assert opening.token_ids[: len(prefix)].tolist() == prefix.tolist()
        ids = [*data.draw(st.lists(st.sampled_from([A, B]), min_size=1, max_size=4)), END]
        say(conversation, opening, ids, version=version)
        told.append([*messages, assistant(CHAT.decode(ids[:-1]))])
    traces = conversation.traces()
    trained = [int(v) for trace in traces for v in trace.versions[trace.trained]]
    assert sorted(trained) == sorted(i for i, turn in enumerate(conversation.turns) for _ in turn.sampled)
    for trace in traces:
        sampled = trace.versions != NO_VERSION
        assert not (trace.trained & ~sampled).any()
        for version in set(trace.versions[sampled].tolist()):
            assert trace.token_ids[trace.versions == version].tolist() == conversation.turns[version].sampled.tolist()


def test_a_listener_is_told_every_token_once_where_its_stream_has_it() -> None:
    told: list[tuple[int, int, Trace]] = []
    conversation = Conversation(CHAT, lambda turn, start, tokens: told.append((turn, start, tokens)))
    opening = conversation.open_chat([user("c")])
    first = say(conversation, opening, [A, B, END], version=4)
    say(conversation, opening, [B, END], version=4)
    second = conversation.open_chat([user("c"), assistant("ab"), user("d")])
    say(conversation, second, [B, END], version=5)

    context = len(opening.context)
    assert [(turn, start, tokens.token_ids.tolist()) for turn, start, tokens in told] == [
        (0, 0, opening.context.tolist()),
        (0, context, [A, B, END]),
        (1, context, [B, END]),
        (2, len(first.token_ids), second.context.tolist()),
        (2, len(second.token_ids), [B, END]),
    ]
    assert [set(tokens.versions.tolist()) for _, _, tokens in told] == [{NO_VERSION}, {4}, {4}, {NO_VERSION}, {5}]
    assert [bool(tokens.trained.all()) for _, _, tokens in told] == [False, True, True, False, True]
    np.testing.assert_array_equal(told[1][2].logprobs, np.array([-2, -1.05, -0.1], np.float32))
