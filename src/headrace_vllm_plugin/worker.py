"""The methods that Headrace adds to every worker process of a vLLM server.

The server is started with `--worker-extension-cls headrace_vllm_plugin.worker.HeadraceWorker`. The engine that drives
the server then calls these methods over HTTP, on all workers at once. Every answer is a plain dictionary of JSON
values. Importing this module registers the weight-transfer engine with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm

from headrace.errors import DeliveryError
from headrace_vllm_plugin import register
from headrace_vllm_plugin.noise import attach
from headrace_vllm_plugin.wire import BACKEND, PROTOCOL, Facts, FetchOrder, StagingState

if TYPE_CHECKING:
    from headrace_vllm_plugin.transfer import HeadraceTransfer

register()


class HeadraceWorker:
    """A mixin that vLLM adds to its worker class. The attributes declared here are those of vLLM's worker."""

    weight_transfer_engine: HeadraceTransfer | None
    vllm_config: Any
    device: torch.device
    model_runner: Any
    get_model: Callable[[], torch.nn.Module]
    use_v2_model_runner: bool
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool

    def headrace_hello(self) -> dict[str, Any]:
        """Return the worker's properties (`Facts`), and attach the processor that ties noise to (seed, position)."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        attached = not self.use_v2_model_runner and attach(self.model_runner)
        facts = Facts(
            protocol=PROTOCOL,
            vllm=vllm.__version__,
            backend=transfer.backend if transfer is not None else "",
            model=config.model_config.model,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vocabulary=config.model_config.get_vocab_size(),
            max_length=config.model_config.max_model_len,
            logprobs_mode=str(config.model_config.logprobs_mode),
            slots=config.scheduler_config.max_num_seqs,
            blocks=config.cache_config.num_gpu_blocks or 0,
            block_size=config.cache_config.block_size,
            position_noise=self.use_v2_model_runner or attached,
            truncation=attached,
            kept=config.model_config.return_sampling_mask,
            expert_layers=self._expert_layers(),
            device=self.device.type,
            workers=config.parallel_config.world_size,
            quantization=str(config.model_config.quantization or ""),
            quantized_checkpoint=getattr(config.model_config.hf_config, "quantization_config", None) is not None,
            cache_dtype=str(config.cache_config.cache_dtype),
        )
        return _answer(facts)

    def headrace_stage(self, order: str) -> dict[str, Any]:
        """Begin to fetch the version of a `FetchOrder` (in JSON) beside the live weights; return its `StagingState`.

        If the fetch cannot begin, the answer holds the reason: the text of an exception would not reach the driver.
        """
        wanted = msgspec.json.decode(order, type=FetchOrder)
        try:
            self.headrace_transfer().staging.begin(wanted)
        except DeliveryError as error:
            return _answer(StagingState(version=wanted.version, error=str(error)))
        return _answer(StagingState(version=wanted.version))

    def headrace_staged(self) -> dict[str, Any]:
        """Return the state of the last fetch (`StagingState`)."""
        return _answer(self.headrace_transfer().staging.state())

    def headrace_load(self, version: str) -> dict[str, Any]:
        """Load the staged version while the scheduler is paused, and compare it with the live weights; return `Live`.

        All steps are one call: decoding is paused meanwhile, and each further call would lengthen the pause.
        """
        transfer = self.headrace_transfer()
        try:
            self.start_weight_update()
            self.update_weights({"version": int(version)})
            self.finish_weight_update()
        finally:
            # If a step fails, vLLM would take the update for one that is still under way, and refuse the next one.
            self._weight_update_active = False
        return _answer(transfer.live())

    def _expert_layers(self) -> list[int]:
        """Return the layers with experts, if the server was started to record the experts of every token."""
        if not self.vllm_config.aux_output_config.enable_return_routed_experts:
            return []
        routed = [each for each in self.get_model().modules() if hasattr(each, "router") or hasattr(each, "capture_fn")]
        layers = {getattr(each, "layer_id", None) for each in routed}
        return sorted(layer for layer in layers if isinstance(layer, int))

    def headrace_transfer(self) -> HeadraceTransfer:
        """Return the weight-transfer engine; raises `DeliveryError` if the server was started without one."""
        engine = self.weight_transfer_engine
        if engine is None:
            raise DeliveryError(f"this server was started without --weight-transfer-config backend {BACKEND}")
        return engine


def _answer(answer: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain
