"""The fenced blocks of README.md, CONTRIBUTING.md, docs and examples, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SHELL = ("sh", "bash")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file name in the block's first line, such as `# rewards.py`, or an empty string."""
        named = re.match(r"# ([\w.]+\.(?:py|toml))\n", self.text)
        return named[1] if named else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [Block(name, text.count("\n", 0, found.start()) + 1, *found.groups()) for found in FENCE.finditer(text)]


def shell_lines(text: str) -> list[str]:
    """The commands of a shell block. A line that ends with a backslash continues on the next line."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def quoted_lines(page: Path) -> list[str]:
    """The commands in a page's running text, as a reader would type them."""
    return [" ".join(code.split()) for code in INLINE.findall(FENCE.sub("", page.read_text()))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
