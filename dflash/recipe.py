"""Which loss a run trains with, as its configuration says it. Loads no torch.

``objective`` computes it; ``spec.LossSpec`` says which launches of it a bundle holds.
"""

from __future__ import annotations

import dataclasses

from dflash.schema import Reader

CE, KL, MIX = "ce", "kl", "mix"
KINDS = (CE, KL, MIX)
DECAY, D_PACE = "decay", "d-pace"
WEIGHTS = (DECAY, D_PACE)

_SMALLEST_SHARE, _LARGEST_SHARE = 1e-6, 1 - 1e-6  # at the ends a mix is `ce` or `kl`, and should be called so


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The loss of a row and its weight.

    Args:
        kind: ``ce``, the cross entropy of the label; ``kl``, KL(target ‖ drafter) over the vocabulary; ``mix``, both.
        kl_share: of the KL term: 0, 1, or what a mix was given.
        weights: ``decay`` by position, as DFlash's paper has it, or ``d-pace`` by how likely a position is reached.
        alpha: D-PACE's smoothing of the drafter's confidence; None with ``decay``.
    """

    kind: str = CE
    kl_share: float = 0.0
    weights: str = DECAY
    alpha: float | None = None

    @classmethod
    def read(cls, reader: Reader) -> LossConfig:
        kind = reader.text("kind", CE, choices=KINDS)
        weights = reader.text("weights", DECAY, choices=WEIGHTS)
        share = reader.number("kl_share", None, low=_SMALLEST_SHARE, high=_LARGEST_SHARE)
        alpha = reader.number("alpha", None, high=1.0)
        if share is not None and kind != MIX and reader.good("kind", "kl_share"):
            reader.fault("kl_share", f"given with `kind: {kind}`; wanted it with `kind: {MIX}` only")
        if alpha is not None and weights != D_PACE and reader.good("weights", "alpha"):
            reader.fault("alpha", f"given with `weights: {weights}`; wanted it with `weights: {D_PACE}` only")
        reader.done()
        shares = {CE: 0.0, KL: 1.0, MIX: 0.5 if share is None else share}
        smoothing = 0.5 if alpha is None else alpha
        return cls(kind, shares[kind], weights, smoothing if weights == D_PACE else None)
