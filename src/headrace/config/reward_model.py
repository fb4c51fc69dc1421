"""What is known of a process-reward model without loading it: which tokens end steps, and where its verdicts stand."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from headrace.config.model_dir import check_model_dir, load_tokenizer, vocabulary
from headrace.errors import ModelError

CLASSIFIER = "ForTokenClassification"
"""How the name of a token classifier's architecture ends."""


def token_id(path: Path, token: str, key: str) -> int:
    """Return the id of a token of the directory's tokenizer. Raises `ModelError` if it is not one token."""
    known = vocabulary(path, key)
    if token not in known:
        raise ModelError(f"{key}: {token!r} is not a token of {path}")
    return known[token]


def tokens_that_contain(path: Path, texts: Collection[str], key: str) -> list[int]:
    """Return the ids of the tokens whose text contains one of these. Raises `ModelError` if there is none for one."""
    tokenizer = load_tokenizer(path, key)
    said = {id: tokenizer.decode([id], skip_special_tokens=False) for id in vocabulary(path, key).values()}
    found = {text: [id for id, token in said.items() if text in token] for text in texts}
    for text, ids in found.items():
        if not ids:
            raise ModelError(f"{key}: no token of {path} contains {text!r}")
    return sorted({id for ids in found.values() for id in ids})


class RewardVerdict(NamedTuple):
    """Where the verdict of a process-reward model stands: a label of a classifier, or a token of a language model."""

    causal: bool
    """Whether the model is a causal language model, and not a token classifier."""
    good: int
    """The id of the label or token that means a good step."""
    bad: int | None = None
    """The id of the token that means a bad step, if it is compared with `good` alone."""


def reward_verdict(path: Path, good: str, bad: str, key: str) -> RewardVerdict:
    """Return where the verdict of the process-reward model in this directory stands. Raises `ModelError`.

    `good` names a label of a token classifier, by default its last one, or a token of a causal language model, which
    may be compared with the token `bad`.
    """
    config = check_model_dir(path, "load", key=key)
    if not any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or []):
        if not good:
            raise ModelError(f"{key}: {path} is no token classifier, so `good` must name the token of a good step")
        return RewardVerdict(True, token_id(path, good, key), token_id(path, bad, key) if bad else None)
    if bad:
        raise ModelError(f"{key}: {path} is a token classifier, and `bad` is for causal language models")
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    labels = {str(name): int(id) for id, name in names.items()}
    if good and good not in labels:
        raise ModelError(f"{key}: {path} has no label {good!r} (it has {', '.join(labels)})")
    return RewardVerdict(False, labels[good] if good else max(labels.values()))
