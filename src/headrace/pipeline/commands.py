"""The command socket of a live run: one request and one answer, each a line of JSON.

The socket is in the private directory of the controller's sockets, because the path of a run directory may be too long
for a socket. `control.json` in the run directory names it, and is removed when the run ends. Only the user who started
the run can connect. A controller that was killed leaves the file, but nobody listens at its socket.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec

from headrace.errors import UserError, one_line
from headrace.pipeline.scaling import ScaleAnswer, ScaleRequest
from headrace.run_dir import RunDir, write_whole

ANSWER_SECONDS = 30.0
LINE_BYTES = 1 << 16


class Control(msgspec.Struct):
    """What `control.json` holds."""

    socket: str


@contextlib.asynccontextmanager
async def command_socket(
    path: Path, control: Path, answer: Callable[[ScaleRequest], ScaleAnswer]
) -> AsyncIterator[None]:
    """Listen at `path` and name it in the file `control`. `answer` may raise `UserError`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(msgspec.json.encode(await _answered(reader, answer)) + b"\n")
                await writer.drain()

    server = await asyncio.start_unix_server(serve, path, limit=LINE_BYTES)
    with contextlib.closing(server), _named(path, control):
        yield


@contextlib.contextmanager
def _named(path: Path, control: Path) -> Iterator[None]:
    path.chmod(0o600)
    write_whole(control, msgspec.json.encode(Control(socket=str(path))))
    try:
        yield
    finally:
        control.unlink(missing_ok=True)


async def _answered(reader: asyncio.StreamReader, answer: Callable[[ScaleRequest], ScaleAnswer]) -> ScaleAnswer:
    try:
        return answer(msgspec.json.decode(await reader.readline(), type=ScaleRequest))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return ScaleAnswer(error=one_line(f"the command cannot be read: {error}"))
    except UserError as error:
        return ScaleAnswer(error=one_line(str(error)))


def ask(path: str | Path, request: ScaleRequest) -> ScaleAnswer:
    """Send a command to the live run in this directory and return its answer. Raises `UserError` if it is refused."""
    run_dir, _ = RunDir.open(path)
    try:
        control = msgspec.json.decode(run_dir.control.read_bytes(), type=Control)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(control.socket)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as lines:
                answer = msgspec.json.decode(lines.readline(LINE_BYTES), type=ScaleAnswer)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise UserError(f"{path}: no run is live there, on this host") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: the run does not answer: {error}") from error
    if answer.error:
        raise UserError(answer.error)
    return answer
