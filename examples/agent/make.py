"""Write the example's data: three letters to put in order. Run once; the results are committed."""

import itertools
import json
import random
from pathlib import Path

HERE = Path(__file__).parent
IN_ORDER = 0.3
"""The share of the warm start's demonstrations that are in order; the others are in reverse order."""
HELDOUT = 120


def main() -> None:
    draw = random.Random(0)
    triples = ["".join(letters) for letters in itertools.permutations("abcdefghij", 3)]
    draw.shuffle(triples)
    lines = []
    for letters in triples:
        answer = "".join(sorted(letters))
        shown = answer if draw.random() < IN_ORDER else answer[::-1]
        lines.append(json.dumps({"prompt": letters, "answer": answer, "demonstration": shown}) + "\n")
    (HERE / "heldout.jsonl").write_text("".join(lines[:HELDOUT]))
    (HERE / "train.jsonl").write_text("".join(lines[HELDOUT:]))


if __name__ == "__main__":
    main()
