"""The weight-transfer engine: it loads staged, digested weights through vLLM's own `load_weights`, and no others.

Tensors have their Hugging Face names; vLLM itself fuses, shards and packs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from headrace.errors import DeliveryError
from headrace_vllm_plugin.layout import compare
from headrace_vllm_plugin.weights import Pristine, WorkerStaging
from headrace_vllm_plugin.wire import Live


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty, because nothing is agreed on in advance: each fetch order says where its version is."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The staged version to load."""

    version: int


class HeadraceTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The weight-transfer engine of one worker.

    From `start_weight_update` on, the live weights are unproved until the driver has proved them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging = WorkerStaging(device, self._pristine, self.parallel_config.world_size)
        self.loaded: dict[str, torch.Tensor] = {}
        self.missing: list[str] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: transports connect when a version is staged."""

    def start_weight_update(self) -> None:
        """Prepare the model for new weights. If no version is staged, raise `DeliveryError` and touch no weights."""
        state = self.staging.state()
        if not state.done or state.error or state.version < 0:
            raise DeliveryError(f"no version is staged: {state.error or 'the last one is under way'}")
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the staged tensors under their Hugging Face names."""
        self.loaded = self.staging.take(update_info.version)
        found = self.model.load_weights(self.loaded.items())
        expected = {name for name, _ in self.model.named_parameters()}
        if self._tied():
            # With tied weights no checkpoint has this tensor: vLLM uses the embedding.
            expected.discard("lm_head.weight")
        self.missing = sorted(expected - set(found)) if found else []

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _pristine(self) -> Pristine:
        return Pristine(Path(self.model_config.model), self.model_config.dtype, tied=self._tied())

    def finish_weight_update(self) -> None:
        """Let vLLM pack the loaded weights; raises `DeliveryError` if they changed while they were loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied()
        self.staging.check()

    def _pack_tied(self) -> None:
        """Pack tied weights again. On a CPU a layer computes with a packed copy, and vLLM renews the copy only for
        weights that were loaded by name; a head that is tied to the embedding has no name of its own.
        """
        owners: dict[int, list[Any]] = {}
        for module in self.model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.numel():
                owners.setdefault(weight.data_ptr(), []).append(module)
        for tied in owners.values():
            for module in tied if len(tied) > 1 else ():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)

    def live(self) -> Live:
        """Compare the live weights with the loaded ones by digest, as far as vLLM's layout shows them."""
        found = compare(self.model, self.loaded, self.staging.digest, self.staging.taken_digest)
        found.missing = self.missing
        self.loaded = {}
        return found

    def shutdown(self) -> None:
        """Close the transports and release the memory."""
        self.staging.close()
