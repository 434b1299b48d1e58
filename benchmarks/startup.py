"""How long a freeze takes: every kernel of a bundle, against what a stock process with a warm Triton cache spends.

Each side runs in a process of its own, several times in turn. All processes import and make their contexts first, side
by side, and wait; then one after the other is let go, alone, and its clock starts. The frozen process freezes; the
stock process makes its first step, finding all code and all tuning results in Triton's cache, which an earlier process
filled. Without ``--bundle`` the bundle is made of one Gated DeltaNet forward at several lengths, and the first of them
is the step. Writes ``startup_h200.json``, and with two GPUs ``startup_h200x2.json`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import common

READY = "ready"
LENGTHS = (512, 1024, 2048, 3072, 4096, 8192)


class Steps:
    """What a process launches first: a forward at the first length, or the first case of a bundle's workload."""

    def __init__(self, bundle: Path | None) -> None:
        """Imports everything and makes the inputs; no kernel is launched that the step would launch."""
        self._bundle = bundle
        if bundle is None:
            import gdn

            self.given = {tokens: gdn.inputs(tokens) for tokens in LENGTHS}
            self._run = {tokens: gdn.forward(given) for tokens, given in self.given.items()}
            return
        from kernelbake import bundle as bundles
        from kernelbake import workload

        wanted = bundles.read(bundle).manifest_resolved["workload"]
        plugin = workload.load(wanted["plugin"])
        spec = plugin.parse(_lighter(wanted["section"]))
        self._case = plugin.cases(spec).planned[0]
        self._session = plugin.open(spec, device="cuda", seed=0)

    def first(self) -> None:
        """Makes the first step and waits for it."""
        import torch

        if self._bundle is None:
            self._run[LENGTHS[0]]()
        else:
            self._session.step(self._case)
        torch.cuda.synchronize()


def _lighter(section: dict[str, Any]) -> dict[str, Any]:
    """The section with one drafter layer: the same launches, and weights of which several processes hold a copy each.

    It shortens stock's first step, so it flatters the other side.
    """
    one = {"num_layers": 1, "layer_types": section["drafter"]["layer_types"][:1]}
    return {**section, "drafter": {**section["drafter"], **one}}


def make(path: Path) -> None:
    """The small bundle, from what stock Triton tunes and compiles here."""
    import fromstock

    steps, taken = Steps(None), fromstock.Taken()
    for tokens, run in steps._run.items():
        taken.run(f"tokens={tokens}", run)
    taken.write(path)


def _import_kernels(bundle: Path) -> None:
    """What a process has imported by the time it freezes."""
    import importlib

    from kernelbake import bundle as bundles
    from kernelbake import dispatch  # noqa: F401

    for facts in bundles.read(bundle).plan.kernels.values():
        importlib.import_module(facts.kernel.module)


