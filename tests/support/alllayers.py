"""The dflash plug-in with every layer of the target opened instead of one of each kind: ``alllayers:WORKLOAD``."""

from __future__ import annotations

from typing import Any

from dflash.workload import DflashSession, DflashWorkload


class AllLayersWorkload(DflashWorkload):
    name = "dflash-all-layers"

    def open(self, spec: Any, *, device: str, seed: int) -> DflashSession:
        from dflash import target

        target.representative = lambda whole: whole
        target.representative_layer_ids = lambda layer_ids: layer_ids
        session = super().open(spec, device=device, seed=seed)
        opened = len(session._pair.target.model.model.layers)
        assert opened == spec.target.num_layers, f"{opened} layers were opened"
        return session


WORKLOAD = AllLayersWorkload()
