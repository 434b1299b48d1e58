"""The preflight: what a run needs and its bundle lacks, told before a weight is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import samples

from kernelbake import bundle, freeze, inspect, levels, planner, profiles, rebench
from kernelbake.errors import BundleError, CoverageError, ExitCode, MisfitError
from kernelbake.keys import Case
from kernelbake.plan import Plan
from kernelbake.preflight import preflight, workload_of
from kernelbake.workload import Footprint, PartPeak

SECTION = {"target": "toy", "axes": {"buckets": [512, 1024]}}
FOOTPRINT = Footprint(Case((("bucket", 512),)), (PartPeak("target", 0, 3), PartPeak("drafter", 2, 7)))
VERSIONS = {"python": "3.11.7", "triton": "3.7.1"}


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A bundle and the plan that it was built from."""
    made = samples.contents()
    resolved = {**made.manifest_resolved, "workload": {"plugin": "toy", "section": SECTION}}
    plan = dataclasses.replace(made.plan, versions=VERSIONS)
    path = tmp_path_factory.mktemp("bundle") / "bundle.tar"
    bundle.write(path, samples.changed(made, plan=plan, manifest_resolved=resolved))
    return path, plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the planning process; holds the plan to give, then the requests that were made of it."""
    box: list[Any] = []

    class Child:
        footprints = (FOOTPRINT,)

        def plan(self, plugin: str, section: Any, profile: Any, **options: Any) -> Plan:
            found: Plan = box.pop(0)
            box.append({"plugin": plugin, "section": section, "profile": profile, "interpreted": started.interpreted})
            return found

    @contextlib.contextmanager
    def started(*, interpreted: bool) -> Iterator[Child]:
        started.interpreted = interpreted  # type: ignore[attr-defined]
        yield Child()

    monkeypatch.setattr(planner, "started", started)
    return box


def test_a_bundle_says_what_it_was_made_for(baked: tuple[Path, Plan]) -> None:
    found = workload_of(baked[0])
    assert (found.plugin, found.section, found.name, found.made) == ("toy", SECTION, "sample", "measured")
    assert found.profile == profiles.load("h200")
    assert found.digest == bundle.read(baked[0]).digest


def test_the_bundles_own_run_is_covered(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    path, plan = baked
    planned.append(plan)
    found = preflight(path)
    assert found.coverage.complete
    assert found.coverage.num_needed == len(plan.launches)
    assert found.new_cases == ()
    assert found.footprints == (FOOTPRINT,)
    assert planned == [{"plugin": "toy", "section": SECTION, "profile": profiles.load("h200"), "interpreted": False}]


def test_the_runs_own_section_is_planned(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    planned.append(baked[1])
    preflight(baked[0], {"target": "other"})
    assert planned[0]["section"] == {"target": "other"}


def test_a_new_case_that_is_covered_entirely_runs_and_is_named(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    path, plan = baked
    case = Case((("bucket", 640), ("batch", 1)))
    first = plan.launches[0]
    variants = tuple(dataclasses.replace(variant, cases=(case.id,)) for variant in first.variants)
    planned.append(dataclasses.replace(plan, cases=(case,), launches=(dataclasses.replace(first, variants=variants),)))
    assert preflight(path).new_cases == ("bucket=640 batch=1",)


def test_every_gap_is_listed_with_its_case_and_the_nearest_entry(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    path, plan = baked
    case = Case((("bucket", 8192), ("batch", 1)))
    kernels = {launch.kernel.name: launch.kernel for launch in plan.launches}
    launches = tuple(samples.launch(kernel, 8192, case.id) for kernel in kernels.values())
    planned.append(dataclasses.replace(plan, cases=(*plan.cases, case), launches=(*plan.launches, *launches)))
    with pytest.raises(CoverageError) as caught:
        preflight(path)
    error = caught.value
    assert error.exit_code is ExitCode.MISS == 5
    assert error.message == "preflight: bundle `sample` lacks 2 things that 1 of 3 cases needs; wanted all"
    assert len(error.reasons) == 2
    for name, reason in zip(kernels, error.reasons, strict=True):
        assert reason.startswith(f"key {name}: n=8192 ")
        assert "needed by bucket=8192 batch=1" in reason
        assert "nearest in the bundle differs in n: needed `8192`; bundle: `" in reason


def test_a_bundle_without_measurements_says_so_before_anything_is_planned(
    baked: tuple[Path, Plan], planned: list[Any], tmp_path: Path
) -> None:
    made = samples.contents(made="compiled-only")
    path = tmp_path / "compiled.tar"
    bundle.write(path, made)
    with pytest.raises(CoverageError, match="preflight: bundle `sample` holds code for every") as caught:
        preflight(path)
    assert not caught.value.reasons
    assert "--from BUNDLE" in str(caught.value)
    with pytest.raises(CoverageError, match="coverage: bundle `sample` holds code for every candidate and no choice"):
        inspect.covered_inside(bundle.read(path)).refuse("coverage")


@pytest.mark.parametrize(
    "use",
    [
        preflight,
        lambda path: inspect.covered_inside(bundle.read(path)).refuse("coverage"),
        lambda path: inspect.explain(path, "kernel0"),
        lambda path: inspect.show(path, kernel="kernel0"),
        lambda path: rebench.rebench(bundle.read(path), 1),
        freeze.freeze,
        lambda path: freeze.freeze(bundle.read(path)),
    ],
    ids=["preflight", "coverage", "explain", "show", "rebench", "freeze", "freeze-read"],
)
def test_a_bundle_without_measurements_is_a_gap_by_every_way_in(tmp_path: Path, use: Callable[[Path], object]) -> None:
    """Not a misfit: the bundle is for this GPU, and what it lacks is every choice."""
    path = tmp_path / "compiled.tar"
    made = samples.contents(made="compiled-only")
    bundle.write(path, dataclasses.replace(made, choices=(), record=()))
    with pytest.raises(CoverageError, match="bundle `sample` holds code for every candidate and no choice") as caught:
        use(path)
    assert caught.value.exit_code == 5
    assert caught.value.hint == "measure it on the GPU: `kernelbake build --manifest FILE --from BUNDLE`"


@pytest.mark.parametrize("request_", [levels.Request(on_device=True), levels.Request(rebench=1), levels.Request()])
def test_every_level_of_a_verification_says_so_too(tmp_path: Path, request_: levels.Request) -> None:
    path = tmp_path / "compiled.tar"
    bundle.write(path, samples.contents(made="compiled-only"))
    report = levels.verify(path, dataclasses.replace(request_, gpu_target="h200"))
    assert {refusal.exit_code for refusal in report.refusals} == {5}
    names = {"coverage"} | ({"device"} if request_.on_device else set()) | ({"rebench"} if request_.rebench else set())
    assert {level.name for level in report.levels if level.error is not None} == names


def test_another_implementation_is_a_gap(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    planned.append(dataclasses.replace(baked[1], implementations={"conv": "torch"}))
    with pytest.raises(CoverageError) as caught:
        preflight(baked[0])
    assert caught.value.reasons == ("implementation conv: `torch`; bundle: `triton`",)


def test_another_triton_and_other_sources_do_not_fit(baked: tuple[Path, Plan], planned: list[Any]) -> None:
    path, plan = baked
    name = plan.launches[0].kernel.name
    edited = dataclasses.replace(plan.kernels[name], source_digest="sha256:" + "ee" * 32)
    planned.append(
        dataclasses.replace(
            plan, versions={**VERSIONS, "triton": "3.9.0"}, kernels={**plan.kernels, name: edited}, launches=()
        )
    )
    with pytest.raises(MisfitError) as caught:
        preflight(path)
    assert caught.value.exit_code is ExitCode.MISFIT == 4
    assert caught.value.reasons[0] == "triton.version: here `3.9.0`; bundle: `3.7.1`"
    assert caught.value.reasons[1].startswith(f"source {name}: source `sha256:eeee")


def test_a_damaged_bundle_is_refused_although_the_plan_would_fit(
    baked: tuple[Path, Plan], planned: list[Any], tmp_path: Path
) -> None:
    path, plan = baked
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(data)
    planned.append(plan)
    with pytest.raises(BundleError):
        preflight(damaged)
