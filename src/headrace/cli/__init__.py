"""The command line. Every command imports what it needs when it is called, so `headrace --help` is instant.

Here are the arguments that several commands share.
"""

from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key: --set buffer.depth=2. May be given several times.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run's directory, such as runs/quickstart.")]
ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file.")]
