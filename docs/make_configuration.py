"""Write docs/configuration.md: every TOML key with its type, default, range and meaning.

The source of all of it is `src/headrace/config/schema.py` and the files that it imports sections from: types, ranges
and defaults as msgspec reads them, meanings from the text below each field. `tests/unit/test_docs.py` fails when the
committed page is out of date.

    python docs/make_configuration.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as kinds

from headrace.config import schema
from headrace.config.evaluate import EvaluateConfig, EvaluationSetConfig
from headrace.config.load import NAMES, POLICY_SECTIONS
from headrace.config.schema import Names

PAGE = Path(__file__).parent / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by docs/make_configuration.py from src/headrace/config/schema.py: do not edit by hand. -->

A run is one TOML file. Its sections have the names of the stages. Only `[model] path` and `[task]` are required. A task
and a policy may have names of their own: see [`[tasks.NAME]`](#tasksname) and [`[policies.NAME]`](#policiesname).

```toml
[model]
path = "path/to/model"

[task]
kind = "dataset"
path = "prompts.jsonl"
reward = "rewards.py:reward"

[run]
name = "first"
versions = 50
```

- `headrace check first.toml` checks the file without loading the model. It renders the first prompt, calls the reward
  function once, and prints the lag bound, estimates of memory and speed, and where each process would run. `--full`
  prints every key with its value too.
- `--set section.key=value` changes a key on the command line: `--set buffer.depth=2`. It may be given several times.
  The value is read as TOML. A value that is not TOML is taken as text, so text needs no quotes.
- Relative paths start at the directory of the TOML file. Those in a `--set`, and what a run writes, start at the
  working directory ([paths](models_and_data.md#paths)).
- A *reference* names code of your own: `module:attribute`, or `path/to/file.py:attribute`.
- A key that is not listed here is an error. A mistake is reported in one line that names `[section] key`, and the exit
  code is 2.
- The resolved configuration is written to `config.toml` of the [run directory](run_directory.md), and `headrace resume`
  reads it from there.

Some rules concern several keys. Breaking one of them is an error too:

| key | rule |
|---|---|
| `[buffer] max_lag` | It must not be below `depth`. It is required with `depth = "unbounded"`. |
| `[buffer] on_stale` | `"drop"` and `"salvage"` need `max_lag`. |
| `[buffer] correct_above` | It needs `[algorithm] corrections`. |
| `[buffer] oversample` | A value above 1 needs a `filter`. |
| `[buffer] filter` | `"zero_variance"` needs `[rollouts] group_size` of at least 2. |
| `[rollouts] group_size` | At least 2, except for `"reinforce_plus_plus"`, `"distillation"` or a critic. |
| `[rollouts] min_group` | It must be at least 2 (1 if `group_size` is 1), and at most `group_size`. |
| `[rollouts] top_k`, `top_p`, `min_p` | They are refused for agents, and for vLLM on a CPU. |
| `[algorithm]` | A key that neither the chosen loss nor the chosen corrections read must not be set. |
| `[algorithm] overlong_buffer` | It must not be above `[rollouts] max_tokens`. |
| `[algorithm] baseline`, `outcome_weight` | They need `credit` other than `"rollout"`. |
| `[algorithm] discount` | It needs `credit` other than `"rollout"`, or `critic`. |
| `[algorithm] critic` | It is refused with `advantage` and `credit`. |
| `[algorithm] baseline` | `"state"` needs `credit = "turn"`. |
| `[algorithm] minibatches` | It must not be above `[buffer] groups`. |
| `[algorithm] mask_overlong` | It is refused with `[buffer] filter = ["overlong"]`. |
| `[scoring] shuffle` | It is refused with `[algorithm] critic`, and with `credit` other than `"rollout"`. |
| `[engine] cache_tokens` | The cache must hold one answer of `max_tokens` and one more block. |
| `[engine] python`, `urls`, `port`, `arguments` | They are refused for the embedded engine. |
| `[engine] kind = "vllm"` | See [what does not work with vLLM](vllm.md#what-does-not-work-with-vllm). |
| `[training] tensor_parallel` | It must divide `ranks`. |
| `[lora] dropout` | It must be 0 if `targets` name stacked experts. |
| `[evaluate] every` | It needs held-out prompts. |
| `[evaluate] pass_at`, `majority_at` | No number may be above `samples`. The same holds in `[evaluate.sets.NAME]`. |

[Staleness](staleness.md) explains how `depth` and `max_lag` limit the lag. [Losses](losses.md) has the formulas behind
`[algorithm]`. [LoRA](lora.md) explains adapters.
"""

