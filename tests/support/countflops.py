"""FLOPs of a step's matrix products, counted by torch on fake tensors, beside the formulas of ``benchmarks/memory.py``.

Run as a process of its own: what a fake device changes is not undone. Prints both as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kernelbake import fakedevice, profiles

PROFILE = profiles.load("h200")
fakedevice.install(PROFILE)

import dflashspec  # noqa: E402
import memory as benchmark  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from dflash import synthetic  # noqa: E402
from dflash.buckets import Shape  # noqa: E402
from dflash.spec import Spec  # noqa: E402
from dflash.workload import DflashSession  # noqa: E402
from kernelbake import faketensors, triton_api  # noqa: E402
from kernelbake.bounds import Limits  # noqa: E402
from kernelbake.recorder import Observer  # noqa: E402
from kernelbake.shadow import LaunchLog, shadowed  # noqa: E402


def main() -> None:
    """Counts one step of the tiny section's largest case."""
    spec = Spec.parse(dflashspec.changed("axes.dtype", "bfloat16"))
    case = spec.axes.cases().planned[-1]
    log = LaunchLog(Observer(triton_api.gpu_target(PROFILE.arch), faketensors.stand_in, run_hooks=True), Limits())
    with shadowed(log):
        session = DflashSession(spec, "cuda", 0)
        batch = synthetic.batch(Shape.of(case), spec, 0)
        with FlopCounterMode(display=False) as counter:
            session._pair.step([batch], lr=0.0)
        formula = benchmark.model_flops(spec, session._pair.target, batch)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    anchors = batch.anchors_BN[0, : int(batch.num_valid_B[0])].tolist()
    blind = {  # Triton's kernels and torch's attention on the CPU, of which the counter knows nothing
        "target": benchmark.attention_flops(spec, batch.input_ids_BS.shape[1], spec.target.num_layers),
        "drafter": benchmark.block_flops(spec, anchors),
    }
    json.dump({"counted": counted, "formula": formula, "blind": blind}, sys.stdout)


if __name__ == "__main__":
    main()
