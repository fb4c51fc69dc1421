"""The assembly of the workers: it decides which engine or trainer a process serves.

Concrete classes are chosen only here.
"""

from __future__ import annotations

from pathlib import Path

from headrace.buffer.reader import open_readonly
from headrace.channel.worker_link import WorkerLink
from headrace.cluster.threads import announce_threads, fix_threads
from headrace.config import Config
from headrace.engines.serving import Build
from headrace.engines.serving import serve as serve_engine


def serve(role: str, link: WorkerLink, config: Config) -> None:
    """Serve this role until the controller asks to stop."""
    if role == "engine":
        _serve_engine(link, config)
    else:
        fix_threads(config.training.threads)
        link.peak_memory = peak_gpu_memory
        from headrace.training.serving import serve as serve_trainer

        serve_trainer(link, config, last_step(link.run_dir, config.policy_name))


def _serve_engine(link: WorkerLink, config: Config) -> None:
    if config.engine.kind == "vllm":
        # vLLM servers are processes of their own: torch is not loaded in this process.
        announce_threads(config.engine.threads)
    else:
        fix_threads(config.engine.threads)
        link.peak_memory = peak_gpu_memory
    serve_engine(link, config, engine_builder(config.engine.kind))


def engine_builder(kind: str) -> Build:
    """Return the function that builds an engine of this kind. A kind with a colon names a factory of the user's."""
    if kind == "embedded":
        from headrace.engines.embedded.building import build as build_embedded

        return build_embedded
    if kind == "vllm":
        from headrace.engines.vllm.building import build as build_vllm

        return build_vllm
    from headrace.engines.supplied import builder

    return builder(kind)


def peak_gpu_memory() -> int:
    """Return the peak bytes that torch has reserved on GPUs for this process, without the CUDA context."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(torch.cuda.max_memory_reserved(device) for device in range(torch.cuda.device_count()))


def last_step(run_dir: Path, policy: str) -> int | None:
    """Return the policy's last step in the journal, or None without a journal.

    A checkpoint of a later step has no history.
    """
    journal = run_dir / "journal.db"
    if not journal.is_file():
        return None
    with open_readonly(journal) as reader:
        return reader.last_step(policy)
