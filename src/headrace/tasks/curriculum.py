"""The curriculum chooses which prompts are worth drawing, based on the outcomes of earlier attempts.

Its state depends on the outcomes alone, so it can be rebuilt from a journal. A prompt that every answer solved rests:
for 1 epoch, then for 2, 4 and 8, each time that it is solved again. A prompt that no answer solved is drawn again
between two others, at most `RETRIES` times in a row. Every prompt is drawn again at some time. Time is counted in group
attempts, whose ids are the same after a restart.
"""

from __future__ import annotations

LONGEST_REST = 8
"""The longest rest of a prompt, in epochs."""
RETRIES = 2
RETRY_EVERY = 4
"""At most one draw in `RETRY_EVERY` is a retry, so that prompts that nobody can solve do not crowd out the others."""


class Curriculum:
    """The state of the prompts that were tried."""

    def __init__(self, prompts: int) -> None:
        self._epoch = prompts
        self._solved: dict[str, tuple[int, int]] = {}
        """How often in a row each solved prompt was solved, and the attempt from which on it is drawn again, by prompt
        id."""
        self._tried: dict[str, int] = {}
        """How often in a row no answer solved a prompt, by prompt id."""
        self._retries: dict[str, None] = {}
        """The prompts to draw again, oldest first."""

    def note(self, prompt_id: str, right: int, answers: int, at: int) -> None:
        """Record that in attempt `at`, `right` of the `answers` answers to a prompt were right."""
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
        """Return whether a prompt is skipped in attempt `at`."""
        return at < self._solved.get(prompt_id, (0, 0))[1]

    def retry(self, at: int) -> str | None:
        """Return the prompt to draw again in attempt `at`; None if no retry is due."""
        if not self._retries or at % RETRY_EVERY:
            return None
        prompt_id = next(iter(self._retries))
        del self._retries[prompt_id]
        return prompt_id
