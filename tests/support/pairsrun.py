"""Two frozen pairs on two GPUs, by the library: prints whether they end with equal bits, or what pair 1 failed with.

Arguments: bundle, output folder, steps, fault (``none`` or ``step``), options of the configuration (``key=value``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dflash import config, launch, trainer
from dflash.errors import PairError
from dflash.stop import Stop


def main() -> None:
    bundle, output, steps, fault, *settings = sys.argv[1:]
    run = config.load(None, settings, {"bundle": bundle, "output": output, "steps": int(steps)})
    plan = launch.settle(run)
    said: dict[str, Any] = {"losses": []}
    with launch.started(plan, stock=False) as started:
        job = trainer.Job(run, plan.spec, plan.held.digest, plan.interpreted)
        made = trainer.build(job)
        if fault == "step":
            true_loss, count = made.pairs[1].loss, [0]

            def loss(*args: Any) -> Any:
                count[0] += 1
                if count[0] == 3:
                    raise RuntimeError("the device fell off")
                return true_loss(*args)

            made.pairs[1].loss = loss  # type: ignore[method-assign]
        try:
            for report in trainer.steps(made, Stop()):
                said["losses"].append(report.loss)
                said["peaks"] = sorted(report.peak_bytes_by_device)
        except PairError as error:
            said |= {"message": error.message, "reasons": list(error.reasons), "hint": error.hint}
        states = [pair.optimizer.state() for pair in made.pairs]
        said["equal"] = all(tensor.cpu().equal(states[1][name].cpu()) for name, tensor in states[0].items())
        said["weights_equal"] = all(
            one.cpu().equal(other.cpu())
            for one, other in zip(*(pair.drafter.parameters() for pair in made.pairs), strict=True)
        )
        assert started.frozen is not None
        said["misses"] = started.frozen.counters.misses
    (Path(output).parent / f"{Path(output).name}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
