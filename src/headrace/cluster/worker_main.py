"""The entry point of a worker: `python -m headrace.cluster.worker_main --role R --rank N --address A --run DIR`.

A worker needs only these four arguments, `--neighbours` if others share its GPU, and `--meet-at` if it is a trainer
rank that does not meet the others in the run directory. It inherits no descriptor and no state, and reads no
environment variable except those that show it its GPUs and say how one is shared (`mps`), so it may also be a fork of a
process that has loaded its libraries. It ends when it is told to, when its parent dies, or when the controller falls
silent. On the workers' side, concrete engines and trainers are chosen only here.

On another host than the controller's, `--server-key` is the hub's public key. The worker makes a key pair, prints the
public key as its first line, and keeps the secret one in its memory. Without `--run` it has no run directory: what it
needs comes over the link, and its log goes back over it.
"""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from headrace.buffer.reader import open_readonly
from headrace.channel.files import FileServer
from headrace.channel.heartbeats import FailureReason, Welcome
from headrace.channel.vital import EXIT_LOST
from headrace.channel.worker_link import LinkKeys, WorkerLink
from headrace.channel.worker_side import die_with_parent
from headrace.cluster.base import EXIT_USER_ERROR, KEY_LINE
from headrace.cluster.host_dir import HostDir, HostLog, redirect_output
from headrace.cluster.inventory import this_host
from headrace.cluster.mps import without_mps
from headrace.config import AgentTaskConfig, Config
from headrace.config.schema import as_engine
from headrace.config.scorers import ProcessRewardConfig
from headrace.errors import HeadraceError, PeerDied, one_line
from headrace.run_dir import RunDir
from headrace.types import NO_VERSION


def main(argv: Sequence[str]) -> int:
    """Parse the arguments and serve. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["engine", "trainer", "gateway", "scorer"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--neighbours", default="")
    parser.add_argument("--meet-at", default="")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--own-address", default="")
    parser.add_argument("--server-key", default="")
    arguments = parser.parse_args(argv)
    name = f"{arguments.role}-{arguments.rank}"
    keys = LinkKeys.made(arguments.server_key) if arguments.server_key else None
    log = None
    if keys is not None:
        sys.stdout.write(f"{KEY_LINE}{keys.public.decode()}\n")
        sys.stdout.flush()
        if arguments.run is None:
            log = HostLog()
        else:
            with (arguments.run / "logs" / f"{name}.log").open("ab") as file:
                redirect_output(file)
    sys.stdout = sys.stderr = _Log(io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The controller handles Ctrl-C and asks workers to stop.
    link = WorkerLink(
        name,
        arguments.address,
        arguments.run,
        neighbours=tuple(filter(None, arguments.neighbours.split(","))),
        epoch=arguments.epoch,
        own_address=arguments.own_address,
        keys=keys,
        new_log_text=str if log is None else log.new_text,
        peak_memory=peak_gpu_memory,
    )
    link.start()
    with contextlib.ExitStack() as undo:
        undo.callback(link.close)
        return _serve(link, arguments.role, arguments.meet_at, undo)


def _serve(link: WorkerLink, role: str, meet_at: str, undo: contextlib.ExitStack) -> int:
    try:
        welcome = None if link.has_files else _settle(link, undo)
        config = without_mps(RunDir(link.run_dir).config_to_start_with(), os.environ)
        if role == "engine":
            _serve_engine(link, config)
        elif role == "gateway":
            _serve_gateway(link, config)
        elif role == "scorer":
            _serve_scorer(link, config)
        else:
            # A checkpoint of a later step than the journal's last has no history.
            last_step = _last_step(link, config) if welcome is None else welcome.last_step
            _serve_trainer(link, config, last_step, meet_at)
    except PeerDied as error:
        _say_why(link, error)
        return EXIT_LOST
    except HeadraceError as error:
        _say_why(link, error)
        return EXIT_USER_ERROR
    return 0


def _settle(link: WorkerLink, undo: contextlib.ExitStack) -> Welcome:
    """Wait for the files of the run, and put them into a private directory of this host."""

    def settle(welcome: Welcome) -> Path:
        directory = HostDir(welcome.token, welcome.run)
        undo.callback(directory.close)
        directory.write(welcome.files)
        run_dir = RunDir(directory.path)
        run_dir.link_checkpoints(run_dir.config_to_start_with())
        run_dir.checkpoints.mkdir(exist_ok=True)
        return directory.path

    link.phase = "waiting for the files of the run"
    welcome = link.receive_welcome(settle)
    if welcome.checkpoints:
        FileServer(link, RunDir(link.run_dir).checkpoints).receive()
    return welcome


def _say_why(link: WorkerLink, error: HeadraceError) -> None:
    link.send(FailureReason(reason=one_line(str(error))))
    sys.stderr.write(f"{error}\n")


class _Log(io.TextIOWrapper):
    """The output of this worker. Text that a full disk refuses is lost, and the worker goes on."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def leave(code: int) -> NoReturn:
    """End this process at once, after its work is closed.

    Tearing down an interpreter that has loaded torch can take seconds. During that time the process could not be
    reached, and would be killed for it, so that its exit code would not tell how it ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fix_threads(threads: int) -> None:
    """Fix the number of compute threads of this process, because sums depend on it to the last bit.

    Call this before torch is used. In a process that has used it before, such as a notebook, only the threads of one
    operation are fixed: torch does not change the number of operations side by side any more, and no sum depends on it.
    """
    _announce_threads(threads)
    import torch

    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)


def peak_gpu_memory() -> int:
    """Return the peak bytes that torch has reserved on GPUs for this process, without the CUDA context.

    The thread of the link calls this from the start on, while another thread may be importing torch, or none ever does.
    So this imports nothing: `torch` gets its attribute `cuda` when that module is whole.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(cuda.max_memory_reserved(device) for device in range(cuda.device_count()))


