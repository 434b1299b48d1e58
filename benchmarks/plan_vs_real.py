"""A plan against the real thing: what was planned without the GPU, and what stock Triton remembers after real steps.

Two processes that share nothing but the cases. One plans, on fake tensors. The other runs the workload's real steps on
the GPU with a Triton that nobody has touched, and then reads the autotuners' and the kernels' own caches. The sets of
autotune keys and of specializations must be equal. Writes ``plan_vs_real_h200.json``.

Stock Triton tries all candidates for the first class of arguments that meets a key, and only the winner for any later
one; so a planned class counts as met when at least one of its candidates was, and one class of each key entirely.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import common

from kernelbake import manifest, planner
from kernelbake.keys import encode
from kernelbake.plan import Launch, Plan


@dataclasses.dataclass(frozen=True)
class Real:
    """What the real process reports: keys and specializations as JSON text beside the kernel's name."""

    keys: frozenset[tuple[str, str]]
    specializations: frozenset[tuple[str, str]]
    seconds: float


# ---------------------------------------------------------------------------------------------- the real process


def real_process() -> None:
    """Runs the steps of the request on stdin; nothing of Triton is replaced. Prints the report as the last line."""
    request = json.loads(sys.stdin.read())
    from kernelbake import workload
    from kernelbake.keys import Case

    plugin = workload.load(request["plugin"])
    spec = plugin.parse(request["section"])
    start = time.perf_counter()
    with plugin.prepare(interpreted=False):
        session = plugin.open(spec, device="cuda", seed=0)
        for data in request["cases"]:
            case = Case.from_json(data)
            session.step(case)
            print(f"  real: {case.id} after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    import torch

    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    from kernelbake.recorder import read_memories

    memories = read_memories()
    keys = [(name, _text([encode(value) for value in key])) for name, key in memories.keys]
    print(json.dumps({"keys": keys, "specializations": list(memories.specializations), "seconds": seconds}))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def run_real(plugin: str, section: Any, cases: Iterable[Any]) -> Real:
    """The report of a process of its own, with an empty compile cache."""
    request = {"plugin": plugin, "section": section, "cases": [case.to_json() for case in cases]}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FLA_"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--real"],
            input=json.dumps(request),
            env={**kept, "TRITON_CACHE_DIR": folder, "FLA_CACHE_RESULTS": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    keys, specializations = (frozenset(map(tuple, report[name])) for name in ("keys", "specializations"))
    return Real(keys, specializations, report["seconds"])


# ---------------------------------------------------------------------------------------------- the comparison


def _key(launch: Launch) -> tuple[str, str]:
    assert launch.key is not None
    return launch.kernel.name, _text([encode(value) for value in launch.key.triton_key()])


def compare(plan: Plan, real: Real) -> tuple[list[str], list[str]]:
    """What was planned and not launched, and what was launched and not planned."""
    planned_keys = {_key(launch): launch for launch in plan.launches if launch.key is not None}
    planned = {
        (launch.kernel.name, specialization.token)
        for launch in plan.launches
        for variant in launch.variants
        for specialization in variant.specializations
    }
    launched = [f"key {name} {text}" for name, text in real.keys - planned_keys.keys()]
    launched += [f"specialization {name} {token}" for name, token in real.specializations - planned]
    unmet = [f"key {launch}" for key, launch in planned_keys.items() if key not in real.keys]
    for launch in plan.launches:
        met = [
            sum((launch.kernel.name, item.token) in real.specializations for item in variant.specializations)
            for variant in launch.variants
        ]
        classes = zip(launch.variants, met, strict=True)
        unmet += [f"class {launch}: {variant.cases[0]}" for variant, number in classes if not number]
        if max(met) < len(launch.candidates):
            unmet.append(f"candidates {launch}: {max(met)} of {len(launch.candidates)} were tried")
    return sorted(unmet), sorted(launched)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--manifest", default="sm90.yaml", help="path or name of the manifest")
    parser.add_argument("--layouts", default="padded,packed", help="layouts to run, whatever the manifest names")
    parser.add_argument("--cases", action="append", default=[], metavar="TEXT", help="only cases whose id holds TEXT")
    given = parser.parse_args()
    recorder = common.Recorder("plan_vs_real_h200", __file__, given.commit, given.results)

    wanted = manifest.load(manifest.find(given.manifest))
    section = {**wanted.section, "axes": {**wanted.section["axes"], "layouts": given.layouts.split(",")}}
    start = time.perf_counter()
    plan = planner.plan(wanted.plugin, section, wanted.profile, interpreted=False)
    plan_s = time.perf_counter() - start
    cases = [case for case in plan.cases if all(text in case.id for text in given.cases)]
    if not cases:
        sys.exit(f"plan_vs_real: no case holds {given.cases}; there are {[case.id for case in plan.cases]}")
    plan = restricted(plan, {case.id for case in cases})
    print(f"planned {len(plan.launches)} launches of {len(cases)} cases in {plan_s:.1f} s", flush=True)

    real = run_real(wanted.plugin, section, cases)
    unmet, unplanned = compare(plan, real)
    for line in (*(f"not launched: {line}" for line in unmet), *(f"not planned: {line}" for line in unplanned)):
        print(line)
    missing_one = dataclasses.replace(plan, launches=plan.launches[1:])
    nothing = Real(frozenset(), frozenset(), 0.0)
    figures = {
        "cases": len(cases),
        "launch_kinds": sum(len(launch.variants) for launch in plan.launches),
        "keys": plan.num_keys,
        "specializations": len(real.specializations),
        "planned_not_launched": len(unmet),
        "launched_not_planned": len(unplanned),
        "planned_not_launched_without_real_steps": len(compare(plan, nothing)[0]),
        "launched_not_planned_by_a_plan_that_lacks_one": len(compare(missing_one, real)[1]),
        "plan_s": round(plan_s, 3),
        "real_s": round(real.seconds, 3),
    }
    for name, value in figures.items():
        print(f"{name:48} {value}")
        recorder.add(name, value)
    recorder.raw = {"cases": [case.id for case in cases], "not_launched": unmet, "not_planned": unplanned}
    print(recorder.write())
    sys.exit(bool(unmet or unplanned))


def restricted(plan: Plan, ids: set[str]) -> Plan:
    """The plan of some of its cases."""
    launches = []
    for launch in plan.launches:
        variants = tuple(variant for variant in launch.variants if ids.intersection(variant.cases))
        if variants:
            launches.append(dataclasses.replace(launch, variants=variants))
    cases = tuple(case for case in plan.cases if case.id in ids)
    return dataclasses.replace(plan, cases=cases, launches=tuple(launches))


if __name__ == "__main__":
    real_process() if "--real" in sys.argv else main()
