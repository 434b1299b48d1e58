"""Kills runs at random moments while they save every step, and resumes them, until they have made all steps.

Arguments: a folder, a JSONL file, the number of pairs, of steps and of kills. Prints the output folder of an unbroken
run and that of the killed one; ``kills`` of the latter has the step of the newest checkpoint at each kill. Runs are
forked from a process that has loaded everything and computed nothing, so that little of their time is start.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import dflashspec
import pytest
import stubpair

from dflash import checkpoint, config, export, target, trainer
from dflash.pairs import Pair
from dflash.spec import Spec
from dflash.stop import Stop

FURTHER, LATER_S = 4, 0.06
"""A run is killed up to so many checkpoints after its start, and then so much later: about a step."""


def job(output: Path, data: str, **options: Any) -> trainer.Job:
    section = dflashspec.changed("axes.buckets", [16, 32])
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    run = config.load(None, (), {"output": str(output), "data.source": data, "checkpoint_every": 1, **options})
    return trainer.Job(run, config.apply(run, Spec.parse(section)), bundle="sha256:b", interpreted=True)


def forked(of: trainer.Job) -> int:
    """A process that makes the run, and its number."""
    child = os.fork()
    if child == 0:
        try:
            list(trainer.train(trainer.build(of), Stop()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def killed(child: int, seen: Path, later_s: float) -> bool:
    """Whether the process was killed, so long after a folder was seen; one that ends before must end well."""
    end = None
    while end is None or time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert status == 0, status
            return False
        if end is None and seen.exists():
            end = time.monotonic() + later_s
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def check(output: Path) -> int:
    """The step of the newest checkpoint, once everything that has its final name was read."""
    saved = sorted(output.glob("step-*"))
    for folder in saved:
        checkpoint.load(folder)
    if (output / "drafter").exists():
        export.load(output / "drafter")
    return int(saved[-1].name[-8:]) if saved else 0


def main() -> None:
    folder, data, pairs, steps, kills = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    draw, options = random.Random(pairs), {"dp_pairs": pairs, "steps": steps}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "load_target", lambda *args, **more: stubpair.TableTarget(stubpair.spec()))
        patch.setattr(Pair, "loss", stubpair.cheap_loss)
        trainer.build(job(folder / "loads", data, **options))
        unbroken, output, stood = folder / "unbroken", folder / "killed", [0]
        assert not killed(forked(job(unbroken, data, **options)), folder / "never", 0.0)
        for turn in itertools.count():
            more = {"resume": "latest"} if stood[-1] else {}
            further = draw.randint(0, FURTHER) if turn < kills else steps
            seen = checkpoint.folder(output, stood[-1] + further) if further else folder
            if not killed(forked(job(output, data, **options, **more)), seen, draw.uniform(0.0, LATER_S)):
                break
            stood.append(check(output))
    (output / "kills").write_text(" ".join(map(str, stood)))
    print(unbroken, output, sep="\n")


if __name__ == "__main__":
    main()
