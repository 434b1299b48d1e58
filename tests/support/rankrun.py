"""One rank of training runs under ``torchrun``, with a target that is a table and no kernel; says what became of each.

Arguments: a folder, data, steps, then what happens in each run: ``none``, ``resume`` (from ``threads`` in the folder),
``signal``, ``digest``, ``config``; or, as the last, ``step`` or ``hang``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import dflashspec
import pytest
import stubpair

from dflash import config, launch, ranks, target, trainer
from dflash.errors import HangError, RankLostError
from dflash.pairs import Pair
from dflash.spec import Spec
from dflash.stop import Stop
from kernelbake.errors import KernelbakeError

LAST = ("step", "hang")


def job(folder: Path, text: str, steps: int, fault: str, here: ranks.Ranks) -> trainer.Job:
    section = dflashspec.changed("axes.buckets", [32])
    section["axes"]["anchors"] = [4]
    section["drafter"]["num_layers"] = 1
    second = here.rank == 1
    options: dict[str, Any] = {"steps": steps, "output": str(folder / fault), "data.source": text}
    options |= {"optimizer.lr": 1e-3 if fault == "config" and second else 3e-3, "checkpoint_every": 2}
    options["watchdog_seconds"] = 3 if fault == "hang" else 600
    if fault == "resume":
        options["resume"] = str(folder / "threads" / "step-00000002")
    run = launch.placed(config.load(None, (), options), here)
    bundle = "sha256:other" if fault == "digest" and second else "sha256:b"
    return trainer.Job(run, config.apply(run, Spec.parse(section)), bundle, interpreted=True, ranks=here)


def break_third_step(pair: Pair, fault: str) -> None:
    """Makes the third loss raise or hang."""
    true_loss, count = pair.loss, 0

    def loss(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3 and fault == "step":
            raise RuntimeError("the device fell off")
        if count == 3 and fault == "hang":
            threading.Event().wait(120)
        return true_loss(*args)

    pair.loss = loss  # type: ignore[method-assign]


def train(of: trainer.Job, fault: str, said: dict[str, Any]) -> None:
    stop = Stop()
    stop.install()
    made = trainer.build(of)
    if of.ranks.rank == 1:
        break_third_step(made.pair, fault)
    for report in trainer.train(made, stop):
        said["losses"].append(report.loss)
        said["steps"].append(report.step)
        if fault == "signal" and of.ranks.rank == 1 and report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    said["weights"] = [float(master.detach().double().sum()) for master in made.pair.optimizer.masters]


def main() -> None:
    folder, text, steps, *faults = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
    here = ranks.from_environment()
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "load_target", lambda *args, **options: stubpair.TableTarget(stubpair.spec()))
        patch.setattr(Pair, "loss", stubpair.cheap_loss)
        try:
            with ranks.joined(here):
                for fault in faults:
                    said: dict[str, Any] = {"losses": [], "steps": [], "code": 0}
                    try:
                        train(job(folder, text, steps, fault, here), fault, said)
                    except KernelbakeError as error:
                        said |= {"message": error.message, "reasons": list(error.reasons), "code": int(error.exit_code)}
                        said["kind"] = type(error).__name__
                        if fault in LAST:
                            raise
                    finally:
                        (folder / f"{fault}.{here.rank}.json").write_text(json.dumps(said))
        except KernelbakeError as error:
            code = int(error.exit_code)
            if isinstance(error, HangError | RankLostError):
                os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