def _announce_threads(threads: int) -> None:
    """Set the number of threads in the environment, for libraries that read it on import and for child processes."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)


def _serve_engine(link: WorkerLink, config: Config) -> None:
    link.phase = "loading"
    if config.engine.kind == "vllm":
        # vLLM servers are processes of their own: torch is not loaded in this process.
        _announce_threads(config.engine.threads)
        from headrace.engines.vllm.building import serve as serve_vllm

        serve_vllm(link, config, min((gpu.memory for gpu in this_host().gpus), default=0))
        return
    fix_threads(config.engine.threads)
    if config.engine.kind == "embedded":
        from headrace.engines.embedded.building import serve as serve_embedded

        serve_embedded(link, config)
    else:
        from headrace.engines.supplied import serve as serve_supplied

        serve_supplied(link, config)


def _serve_scorer(link: WorkerLink, config: Config) -> None:
    """Serve the model of a scorer. Each kind of scorer chooses its own server here."""
    link.phase = "loading"
    section = list(config.scorer_models.values())[int(link.name.rpartition("-")[2])]
    if section.cores:
        os.sched_setaffinity(0, section.cores)
    fix_threads(section.threads)
    if isinstance(section, ProcessRewardConfig):
        from headrace.engines.embedded.process_reward import serve as serve_process_reward

        serve_process_reward(link, section)
        return
    from headrace.engines.embedded.building import serve as serve_embedded

    # The weights of a model's own files are version 0. A teacher that follows the policy waits for delivered ones.
    serve_embedded(link, as_engine(config, section), version=0 if section.model else NO_VERSION)


def _last_step(link: WorkerLink, config: Config) -> int | None:
    journal = link.run_dir / "journal.db"
    if not journal.is_file():
        return None
    with open_readonly(journal) as reader:
        return reader.last_step(config.policy_name)


def _serve_trainer(link: WorkerLink, config: Config, last_step: int | None, meet_at: str) -> None:
    fix_threads(config.training.threads)
    from headrace.training.serving import TrainerRole

    TrainerRole(link, config, last_step, meet_at).run()


def _serve_gateway(link: WorkerLink, config: Config) -> None:
    from headrace.config.hub import model_dir
    from headrace.config.memory import longest_sequence
    from headrace.config.model_dir import model_facts
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.serving import GatewayRole
    from headrace.tasks.chat import ChatFormat

    link.phase = "loading"
    sys.setswitchinterval(0.001)  # The thread of the link must not wait long for a busy event loop.
    chat = ChatFormat.load(model_dir(config.model), config.model.chat_template)
    facts = model_facts(model_dir(config.model), config.model.weights)
    agents = config.task.workers * config.task.concurrency if isinstance(config.task, AgentTaskConfig) else 0
    GatewayRole(
        link,
        lambda engine, whole, note: Gateway(
            engine,
            chat,
            whole=whole,
            model=Path(config.model.path).name,
            bind=config.gateway.bind,
            max_length=longest_sequence(config.engine.max_length, facts.max_positions),
            max_tokens=config.rollouts.max_tokens,
            vocabulary=facts.vocabulary,
            stop_token_ids=tuple(chat.token_id(token) for token in config.rollouts.stop),
            connections=max(config.gateway.connections, 2 * agents),
            max_body=config.gateway.max_body,
            queue=max(config.gateway.queue, 2 * agents),
            note=note,
        ),
    ).run()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
