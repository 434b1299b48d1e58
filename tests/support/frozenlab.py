"""Bundles in memory for tests of the frozen runtime: planned from real calls, with code for the fake GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fakegpu
import pytest

from kernelbake import digest, fingerprint, freeze, host, profiles, triton_api
from kernelbake.bundle import Entry
from kernelbake.keys import Case
from kernelbake.plan import Choice, Launch, Plan, collect
from kernelbake.recorder import Observer

PROFILE = profiles.load("h200")


@dataclasses.dataclass
class Call:
    """A call as a workload makes it."""

    launchable: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    case: str = "size=64"


def call(launchable: Any, *args: Any, case: str = "size=64", **kwargs: Any) -> Call:
    return Call(launchable, args, kwargs, case)


@dataclasses.dataclass
class FakeBundle:
    """What ``freeze`` reads of a bundle."""

    name: str
    digest: str
    made: str
    fingerprint: fingerprint.Fingerprint
    plan: Plan
    choices: tuple[Choice, ...]
    entries: Mapping[str, Entry]
    libs: Mapping[str, bytes]


def plan_of(calls: Sequence[Call], profile: profiles.DeviceProfile = PROFILE) -> Plan:
    """The plan of a workload that makes these calls."""
    observer = Observer(triton_api.gpu_target(90))
    launches = collect(
        (one.case, observer.observe(one.launchable, one.args, {"grid": (1,), **one.kwargs})) for one in calls
    )
    kernels = triton_api.facts_of(launches)
    cases = tuple(dict.fromkeys(one.case for one in calls))
    axes = tuple(Case(tuple((n, int(v)) for n, v in (part.split("=") for part in case.split()))) for case in cases)
    return Plan(profile.to_json(), {}, {}, axes, (), kernels, launches)


def bake(
    calls: Sequence[Call], *, winner: Callable[[Launch], int] = lambda launch: -1, interpreted: bool = False
) -> FakeBundle:
    """A bundle for these calls; the last candidate wins unless told otherwise."""
    profile = profiles.load("interpreter") if interpreted else PROFILE
    plan = plan_of(calls, profile)
    entries: dict[str, Entry] = {}
    choices = []
    for launch in plan.launches:
        index = winner(launch) % len(launch.candidates)
        held: dict[str, str | None] = {}
        for variant in launch.variants:
            wanted = variant.specializations[index]
            if interpreted:
                held[wanted.token] = None
                continue
            entry = entry_for(launch, wanted)
            entries[entry.digest] = entry
            held[wanted.token] = entry.digest
        choices.append(Choice(launch.kernel, launch.key, launch.candidates[index], held))
    found = host.fingerprint(profile, plan.kernels.values(), build=False)
    identity = digest.of_text(repr([choice.to_json() for choice in choices]))
    made = "interpreted" if interpreted else "measured"
    return FakeBundle("lab", identity, made, found, plan, tuple(choices), entries, {})


def resolved(name: str, profile: profiles.DeviceProfile) -> dict[str, Any]:
    """A resolved manifest for a bundle that no manifest asked for."""
    workload = {"plugin": "lab", "section": {}}
    compile_ = {"line_info": False, "fp_fusion": True}
    return {
        "format": 1,
        "name": name,
        "gpu": profile.to_json(),
        "workload": workload,
        "measure": {},
        "compile": compile_,
    }


def entry_for(launch: Launch, wanted: Any) -> Entry:
    """An entry whose code runs on the fake GPU."""
    name = launch.kernel.qualname
    declared = {facts["name"] for facts in _facts(launch) if facts["constexpr"]}
    constants = {p.name: triton_api.from_value(p.key) for p in wanted.parameters if p.name in declared}
    warps = dict(wanted.options).get("num_warps", 4)
    return Entry(launch.kernel, wanted, fakegpu.metadata(name, num_warps=warps), fakegpu.code(name, constants))


def _facts(launch: Launch) -> list[dict[str, Any]]:
    function = triton_api.compiled_function(triton_api.find(launch.kernel))
    return list(triton_api.parameter_facts(function))


@contextlib.contextmanager
def frozen(
    bundle: FakeBundle,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: Sequence[int] | None = None,
    profile_of: Callable[[int], profiles.DeviceProfile] = lambda device: PROFILE,
) -> Iterator[freeze.Frozen]:
    """Freezes onto a bundle, on a machine with the fake GPU."""
    monkeypatch.setattr(host, "running_profile", profile_of)
    with freeze.freeze(bundle, devices) as handle:  # type: ignore[arg-type]
        yield handle
