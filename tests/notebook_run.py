"""`headrace.train` in a real notebook kernel, where an event loop runs already: its display, and an interrupt.

`make wheel` runs this program, in the environment of the wheel: `python tests/notebook_run.py MODEL_DIR`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

SECONDS = 200.0
TRAIN = """
import asyncio, headrace
asyncio.get_running_loop()
run = headrace.train(
    model={{"path": {model!r}, "weights": "random"}}, prompts=["ab", "cd"],
    reward=lambda completion: -0.1 * len(completion), on_step=lambda step: print("step", step["step"]),
    run={{"versions": {versions}}}, rollouts={{"group_size": 4, "max_tokens": 8}}, buffer={{"groups": 2}},
    engine={{"max_length": 64}},
)
print(run.summary["outcome"])
"""


def main(model: str) -> None:
    """Run two cells: one to its end, and one that is interrupted after its second step."""
    with tempfile.TemporaryDirectory() as directory:
        manager, client = start_new_kernel(cwd=directory)
        try:
            printed, shown = run_cell(client, TRAIN.format(model=model, versions=3))
            assert printed.split() == ["step", "1", "step", "2", "step", "3", "finished"], printed
            assert any("version" in panel and "reward" in panel for panel in shown), shown
            assert len(shown) > 1, "the panel was not drawn anew"
            printed, _ = run_cell(client, TRAIN.format(model=model, versions=100_000), manager.interrupt_kernel)
            assert printed.split()[-1] == "interrupted", printed
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    print("a notebook trained, showed its panel, and was interrupted")


def run_cell(client: Any, code: str, interrupt: Any = None) -> tuple[str, list[str]]:
    """What a cell prints, and the panels that it shows. `interrupt` is called once after the second step."""
    client.execute(code)
    printed, shown, deadline = "", [], time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=SECONDS)
        kind, content = message["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            printed += content["text"]
        elif kind in ("display_data", "update_display_data") and content.get("transient", {}).get("display_id"):
            shown.append(content["data"]["text/html"])
        elif kind == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif kind == "status" and content["execution_state"] == "idle" and printed:
            return printed, shown
        if interrupt is not None and "step 2\n" in printed:
            interrupt()
            interrupt = None
    raise TimeoutError(printed)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
