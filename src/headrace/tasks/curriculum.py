"""Which prompts are worth drawing, by what became of them: a fold over outcomes, so a journal holds all of its state.

A prompt that every answer solved rests: for 1 epoch, then 2, 4, 8, each time that it is solved again. One that no
answer solved is drawn again between two others, at most `RETRIES` times in a row. Every prompt comes back, whatever it
is. Time is counted in group attempts, whose ids are the same after a restart.
"""

from __future__ import annotations

LONGEST_REST = 8
"""Epochs."""
RETRIES = 2
RETRY_EVERY = 4
"""One draw in so many may be a retry, so that prompts nobody can solve do not crowd out the others."""


class Curriculum:
    """What is known of the prompts that were tried."""

    def __init__(self, prompts: int) -> None:
        self._epoch = prompts
        self._solved: dict[str, tuple[int, int]] = {}
        """Prompt -> (times in a row that it was solved, the attempt from which on it is drawn again)."""
        self._tried: dict[str, int] = {}
        """Prompt -> times in a row that nobody solved it."""
        self._retries: dict[str, None] = {}
        """Prompts to draw again, oldest first."""

    def note(self, prompt_id: str, right: int, answers: int, at: int) -> None:
        """So many of the answers to a prompt were right, in attempt `at`."""
        self._retries.pop(prompt_id, None)
        if right == answers:
            times = self._solved.get(prompt_id, (0, 0))[0] + 1
            self._solved[prompt_id] = (times, at + self._epoch * (1 + min(2 ** (times - 1), LONGEST_REST)))
        else:
            self._solved.pop(prompt_id, None)
        failures = self._tried.pop(prompt_id, 0) + 1 if right == 0 else 0
        if 0 < failures <= RETRIES:
            self._tried[prompt_id] = failures
            self._retries[prompt_id] = None

    def rests(self, prompt_id: str, at: int) -> bool:
        """Whether a prompt is passed over in attempt `at`."""
        return at < self._solved.get(prompt_id, (0, 0))[1]

    def retry(self, at: int) -> str | None:
        """The prompt to draw again in attempt `at`, if one is due."""
        if not self._retries or at % RETRY_EVERY:
            return None
        prompt_id = next(iter(self._retries))
        del self._retries[prompt_id]
        return prompt_id
