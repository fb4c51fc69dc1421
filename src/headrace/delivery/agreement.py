"""Checks that a published version fits this engine, before any live weight is changed.

The names, shapes and kinds of dtype must be the same. A delta or an adapter must have been made for the weights that
the engine has. A cast to the engine's dtypes must not lose precision. If something does not fit, these functions raise
a `DeliveryError` that names it. They never change a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from headrace.delivery.base import Manifest
from headrace.delivery.plan import PackingPlan, dtype_name, dtype_of, make_plan, plan_digest
from headrace.errors import DeliveryError, WrongBase


def agreed_plan(manifest: Manifest, live: Mapping[str, torch.Tensor], known: PackingPlan | None) -> PackingPlan:
    """Return the packing plan of a version, made from the engine's own tensors and the dtypes of the manifest.

    `live` holds the tensors that the engine serves. Raises `DeliveryError` if the manifest has another plan. `known` is
    the plan of the previous version; it is returned at once if the manifest has the same plan.
    """
    if known and known.digest == manifest.plan_digest and known.entries == tuple(manifest.entries):
        return known
    entries = {entry.name: entry for entry in manifest.entries}
    if missing := live.keys() - entries.keys():
        raise DeliveryError(f"version {manifest.version} lacks {_some(missing)}")
    if unknown := entries.keys() - live.keys():
        raise DeliveryError(f"version {manifest.version} has {_some(unknown)}, which this engine does not know")
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


def check_base(manifest: Manifest, *, proved: int, quarantined: bool, base_digest: int | None) -> None:
    """Raise unless the version is of the kind that this engine takes, and was made for the weights that it has.

    `proved` is the last version that was proved on this engine. In quarantine the live weights are not proved to be any
    version. `base_digest` is the digest of the weights under the adapter, or None if the engine takes no adapters. A
    delta to another version raises `WrongBase`; everything else raises a plain `DeliveryError`.
    """
    version = manifest.version
    if (manifest.kind == "adapter") != (base_digest is not None):
        wanted = "all weights, not an adapter" if base_digest is None else "an adapter"
        raise DeliveryError(f"version {version} is of kind {manifest.kind}, but this engine takes {wanted}")
    if manifest.kind == "adapter" and manifest.base_digest != base_digest:
        raise DeliveryError(
            f"version {version} is an adapter to weights with digest {manifest.base_digest:016x}, but this engine's"
            f" have {base_digest:016x}"
        )
    if manifest.kind == "delta" and (quarantined or proved != manifest.base):
        held = "unproved weights" if quarantined else f"version {proved}"
        raise WrongBase(f"version {version} is a change to version {manifest.base}, but this engine has {held}")


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


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} and {len(ordered) - 1} more"
