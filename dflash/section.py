"""A workload's section of a manifest, as one run takes it. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash import config, hub
from dflash.config import RunConfig
from dflash.spec import Spec, computed_layer_ids
from kernelbake.errors import InputError


def of_run(run: RunConfig, section: Mapping[str, Any]) -> Spec:
    """The workload's section of a run: the bundle's, with what the run says instead.

    Raises:
        InputError: a target that cannot be found, shapes that cannot be.
    """
    spec = config.apply(run, _with_target(run, Spec.parse(section)))
    if spec.target.frozen is False:
        raise InputError("target: the manifest plans a backward pass through it; training always freezes it")
    return spec


def _with_target(run: RunConfig, spec: Spec) -> Spec:
    """The section with the dimensions of the target that will be loaded; computed layers are computed anew."""
    target = hub.resolve(run.target or spec.target.model, spec.target)
    section = dataclasses.replace(spec, target=target).to_json()
    ids, count = spec.drafter.target_layer_ids, spec.drafter.num_layers
    if ids == computed_layer_ids(spec.target.num_layers, count):
        section["drafter"]["target_layer_ids"] = None
    return Spec.parse(section)
