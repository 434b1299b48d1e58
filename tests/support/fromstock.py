"""A bundle of what stock Triton tuned and compiled in this process, so that both sides launch the same code.

The workload runs under stock Triton, which may take a minute; every launch is noted with the kernel that it ran. For
benchmarks and tests of the launch path; a build measures differently, and better.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frozenlab

from kernelbake import bundle as bundles
from kernelbake import digest, host, triton_api
from kernelbake.bundle import Contents, Entry
from kernelbake.keys import Case, Config, Specialization
from kernelbake.plan import Choice, Launch, Plan, collect
from kernelbake.recorder import Observer, intercepted


class Taken:
    """What was launched while a workload ran under stock Triton.

    Attributes:
        calls: for each kernel name, one call of it: the object, positional and keyword arguments.
    """

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
        self.libs: dict[str, bytes] = {}
        self._observer = Observer(triton_api.gpu_target(host.running_profile().arch))
        self._seen: list[tuple[str, Launch]] = []
        self._code: dict[tuple[str, str], Any] = {}
        self._winners: dict[tuple[str, str], Config] = {}

    def run(self, case: str, step: Callable[[], Any]) -> None:
        """Runs one case and takes down what it launches."""

        def on_call(original: Any, launchable: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            outermost = triton_api.find(triton_api.kernel_of(launchable))
            kernel = original(launchable, *args, **kwargs)
            if launchable is outermost:
                self._take(case, launchable, args, kwargs, kernel)
            return kernel

        with intercepted(on_call):
            step()

    def _take(self, case: str, launchable: Any, args: Any, kwargs: dict[str, Any], kernel: Any) -> None:
        launch = self._observer.observe(launchable, args, kwargs)
        self.calls.setdefault(launch.kernel.name, (launchable, args, dict(kwargs)))
        self._seen.append((case, launch))
        winner = launch.candidates[0]
        if launch.key is not None:
            winner = triton_api.config_of(triton_api.autotuner_of(launchable).best_config)
        self._winners[launch.id] = winner
        [variant] = launch.variants
        wanted = variant.specializations[launch.candidates.index(winner)]
        self._code.setdefault((launch.kernel.name, wanted.token), (launchable, kernel))

    def _entry(self, launch: Launch, wanted: Specialization) -> Entry:
        launchable, kernel = self._code[launch.kernel.name, wanted.token]
        facts = json.loads(json.dumps(kernel.metadata._asdict(), default=vars))
        facts["extern_libs"] = [[name, Path(path).name] for name, path in facts.get("extern_libs") or []]
        source = triton_api.launcher_source(launchable, wanted, facts)
        launcher = None
        if source is not None:
            if source not in self._launchers:
                self._launchers[source] = self._library(triton_api.LAUNCHER, source)
            launcher = self._launchers[source]
        return Entry(launch.kernel, wanted, facts, bytes(kernel.kernel), launcher)

    def _library(self, name: str, source: str) -> str:
        content = triton_api.build_library(name, source)
        self.libs[digest.of_bytes(content)] = content
        return digest.of_bytes(content)

    def write(self, path: Path, name: str = "stock") -> bundles.Bundle:
        """Writes the bundle, and reads it back as a run would."""
        self._launchers: dict[str, str] = {}
        self._library(triton_api.UTILITIES, triton_api.utilities_source())
        launches = collect(self._seen)
        profile = host.running_profile()
        kernels = triton_api.facts_of(launches)
        cases = dict.fromkeys(case for case, _ in self._seen)
        axes = tuple(Case(tuple((n, int(v)) for n, v in (part.split("=") for part in case.split()))) for case in cases)
        plan = Plan(profile.to_json(), {}, {}, axes, (), kernels, launches)
        entries: dict[str, Entry] = {}
        choices = []
        for launch in launches:
            winner = self._winners[launch.id]
            held = {}
            for variant in launch.variants:
                wanted = variant.specializations[launch.candidates.index(winner)]
                entry = self._entry(launch, wanted)
                entries[entry.digest] = entry
                held[wanted.token] = entry.digest
            choices.append(Choice(launch.kernel, launch.key, winner, held))
        record = tuple(
            {
                "kernel": choice.kernel.to_json(),
                "key": choice.key.to_json() if choice.key else None,
                "config": choice.winner.to_json(),
                "outcome": "ok",
                "samples_ms": [1.0],
            }
            for choice in choices
        )
        found = host.fingerprint(profile, kernels.values(), build=True)
        text, resolved = f"format: 1\nname: {name}\n".encode(), frozenlab.resolved(name, profile)
        decided = tuple(choices)
        bundles.write(
            path, Contents(name, "measured", text, resolved, found, plan, decided, record, entries, self.libs)
        )
        return bundles.read(path)
