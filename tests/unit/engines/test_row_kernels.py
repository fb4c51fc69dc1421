"""The ends of a captured step, against the same rules written out row by row."""

from __future__ import annotations

import random

import numpy as np
import torch

from headrace.engines.embedded.kernels.rows import RowBuffers, advance, begin

ROWS, WIDTH, SLOTS = 7, 6, 3


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_begin_and_advance_follow_the_rules_of_a_row() -> None:
    draw = random.Random(0)
    for _ in range(20):
        entries = ints([draw.randrange(ROWS) for _ in range(1)] + draw.sample(range(ROWS), 4))[1:]
        token = ints([draw.randrange(50) for _ in range(ROWS)])
        position = ints([draw.randrange(10) for _ in range(ROWS)])
        capacity = ints([draw.choice([0, 4, 8, 16]) for _ in range(ROWS)])
        limit = ints([draw.randrange(2, 14) for _ in range(ROWS)])
        live = ints([draw.randrange(2) for _ in range(ROWS)])
        stops = ints([draw.choice([-1, draw.randrange(4)]) for _ in range(ROWS * 2)]).view(ROWS, 2)
        drawn = ints([draw.randrange(4) for _ in range(4)])
        logprobs = torch.tensor([draw.choice([-0.5, float("nan")]) for _ in range(4)])
        version, cursor = ints([9]), ints([1])
        ring = torch.full((SLOTS, 3, WIDTH), -7, dtype=torch.int32)
        before = [t.clone() for t in (token, position, live)]
        state = RowBuffers(WIDTH, SLOTS, torch.device("cpu"))
        state.token, state.position, state.capacity, state.limit = token, position, capacity, limit
        state.live, state.stops, state.version, state.ring, state.cursor = live, stops, version, ring, cursor

        positions = torch.full((4,), -9, dtype=torch.int32)
        ids, places = torch.full((4,), -9), torch.full((4,), -9)
        begin(state, entries, positions, ids, places)
        advance(state, entries, positions, drawn, logprobs)

        assert cursor.item() == 2
        assert bool((ring[[0, 2]] == -7).all()) and bool((ring[1, :, 4:] == -7).all())
        touched = set()
        for entry, row in enumerate(entries.tolist()):
            at = int(before[1][row])
            runs = bool(before[2][row]) and at < int(capacity[row])
            assert positions[entry] == (at if runs else -1)
            assert ids[entry] == before[0][row] and places[entry] == (at if runs else 0)
            assert ring[1, 0, entry] == (drawn[entry] if runs else -1)
            assert ring[1, 2, entry] == (9 if runs else -1)
            recorded = ring[1, 1, entry : entry + 1].numpy().view(np.float32)[0]
            assert np.array_equal(recorded, logprobs[entry].item(), equal_nan=True)
            if runs:
                touched.add(row)
                length = at + 2
                ended = length >= int(limit[row]) or int(drawn[entry]) in stops[row].tolist()
                ended = ended or bool(logprobs[entry].isnan())
                assert (token[row], position[row], live[row]) == (drawn[entry], at + 1, int(not ended))
        for row in set(range(ROWS)) - touched:
            assert (token[row], position[row], live[row]) == (before[0][row], before[1][row], before[2][row])