def child(side: str, bundle: Path, own: bool, devices: int) -> dict[str, Any]:
    """One process: everything imported, contexts there, then the clock."""
    import torch

    from kernelbake.freeze import freeze

    steps = None
    if side == "stock" or own:
        steps = Steps(None if own else bundle)
    else:
        _import_kernels(bundle)
    for device in range(devices):
        torch.zeros(1, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    print(READY, flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    if side == "stock":
        assert steps is not None
        steps.first()
        return {"seconds": time.perf_counter() - start}
    frozen = freeze(bundle, devices=range(devices))
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "parts": dict(frozen.seconds), "kernels": frozen.counters.loads // devices}
    if steps is not None:
        steps.first()
        found["with_first_step"] = time.perf_counter() - start
        found["misses"] = frozen.counters.misses
    return found


class Process:
    """A child of this file that has everything imported and waits, with Triton's cache in a folder of its own."""

    def __init__(self, arguments: list[str], cache: Path) -> None:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_CACHE_AUTOTUNING": "1"}
        command = [sys.executable, __file__, "--child", *arguments]
        self._arguments, self._errors = arguments, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def wait_until_ready(self) -> None:
        """Returns once the child waits to be let go."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.strip() == READY:
                return
        self._fail()

    def go(self) -> dict[str, Any]:
        """Lets the child go, and gives what its last line says."""
        out, _ = self._child.communicate("go\n")
        if self._child.returncode:
            self._fail()
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def end(self) -> None:
        """Ends the child, if it is still there."""
        self._child.kill()
        self._child.wait()

    def _fail(self) -> NoReturn:
        self._child.wait()
        self._errors.seek(0)
        sys.exit(f"{' '.join(self._arguments)}:\n{self._errors.read()[-4000:]}")


def measure(recorders: dict[int, common.Recorder], options: argparse.Namespace, folder: Path) -> None:
    """Rounds of stock and frozen on one GPU; then, with two, rounds of frozen on one and on both."""
    cache = folder / "cache"
    bundle, own = options.bundle, options.bundle is None
    if own:
        bundle = folder / "bundle.tar"
        maker = Process(["make", str(bundle)], cache)
        maker.wait_until_ready()
        maker.go()
    place = [str(bundle), "own" if own else "given"]
    sides = {"stock": ("stock", "1"), "frozen": ("frozen", "1")}
    pairs = {"one": ("frozen", "1"), "two": ("frozen", "2")} if options.devices == 2 else {}
    kept = rounds(options.rounds, sides, pairs, place, cache)
    medians = {side: statistics.median(one["seconds"] for one in kept[side]) for side in sides}
    for recorder in recorders.values():
        recorder.raw.update(kept)
        recorder.add("freeze_s", medians["frozen"])
        recorder.add("kernels", kept["frozen"][0]["kernels"])
        recorder.add("ratio_to_warm_stock", medians["frozen"] / medians["stock"])
    if options.devices == 2:
        one, two = (statistics.median(found["seconds"] for found in kept[side]) for side in pairs)
        recorders[2].add("second_gpu_s", two - one)


def rounds(
    count: int,
    sides: dict[str, tuple[str, str]],
    pairs: dict[str, tuple[str, str]],
    place: list[str],
    cache: Path,
) -> dict[str, list[Any]]:
    """What the sides found, in turn, and after them the pairs, in turn; a first stock process fills the cache."""
    order = [*list(sides) * count, *list(pairs) * count]
    filling = Process(["stock", *place, "1"], cache)
    processes = []
    try:
        for name in order:
            side, devices = {**sides, **pairs}[name]
            processes.append(Process([side, *place, devices], cache))
        for process in (filling, *processes):
            process.wait_until_ready()
        filling.go()
        found: dict[str, list[Any]] = {name: [] for name in order}
        for name, process in zip(order, processes, strict=True):
            found[name].append(process.go())
        return found
    finally:
        for process in (filling, *processes):
            process.end()


def main() -> None:
    sys.path[:0] = [str(common.ROOT), str(common.ROOT / "tests" / "support")]
    if sys.argv[1:2] == ["--child"]:
        side, bundle, *rest = sys.argv[2:]
        if side == "make":
            print(READY, flush=True)
            make(Path(bundle))
            print("{}")
        else:
            print(json.dumps(child(side, Path(bundle), rest[0] == "own", int(rest[1]))))
        return
    parser = common.parser(__doc__)
    parser.add_argument("--bundle", type=Path, help="the bundle to freeze onto; default: a small one made here")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each side")
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2), help="GPUs to load on")
    options = parser.parse_args()
    names = {1: "startup_h200", 2: "startup_h200x2"}
    recorders = {
        count: common.Recorder(names[count], __file__, options.commit, options.results)
        for count in range(1, options.devices + 1)
    }
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        measure(recorders, options, Path(folder))
    import torch

    torch.cuda.is_available()  # the recorder names the machine by it
    for recorder in recorders.values():
        for figure, value in recorder.figures.items():
            print(f"{figure:22} {value:.4f}" if isinstance(value, float) else f"{figure:22} {value}")
        print(f"{recorder.write()} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
