"""A frozen run of training under the eyes of ``onlookers``: everything from before its first step to after its last.

Arguments: a folder with ``bundle.tar``, data, the number of steps. Writes ``deeds.json`` into the folder: what was
noted during the run, and then during a control that does one thing of each kind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onlookers

from dflash import config, launch, trainer
from dflash.stop import Stop


def main(folder: Path, text: str, steps: int) -> None:
    audit = onlookers.Audit()
    options = {"bundle": str(folder / "bundle.tar"), "output": str(folder / "run"), "data.source": text}
    run = config.load(None, (), {**options, "steps": steps, "checkpoint_every": 20})
    plan = launch.settle(run)
    with launch.started(plan, stock=False) as started:
        assert started.frozen is not None
        made = trainer.build(trainer.Job(run, plan.spec, plan.held.digest, interpreted=True))
        sys.addaudithook(audit)
        onlookers.mark("first-step")
        reports = list(trainer.train(made, Stop()))
        onlookers.mark("last-step")
        found, audit.deeds = audit.deeds, []
        onlookers.mark("control")
        control()
        onlookers.mark("end")
        facts = {"steps": len(reports), "hits": started.frozen.counters.hits, "found": found, "control": audit.deeds}
    (folder / "deeds.json").write_text(json.dumps(facts))


def control() -> None:
    """One deed of every kind that a cache or a compiler would do, in a folder that is left as it was."""
    cache = Path(os.environ["HOME"], ".triton")
    cache.mkdir()
    (cache / "kernel.tmp").write_text("")
    (cache / "kernel.tmp").rename(cache / "kernel.json")
    (cache / "kernel.json").unlink()
    shutil.rmtree(cache)
    subprocess.run(["true"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
