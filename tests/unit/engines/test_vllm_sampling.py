"""Our sampling as vLLM's: nothing is lost on the way, and stops are found wherever an answer was cut."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_stub import FACTS

from headrace.engines.base import Request, Sampling
from headrace.engines.requests import first_stop
from headrace.engines.vllm.client import AnswerPiece, VersionSpan
from headrace.engines.vllm.engine import VllmSequence
from headrace.engines.vllm.sampling import joined, refusal, sampling_params, wrong_version
from headrace.errors import ChannelError

TOKENS = st.lists(st.integers(0, 3), max_size=12)
STOPS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


def test_every_parameter_is_passed() -> None:
    sampling = Sampling(
        max_tokens=50,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        forbidden=(2, 70),
        seed=(1 << 63) + 5,
        stop_token_ids=(9, 4),
        stop_sequences=((7,), (1, 2)),
    )
    params = sampling_params(sampling, 20, FACTS)
    assert {name: params[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")} == {
        "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "seed": 5,
    }  # fmt: skip
    assert "extra_args" not in params
    assert params["stop_token_ids"] == [4, 7, 9], "a sequence of one token is a stop token"
    assert list(params["logit_bias"]) == ["2"], "a token that does not exist forbids nothing"
    assert np.exp(np.float32(30 + params["logit_bias"]["2"])) == 0.0
    assert params["logprobs"] == 0 and params["ignore_eos"] is True and json.loads(json.dumps(params)) == params


KEPT = msgspec.structs.replace(FACTS, kept=True, truncation=False)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"top_k": 5, "record_kept": True}, {"temperature": 1.0, "top_k": 5, "top_p": 1.0}),
        ({"top_p": 0.9, "record_kept": True}, {"temperature": 1.0, "top_k": 64, "top_p": 0.9}),
        ({"temperature": 0.7}, {"temperature": 0.7, "top_k": 64, "top_p": 1.0}),
        ({"temperature": 0.0, "top_k": 3}, {"temperature": 1.0, "top_k": 1}),
    ],
)
def test_a_server_that_reports_kept_sets_is_always_told_how_many(
    options: dict[str, object], rules: dict[str, float]
) -> None:
    """vLLM demands a temperature and a top_k of every request then."""
    params = sampling_params(Sampling(max_tokens=4, **options), 4, KEPT)  # type: ignore[arg-type]
    assert {name: params[name] for name in ("temperature", "top_k", "top_p") if name in params} == rules
    wide = msgspec.structs.replace(KEPT, vocabulary=5000)
    assert sampling_params(Sampling(max_tokens=4, top_p=0.9, record_kept=True), 4, wide)["top_k"] == 1024


def test_kept_sets_come_with_their_tokens() -> None:
    request = Request(
        id="a",
        token_ids=np.array([1], np.int32),
        sampling=Sampling(max_tokens=9, top_k=3, forbidden=(6,), stop_sequences=((8, 9),), record_kept=True),
    )
    assert refusal(request, KEPT, 64) == ""
    assert "--return-sampling-mask lets it say so" in refusal(request, FACTS, 64)
    piece = AnswerPiece(token_ids=[5, 8, 9, 4], logprobs=[-1.0] * 4, kept=[[7, 5], [8], [6, 9, 2], [4]])
    delta = VllmSequence(request, 0).take(piece, 1)
    assert delta is not None and delta.kept is not None and delta.token_ids.tolist() == [5, 8, 9]
    assert delta.kept.counts.tolist() == [2, 1, 2] and delta.kept.token_ids.tolist() == [5, 7, 8, 2, 9]
    with pytest.raises(ChannelError, match="1 tokens with 0 kept sets"):
        VllmSequence(request, 0).take(AnswerPiece(token_ids=[5], logprobs=[-1.0]), 1)
    greedy = msgspec.structs.replace(request, sampling=Sampling(max_tokens=9, temperature=0.0, record_kept=True))
    delta = VllmSequence(greedy, 0).take(AnswerPiece(token_ids=[5], logprobs=[0.0], kept=[[5]]), 1)
    assert delta is not None and delta.kept is not None and delta.kept.counts.tolist() == [0]


NOTHING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("rules", [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
def test_min_p_together_with_others_is_left_to_the_plugin(rules: dict[str, float]) -> None:
    """All of it, and vLLM cuts nothing: a rule that both applied would be applied to what the other left."""

    def passed(truncation: bool = True, **changes: float) -> dict[str, object]:
        facts = msgspec.structs.replace(FACTS, truncation=truncation)
        options = {"max_tokens": 4, **rules, "min_p": 0.1, **changes}
        params = sampling_params(Sampling(**options), 4, facts)  # type: ignore[arg-type]
        assert json.loads(json.dumps(params)) == params
        return {name: params[name] for name in (*NOTHING, "extra_args") if name in params}

    alone = {**NOTHING, **rules}
    assert passed() == {**NOTHING, "extra_args": {"headrace_truncation": {**alone, "min_p": 0.1}}}
    assert passed(min_p=0.0) == alone
    assert passed(top_k=0, top_p=1.0) == {**NOTHING, "min_p": 0.1}
    assert passed(temperature=0.0) == passed(truncation=False) == {**alone, "min_p": 0.1}


def test_a_server_of_another_order_is_asked_for_nothing_that_depends_on_it() -> None:
    def reason(**sampling: float) -> str:
        options = {"max_tokens": 4, **sampling}
        request = Request(id="a", token_ids=np.array([1], np.int32), sampling=Sampling(**options))  # type: ignore[arg-type]
        assert refusal(request, FACTS, max_length=32) == ""
        return refusal(request, msgspec.structs.replace(FACTS, truncation=False), max_length=32)

    for rules in ({"top_p": 0.9}, {"top_p": 0.9, "top_k": 5}):
        line = reason(min_p=0.1, **rules)
        assert "min_p together with top_p" in line and "VLLM_USE_V2_MODEL_RUNNER=0" in line and "\n" not in line
        assert reason(**rules) == reason(min_p=0.1, temperature=0.0, **rules) == ""
    assert reason(min_p=0.1) == reason(min_p=0.1, top_k=5) == ""


@given(TOKENS, STOPS, st.lists(st.integers(0, 3), max_size=2), st.integers(0, 12))
def test_the_first_stop_is_the_shortest_answer_that_ends_with_one(
    tokens: list[int], stops: tuple[tuple[int, ...], ...], singles: list[int], known: int
) -> None:
    sampling = Sampling(max_tokens=20, stop_token_ids=tuple(singles), stop_sequences=stops)
    text = "".join(map(str, tokens))
    ends = ["".join(map(str, stop)) for stop in (*stops, *((token,) for token in singles))]
    expected = [n for n in range(known + 1, len(text) + 1) if any(text[:n].endswith(end) for end in ends)]
    new, before = tokens[known:], tokens[:known]
    end = first_stop(new, sampling, before, len(before))
    assert end == (expected[0] - known if expected else None)
    prompt = [token for stop in stops for token in stop]
    assert first_stop(new, sampling, prompt + before, len(before)) == end, "no stop begins in the prompt"


@given(TOKENS, STOPS, st.lists(st.integers(1, 4), min_size=1))
def test_an_answer_is_the_same_however_it_comes_in_pieces(
    tokens: list[int], stops: tuple[tuple[int, ...], ...], cuts: list[int]
) -> None:
    sampling = Sampling(max_tokens=20, stop_sequences=stops)
    sequence = VllmSequence(Request(id="a", token_ids=np.array([1, 2], np.int32), sampling=sampling), order=0)
    handed: list[int] = []
    logprobs: list[float] = []
    place = 0
    while place < len(tokens) and not sequence.finished:
        size = cuts[place % len(cuts)]
        part = tokens[place : place + size]
        piece = AnswerPiece(token_ids=part, logprobs=[-float(place + i) for i in range(len(part))])
        delta = sequence.take(piece, version=4)
        place += size
        if delta is not None:
            handed += delta.token_ids.tolist()
            logprobs += delta.logprobs.tolist()
            assert delta.versions.tolist() == [4] * len(delta.token_ids)
            assert (delta.finish == "stop") == sequence.finished
    end = first_stop(tokens, sampling, [], 0)
    assert handed == sequence.sampled == tokens[:end]
    assert logprobs == [-float(i) for i in range(len(handed))]
    assert sequence.finished == (end is not None)


@pytest.mark.parametrize(
    ("prompt", "sampling", "about"),
    [
        ([], {}, "no tokens"),
        ([3, 64], {}, "vocabulary of 64"),
        ([1] * 32, {}, "leaves no room"),
        ([1], {"record_kept": True}, "record_kept"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop_sequences": ((),)}, "stop sequence"),
    ],
)
def test_what_cannot_be_served_is_said(prompt: list[int], sampling: dict[str, object], about: str) -> None:
    options = {"max_tokens": 4, **sampling}
    request = Request(id="a", token_ids=np.array(prompt, np.int32), sampling=Sampling(**options))  # type: ignore[arg-type]
    assert about in refusal(request, FACTS, max_length=32)
    fine = Request(id="a", token_ids=np.array([1], np.int32), sampling=Sampling(max_tokens=4))
    assert refusal(fine, FACTS, max_length=32) == ""


def test_tokens_of_another_version_are_noticed() -> None:
    def piece(*versions: str) -> AnswerPiece:
        spans = [VersionSpan(version, i, i + 1) for i, version in enumerate(versions)]
        return AnswerPiece(token_ids=[], logprobs=[], finish="length", spans=spans)

    assert wrong_version(piece("4"), 4) == "" == wrong_version(piece(), 4)
    assert "under version 3, 4 what was asked of version 4" in wrong_version(piece("3", "4"), 4)
    assert "under version default" in wrong_version(piece("default"), 4)


def test_experts_of_a_layer_that_the_server_left_out_are_one_line() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    pieces = [
        AnswerPiece(token_ids=[5], logprobs=[-0.1]),
        AnswerPiece(token_ids=[6], logprobs=[-0.2], finish="length", experts=experts),
    ]
    whole = joined(pieces, [0, 2])
    assert whole.token_ids == [5, 6] and whole.logprobs == [-0.1, -0.2] and whole.finish == "length"
    assert whole.experts is not None and (whole.experts == experts[:, [0, 2]]).all()
    with pytest.raises(ChannelError, match=r"^a server sent the experts of 3 layers, not of layer 3$"):
        joined(pieces, [0, 3])
