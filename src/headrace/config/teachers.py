"""The keys of teachers: models whose log-probabilities a policy learns from. It imports no torch."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import NonNegativeFloat, Section

TopK = Annotated[int, Meta(ge=1, le=1024)]


class TeacherKeys(Section, frozen=True):
    """The keys of [algorithm] that say what is learned from a teacher."""

    teacher: str | None = None
    """The model to learn from, which the trainer holds beside the policy: a directory, or a name on the hub,
    `owner/name` or `owner/name@revision`. Its tokenizer must be that of the trained model. A teacher outside of the
    trainer is a scorer, `[scorers.NAME] kind = "teacher"`."""
    teacher_field: str = "teacher"
    """With several `[scorers.NAME]` of kind "teacher": the field of a prompt that names its teacher."""
    teacher_divergence: Literal["sampled", "forward", "reverse"] = "sampled"
    """How the policy is compared with its teacher. `sampled`: by the sampled tokens alone, which estimates KL(policy ||
    teacher). `forward`: KL(teacher || policy) over the teacher's likeliest tokens and the tail. `reverse`: KL(policy ||
    teacher) over the same tokens and the tail. The tail is the probability of all other tokens together."""
    teacher_top_k: TopK = 8
    """The number of the teacher's likeliest tokens that `forward` and `reverse` compare, at every sampled token."""
    teacher_weight: NonNegativeFloat | None = None
    """The weight of the divergence from the teacher in the loss, with any loss but distillation, which learns from the
    teacher alone. By default such a loss has no teacher."""