TABLES = f"""
## `[tasks.NAME]`

A task with a name of its own. `[task]` is short for `[tasks.task]`; the keys are those of `[task]`. Give one of the two
forms. A run may have [several tasks](tasks.md#several-tasks), and draws prompts from each in proportion to `weight`.

```toml
[tasks.sorting]
kind = "dataset"
path = "sorting.jsonl"
reward = "rewards.py:reward"
```

## `[policies.NAME]`

A policy is a model that is sampled from, with its engines, its trainer and its deliveries. Its sections are those of
the short form, with the same keys, such as `[policies.writer.model]` and `[policies.writer.training]`:
{", ".join(f"`{section}`" for section in POLICY_SECTIONS)}.

At the top level, these sections describe a policy that is named `policy`. Give each section in one of the two places: a
section that is not in the policy's table is taken from the top level. The name is the policy's id in the
[journal](run_directory.md). A run has one policy so far.

```toml
[policies.writer.model]
path = "path/to/model"

[policies.writer.training]
learning_rate = 1e-5
```

`--set policies.writer.training.learning_rate=1e-6` and `--set training.learning_rate=1e-6` then set the same key.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, kind in sections():
        title, text = _title(name, kind)
        of_kind = {key: note for cls in kind.__mro__ for key, note in notes_of(cls).items()}
        parts.append(f"\n## {title}\n\n{text}\n\n" + "\n".join(_table(kind, of_kind)) + "\n")
    parts.append(TABLES)
    return "".join(parts)


def sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every section's name with its struct; a section of several kinds comes once for each."""
    for field in msgspec.structs.fields(schema.Config):
        if field.name in NAMES:
            continue
        shape = kinds.type_info(field.type)
        for kind in shape.types if isinstance(shape, kinds.UnionType) else (shape,):
            if isinstance(kind, kinds.NoneType):
                continue
            if isinstance(kind, kinds.StructType) and kind.cls is schema.MixtureConfig:
                continue
            if isinstance(kind, kinds.DictType):
                inner = kind.value_type
                for entry in inner.types if isinstance(inner, kinds.UnionType) else (inner,):
                    assert isinstance(entry, kinds.StructType)
                    yield f"{field.name}.NAME", entry.cls
                continue
            assert isinstance(kind, kinds.StructType)
            yield field.name, kind.cls
            if kind.cls is EvaluateConfig:
                yield "evaluate.sets.NAME", EvaluationSetConfig


def notes_of(section: type) -> dict[str, str]:
    """The text below each field of a section, from the file that has the section."""
    if not section.__module__.startswith("headrace.config."):
        return {}
    [node] = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    return dict(_notes_of(node.body))


def _notes_of(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, inspect.cleandoc(below.value.value)


def _title(name: str, kind: type[msgspec.Struct]) -> tuple[str, str]:
    """`[run]` and what its docstring says after that."""
    label, _, text = (kind.__doc__ or "").partition(": ")
    assert label.startswith(f"[{name}]"), f"the docstring of {kind.__name__} must begin with `[{name}]`"
    return f"`{label}`", text[0].upper() + text[1:]


def _table(kind: type[msgspec.Struct], notes: dict[str, str]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    # A key that every kind has comes after the kind's own.
    for field in sorted(msgspec.structs.fields(kind), key=lambda field: field.name not in kind.__annotations__):
        note = " ".join(notes.get(field.encode_name, "").split())
        cells = (f"`{field.encode_name}`", type_in_words(field.type), _default(field), note)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{json.dumps(field.default_factory())}`"
    if field.default is msgspec.NODEFAULT:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def type_in_words(hint: Any) -> str:
    """A type and its range, as a reader of TOML would call it."""
    names = next((each for each in typing.get_args(hint) if isinstance(each, Names)), None)
    if names is not None:
        return " or ".join(f"`{json.dumps(name)}`" for name in names) + ", or a reference"
    if typing.get_origin(hint) is typing.Literal:  # msgspec sorts the values; the source has them in a better order
        return " or ".join(f"`{json.dumps(value)}`" for value in typing.get_args(hint))
    match kinds.type_info(hint):
        case kinds.UnionType() as union:
            return " or ".join(_words(part) for part in union.types if not isinstance(part, kinds.NoneType))
        case kind:
            return _words(kind)


def _words(kind: kinds.Type) -> str:
    match kind:
        case kinds.IntType():
            return "whole number" + _range(kind)
        case kinds.FloatType():
            return "number" + _range(kind)
        case kinds.BoolType():
            return "`true` or `false`"
        case kinds.StrType():
            return "text"
        case kinds.LiteralType():
            return " or ".join(f"`{json.dumps(value)}`" for value in kind.values)
        case kinds.ListType():
            return f"list of {_words(kind.item_type)}"
        case kinds.DictType():
            return "table"
        case kinds.StructType():
            keys = ", ".join(f"{field.encode_name} = {_words(field.type)}" for field in kind.fields)
            return f"table `{{{keys}}}`"
        case _:
            raise TypeError(f"{kind} has no words yet")


def _range(kind: kinds.IntType | kinds.FloatType) -> str:
    limits = [(kind.ge, "≥"), (kind.gt, ">"), (kind.le, "≤"), (kind.lt, "<")]
    found = [f"{sign} {limit:g}" for limit, sign in limits if limit is not None]
    return " " + " and ".join(found) if found else ""


if __name__ == "__main__":
    main()
