"""Checks whether a published version fits the live tensors of an engine: names, shapes, dtypes and layout."""

from collections.abc import Mapping

import torch

from headrace.delivery.base import Manifest, some_names
from headrace.delivery.plan import PackingPlan, dtype_name, dtype_of, make_plan, plan_digest
from headrace.errors import DeliveryError


def agreed_plan(manifest: Manifest, live: Mapping[str, torch.Tensor], known: PackingPlan | None) -> PackingPlan:
    """Return the packing plan of a version, made from the engine's own tensors and the dtypes of the manifest.

    `live` holds the tensors that the engine serves. Raises `DeliveryError` if the manifest has another plan. `known` is
    the plan of the previous version; it is returned at once if the manifest has the same plan.
    """
    if known and known.digest == manifest.plan_digest and known.entries == tuple(manifest.entries):
        return known
    entries = {entry.name: entry for entry in manifest.entries}
    if missing := live.keys() - entries.keys():
        raise DeliveryError(f"version {manifest.version} lacks {some_names(missing)}")
    if unknown := entries.keys() - live.keys():
        raise DeliveryError(f"version {manifest.version} has {some_names(unknown)}, which this engine does not know")
    for name, tensor in live.items():
        entry = entries[name]
        if entry.shape != tuple(tensor.shape):
            raise DeliveryError(f"{name} is published with shape {entry.shape}, but lives with {tuple(tensor.shape)}")
        if dtype_of(entry.dtype).is_floating_point != tensor.is_floating_point():
            raise DeliveryError(f"{name} is published as {entry.dtype}, but lives as {dtype_name(tensor.dtype)}")
    plan = make_plan((name, entries[name].dtype, tensor.shape) for name, tensor in live.items())
    if not plan.digest == manifest.plan_digest == plan_digest(manifest.entries):
        raise DeliveryError(f"version {manifest.version} is packed by another plan than this engine's")
    return plan


def check_widths(manifest: Manifest, live: Mapping[str, torch.Tensor]) -> None:
    """Raise `DeliveryError` if a tensor is published in a dtype that the live tensor's dtype does not contain.

    `check_casts` compares the values, but there are no values yet.
    """
    for entry in manifest.entries:
        published, target = dtype_of(entry.dtype), live[entry.name].dtype
        if torch.promote_types(published, target) != target:
            raise DeliveryError(
                f"{entry.name} is published as {entry.dtype} and may lose precision as the engine's"
                f" {dtype_name(target)}"
            )


def check_casts(weights: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    """Raise `DeliveryError` if the cast of a published tensor to the live tensor's dtype would lose precision."""
    for name, tensor in weights.items():
        target = live[name].dtype
        if target != tensor.dtype:
            back = tensor.to(target).to(tensor.dtype)
            # Compared as bytes, so that a NaN equals itself and the two zeros differ.
            if not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise DeliveryError(
                    f"{name} is published as {dtype_name(tensor.dtype)} and loses precision as the engine's"
                    f" {dtype_name(target)}"
                )
