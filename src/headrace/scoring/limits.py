"""How long a question to a scorer may take. This is the arithmetic of the limits in a scorer's section.

It says for each kind of scorer within which time one of its open questions ends. The stage compares that time with the
time since a question has last ended (`open_questions`). A scorer that is silent for longer hangs.
"""

from headrace.config.scorers import ServedScorerSection

FIRST_PAUSE = 0.25
"""Seconds before a question is asked again. The pause doubles with each further attempt."""
LONGEST_PAUSE = 2.0
BESIDE_SECONDS = 5.0
"""Seconds that an attempt may take beside its timeout: until a process is found to be away, or a program has ended."""


def next_pause(pause: float) -> float:
    """Return the pause after this one."""
    return min(2 * pause, LONGEST_PAUSE)


def longest_wait(waiting: int, places: int, longest: float) -> float:
    """Return the seconds within which a question gets a place, if it comes after so many that wait for one.

    Each of the `places` is held for at most `longest` seconds.
    """
    return (waiting // places + 2) * longest


def longest_question(section: ServedScorerSection) -> float:
    """Return the seconds within which a question that has a place has ended.

    While nothing can be reached, attempts count only after `patience` seconds. So at most the patience is added to the
    attempts that count.
    """
    return section.patience + (section.retries + 1) * _attempt(section)


def longest_reading(section: ServedScorerSection) -> float:
    """Return the seconds within which a process-reward model has judged all steps of an answer, or has failed to.

    An attempt may wait until a message that is under way ends. The patience begins anew after every attempt that
    reached the process and failed.
    """
    return (section.retries + 1) * (section.patience + 2 * _attempt(section))


def longest_judgement(timeout: float, start_timeout: float = 0.0) -> float:
    """Return the seconds within which a reward function has judged an answer. A worker that dies is replaced once."""
    return 2 * (start_timeout + timeout + BESIDE_SECONDS)


def _attempt(section: ServedScorerSection) -> float:
    return section.timeout + BESIDE_SECONDS + LONGEST_PAUSE
