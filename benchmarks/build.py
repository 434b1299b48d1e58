"""A cold build against stock Triton's autotuning of the same keys, and what the choices are worth. One H200.

Three things run one after the other, each with empty caches: a build of the manifest below; the same steps of the same
workload under stock Triton, in a process of its own, which compiles and tunes on the way; and a second build that times
every candidate of every key to the end, by which the first one's choices are judged. Writes ``build_h200.json``.

``wall_ratio_to_stock``: from the first compilation to the written bundle, over stock's time from its first launch to
its last. Importing libraries, planning and checking the bundle are in ``total_wait_s``, and in ``raw`` each by itself.
``regret``: how much slower a winner is than the fastest candidate of its key in the second build, which samples all of
them in as many rounds; ties are decided by order within ``measure.tie_threshold`` and ``tie_floor_us``, so a regret up
to that is meant.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from kernelbake import build, bundle, manifest, workload
from kernelbake.build import Options
from kernelbake.bundle import Bundle
from kernelbake.manifest import Manifest
from kernelbake.progress import BuildResult, Event

MANIFEST = "sm90.yaml"
BUCKETS, BATCHES = [512, 2048, 4096, 8192], [1, 4]
"""Wider than the manifest's own, for 200 candidates: flash-linear-attention's norm has 25 for each class of lengths."""


def wanted() -> Manifest:
    """The manifest, with more cases."""
    found = manifest.load(manifest.find(MANIFEST))
    plugin = workload.load(found.plugin)
    axes = {**found.section["axes"], "buckets": BUCKETS, "batch_sizes": BATCHES}
    section = plugin.resolve(plugin.parse({**found.section, "axes": axes}))
    return dataclasses.replace(found, name="benchmark-build", section=section)


def show(event: Event) -> None:
    """One line for what is not counting."""
    if event.kind != "progress":
        print(f"  {event.kind} {event.phase} {event.message}"[:300], flush=True)


# ---------------------------------------------------------------------------------------------- stock


def stock(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in a process of its own: the workload's steps under stock Triton, timed from first launch to last."""
    import torch
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    from kernelbake.keys import Case
    from kernelbake.recorder import intercepted

    counts = {"benchmarks": 0, "compilations": 0}
    bench = Autotuner._bench

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["benchmarks"] += 1
        return bench(self, *args, **kwargs)

    Autotuner._bench = counted

    def listener(**facts: Any) -> None:
        counts["compilations"] += not facts["cache_hit"]

    knobs.compilation.listener = listener
    moments: list[float] = []

    def on_call(original: Any, launchable: Any, args: Any, kwargs: Any) -> Any:
        if not moments:
            torch.cuda.synchronize()
            moments[:] = [time.perf_counter(), 0.0]
        result = original(launchable, *args, **kwargs)
        moments[1] = time.perf_counter()
        return result

    plugin = workload.load(job["plugin"])
    spec = plugin.parse(job["section"])
    with plugin.prepare(interpreted=False):
        session = plugin.open(spec, device="cuda", seed=job["seed"])
        with intercepted(on_call):
            for axes in job["cases"]:
                session.step(Case.from_json(axes))
        torch.cuda.synchronize()
    return {**counts, "stock_s": moments[1] - moments[0]}


def run_stock(made: Manifest, plan_cases: list[Any], folder: Path) -> dict[str, Any]:
    job = {"plugin": made.plugin, "section": dict(made.section), "seed": made.measure.seed, "cases": plan_cases}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FLA_CACHE_"))}
    environment = {**kept, "TRITON_CACHE_DIR": str(folder / "stock"), "FLA_CACHE_RESULTS": "0"}
    command = [sys.executable, __file__, "--stock"]
    done = subprocess.run(
        command, input=json.dumps(job), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------------------------------------------------------------------------------------- regret


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def ratios(held: Bundle) -> dict[tuple[str, str], dict[str, float]]:
    """For each key, time relative to the fastest, compared within rounds, by config."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in held.record:
        if line["outcome"] == "ok" and line["key"] is not None:
            key = (line["kernel"], _text(line["key"]))
            found.setdefault(key, {})[_text(line["config"])] = line["ratio"]
    return found


def regrets(first: Bundle, second: Bundle) -> dict[str, float]:
    """By key, how much slower the first bundle's winner is than the second's fastest candidate, relative."""
    times = ratios(second)
    found = {}
    for choice in first.choices:
        if choice.key is not None:
            of_key = times[choice.kernel.to_json(), _text(choice.key.to_json())]
            found[f"{choice.kernel.name} {choice.key}"] = (
                of_key[_text(choice.winner.to_json())] / min(of_key.values()) - 1
            )
    return found


def same_winners(first: Bundle, second: Bundle) -> int:
    winners = {choice.id: choice.winner for choice in second.choices}
    return sum(winners[choice.id] == choice.winner for choice in first.choices if choice.key is not None)


# ---------------------------------------------------------------------------------------------- all of it


def raw_of(result: BuildResult) -> dict[str, Any]:
    return {
        "seconds": {phase: round(seconds, 3) for phase, seconds in result.seconds.items()},
        "measuring": dict(result.measuring),
        "rejected": dict(result.rejected),
        "keys": result.keys,
        "entries": result.entries,
        "bundle_bytes": result.bundle_bytes,
        "device_busy_share": result.device_busy_share,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiling processes")
    parser.add_argument("--stock", action="store_true", help="run the stock side; reads a job from stdin")
    options = parser.parse_args()
    if options.stock:
        print(json.dumps(stock(json.load(sys.stdin))))
        return
    recorder = common.Recorder("build_h200", __file__, options.commit, options.results)
    made = wanted()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        result = build.build(made, folder / "first.tar", jobs=options.jobs, on_event=show)
        total_wait_s = time.perf_counter() - start
        first = bundle.read(result.path)
        print(f"built: {raw_of(result)}", flush=True)
        by_stock = run_stock(made, [case.to_json() for case in reversed(first.plan.cases)], folder)  # as the build does
        print(f"stock: {by_stock}", flush=True)
        rounds = made.measure.rounds + made.measure.max_extra_rounds
        patient = made.measure.model_copy(update={"hopeless_ratio": 1e9, "rounds": rounds})
        again = dataclasses.replace(made, measure=patient)
        judged = build.run(again, folder / "second.tar", Options(jobs=options.jobs, plan=first.plan), show)
        second = bundle.read(judged.path)
    import torch  # so that the results file names the GPU

    torch.cuda.init()
    found = regrets(first, second)
    clock_s = sum(result.seconds[phase] for phase in ("compile", "measure", "pack"))
    recorder.add("wall_ratio_to_stock", clock_s / by_stock["stock_s"])
    recorder.add("total_wait_s", total_wait_s)
    recorder.add("stock_s", by_stock["stock_s"])
    recorder.add("candidates", result.candidates)
    recorder.add("jobs", options.jobs)
    recorder.add("device_busy_share", result.device_busy_share or 0.0)
    recorder.add("regret_median", statistics.median(found.values()))
    recorder.add("regret_max", max(found.values()))
    recorder.raw |= {
        "clock_s": clock_s,
        "build": raw_of(result),
        "stock": by_stock,
        "second_build": raw_of(judged),
        "same_winners": same_winners(first, second),
        "regrets": found,
        "times": {f"{choice.kernel.name} {choice.key}": dict(choice.times) for choice in first.choices},
        "tie_threshold": made.measure.tie_threshold,
    }
    print(recorder.write())


if __name__ == "__main__":
    main()
