"""The weight-transfer engine: it loads staged, digested weights through vLLM's own `load_weights`, and no others.

Tensors have their Hugging Face names; vLLM itself fuses, shards and packs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from headrace.delivery.copying import copy_all
from headrace.errors import DeliveryError
from headrace_vllm_plugin.layout import Pair, compare, visible
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

    The first version goes through vLLM's own loaders. If all its tensors are then found again in the live weights, bit
    for bit, and vLLM derives nothing else from them, later versions are copied there directly. That takes milliseconds
    instead of the tenths of a second that vLLM needs to take its layers apart and to put them together again.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging = WorkerStaging(device, self._pristine, self.parallel_config.world_size)
        self.loaded: dict[str, torch.Tensor] = {}
        self.missing: list[str] = []
        self._seen: set[str] = set()
        """The names of all tensors of the last version, if it was found in the live weights and nothing is derived."""
        self._direct = False
        """Whether the update under way is copied directly."""
        self._pairs: list[Pair] = []
        """The pairs of live and loaded tensors of an update that was copied directly."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: transports connect when a version is staged."""

    def start_weight_update(self) -> None:
        """Prepare the model for new weights. If no version is staged, raise `DeliveryError` and touch no weights."""
        state = self.staging.state()
        if not state.done or state.error or state.version < 0:
            raise DeliveryError(f"no version is staged: {state.error or 'the last one is under way'}")
        self._direct = bool(self._seen)
        self._pairs = []  # A copy that failed leaves its pairs behind.
        if self._direct:
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the staged tensors under their Hugging Face names."""
        self.loaded = self.staging.take(update_info.version)
        if self._direct:
            self._copy()
            return
        found = self.model.load_weights(self.loaded.items())
        expected = {name for name, _ in self.model.named_parameters()}
        if self._tied():
            # With tied weights no checkpoint has this tensor: vLLM uses the embedding.
            expected.discard("lm_head.weight")
        self.missing = sorted(expected - set(found)) if found else []

    def _copy(self) -> None:
        seen, self._seen = self._seen, set()
        self._pairs = list(visible(self.model, self.loaded))
        live = {pair.name: pair.live for pair in self._pairs}
        if not live.keys() == seen == self.loaded.keys():
            raise DeliveryError("the version has other tensors than the one before")
        copy_all(live, {pair.name: pair.loaded for pair in self._pairs}, threads=1)

    def _derives(self) -> bool:
        """Return whether vLLM may compute with something other than the visible weights."""
        config = self.model_config
        return self.device.type == "cpu" or config.quantization is not None or bool(config.use_mla)

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _pristine(self) -> Pristine:
        return Pristine(Path(self.model_config.model), self.model_config.dtype, tied=self._tied())

    def finish_weight_update(self) -> None:
        """Let vLLM pack the loaded weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._direct:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied()
            self._pack_experts()

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

    def _pack_experts(self) -> None:
        """Pack the weights of experts. On a CPU vLLM computes with packed ones, and packs only those that it loads at
        its start; later ones are copied over them as they are.
        """
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def live(self) -> Live:
        """Compare the live weights with the loaded ones by digest, as far as vLLM's layout shows them.

        This releases the loaded tensors, so it can be called once for each load.
        """
        error = ""
        try:
            self.staging.check()
        except DeliveryError as changed:
            error = str(changed)
        pairs = self._pairs or list(visible(self.model, self.loaded))
        found = compare(pairs, self.loaded, self.staging.digest, self.staging.taken_digest)
        found.missing, found.error = self.missing, error
        if not (found.hidden or found.wrong or found.missing or found.error or self._derives()):
            self._seen = set(self.loaded)
        self.loaded, self._pairs = {}, []
        return found

    def shutdown(self) -> None:
        """Close the transports and release the memory."""
        self.staging.close()
