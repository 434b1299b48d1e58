"""The whole build with real kernels, run by Triton's interpreter: plan, tune in line, choose, pack, self-check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toykernels
import toyworkload

from kernelbake import build, bundle, host, numerics, planner, profiles
from kernelbake.build import Options
from kernelbake.choose import Difference
from kernelbake.devices import CpuDevice
from kernelbake.errors import BuildError
from kernelbake.keys import Config, Kernel
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.numerics import Arguments, Result, compare, extents_of
from kernelbake.plan import Launch
from kernelbake.progress import BuildResult, Event

SUPPORT = Path(toyworkload.__file__).parent
POLICY = MeasurePolicy(warmup_ms=0.0, samples_ms=1.0, min_samples=2, max_samples=3, rounds=1, max_extra_rounds=1)


@pytest.fixture(autouse=True)
def _path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def _build(
    output: Path,
    kernels: list[str],
    *,
    sizes: tuple[int, ...] = (100, 128),
    plugin: str = "toyworkload:WORKLOAD",
    whole: bool = False,
) -> tuple[BuildResult, list[Event]]:
    """Builds with the real plan; plan and fingerprint are made here, to spare a process, unless ``whole``."""
    manifest = Manifest(
        format=1,
        name="toy",
        profile=profiles.load("interpreter"),
        plugin=plugin,
        section={"sizes": list(sizes), "kernels": kernels},
        measure=POLICY,
        compile=CompileOptions(),
        text=b"name: toy\n",
        source="toy.yaml",
    )
    events: list[Event] = []
    if whole:
        return build.build(manifest, output, on_event=events.append), events
    plan = planner.plan(plugin, manifest.section, manifest.profile, interpreted=True)
    fingerprint = host.fingerprint(manifest.profile, plan.kernels.values(), build=True)
    return build.run(manifest, output, Options(plan=plan, fingerprint=fingerprint), events.append), events


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[bundle.Bundle, list[Event]]:
    output = tmp_path_factory.mktemp("built") / "bundle.tar"
    kernels = ["scale", "shift", "accumulate", "wrong_at_128", "strays_at_64", "leaves_gaps_at_64"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(SUPPORT))
        _, events = _build(output, kernels, sizes=(100,), whole=True)
    return bundle.read(output), events


def _fates(held: bundle.Bundle, kernel: str) -> dict[int, dict[str, Any]]:
    return {
        dict(line["config"]["meta"])["BLOCK"]: line for line in held.record if line["kernel"] == f"toykernels:{kernel}"
    }


def test_every_planned_launch_is_decided(built: tuple[bundle.Bundle, list[Event]]) -> None:
    held, events = built
    assert held.made == "interpreted"
    assert {choice.id for choice in held.choices} == {launch.id for launch in held.plan.launches}
    assert all(value is None for choice in held.choices for value in choice.entries.values())
    assert [event.done for event in events if event.kind == "progress" and event.phase == "measure"][-1] == 7


def test_a_wrong_candidate_is_outvoted(built: tuple[bundle.Bundle, list[Event]]) -> None:
    fates = _fates(built[0], "wrong_at_128")
    assert {block: line["outcome"] for block, line in fates.items()} == {
        16: "ok",
        32: "ok",
        64: "ok",
        128: "wrong-result",
    }
    assert fates[128]["error"] == pytest.approx(1.0)
    assert "`y` is off by 1.00e+00 of its norm" in fates[128]["detail"]


def test_a_candidate_that_writes_past_its_output_is_rejected(built: tuple[bundle.Bundle, list[Event]]) -> None:
    fates = _fates(built[0], "strays_at_64")
    assert (fates[64]["outcome"], fates[64]["detail"]) == ("wrong-result", "it writes outside of its arguments")
    assert fates[16]["outcome"] == fates[32]["outcome"] == "ok"


def test_a_candidate_that_leaves_elements_unwritten_is_rejected(built: tuple[bundle.Bundle, list[Event]]) -> None:
    """The output holds the right values before the launch, in all but its first element, so that only poison tells."""
    fates = _fates(built[0], "leaves_gaps_at_64")
    detail = "leaves 50 of 100 elements of `y` unwritten"
    assert (fates[64]["outcome"], fates[64]["detail"]) == ("wrong-result", detail)


def test_poison_tells_even_where_nothing_changes(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    _build(output, ["repeats_itself"], sizes=(100,))
    assert (
        _fates(bundle.read(output), "leaves_gaps_at_64")[64]["detail"] == "leaves 50 of 100 elements of `y` unwritten"
    )


def test_an_absent_and_a_present_argument_are_both_baked(built: tuple[bundle.Bundle, list[Event]]) -> None:
    keys = [choice.key for choice in built[0].choices if choice.kernel.qualname == "accumulate"]
    assert sorted(len(key.dtypes) for key in keys if key is not None) == [2, 3]


def test_what_accumulates_is_restored_between_runs(built: tuple[bundle.Bundle, list[Event]]) -> None:
    fates = _fates(built[0], "accumulate")
    assert {line["outcome"] for line in fates.values()} == {"ok"}
    assert {line["error"] for line in fates.values()} == {0.0}


def test_a_launch_outside_the_plan_fails_the_build_by_name(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the step launches what the plan does not hold") as caught:
        _build(tmp_path / "bundle.tar", ["scale"], plugin="toyworkload:SURPRISING")
    assert caught.value.exit_code == 6
    names = [reason.split()[0] for reason in caught.value.reasons]
    assert names == ["toykernels.scale", "toykernels.shift"], "all of them, not only the first"
    assert not (tmp_path / "bundle.tar").exists()


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the step failed with `ZeroDivisionError`") as caught:
        _build(tmp_path / "bundle.tar", ["scale"], plugin="toyworkload:FAILING")
    assert any("division" in reason for reason in caught.value.reasons)


def test_the_trainers_tensors_are_untouched_and_the_winner_runs_on_them(tmp_path: Path) -> None:
    """The plug-in itself asserts what it sees around each launch."""
    result, _ = _build(tmp_path / "bundle.tar", ["shift", "accumulate"], plugin="toyworkload:WATCHFUL")
    assert result.made == "interpreted"


def test_an_oracle_overrules_the_majority(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar"
    _build(output, ["mostly_wrong"], sizes=(64,), plugin="toyworkload:KNOWING")
    fates = _fates(bundle.read(output), "mostly_wrong")
    assert {block: line["outcome"] for block, line in fates.items()} == {
        16: "ok",
        32: "wrong-result",
        64: "wrong-result",
    }


# ---------------------------------------------------------------------------------------------- comparing


def test_the_norm_does_not_hide_a_wrong_tile() -> None:
    wanted = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    found = wanted.clone()
    found[7, :16] += 1.0
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 0.01
    assert not compare(found, wanted, 0.01, "out").agrees


def test_rounding_is_no_error() -> None:
    wanted = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    assert compare(wanted.bfloat16(), wanted.bfloat16(), 0.02, "out") == Difference(0.0)
    found = compare(wanted.bfloat16().float(), wanted, 0.02, "out")
    assert found.agrees
    assert 1e-3 < found.error < 3e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_element_that_is_not_finite_is_an_error(value: float) -> None:
    wanted = torch.ones(100)
    found = wanted.clone()
    found[3] = value
    assert compare(found, wanted, 0.02, "out").detail == "1 elements of `out` are finite in one and not in the other"
    assert compare(found, found.clone(), 0.02, "out").agrees


@pytest.mark.parametrize("spoiled", [None, float("inf"), 3.0])
@pytest.mark.parametrize("chunk", [1 << 24, 100, 64, 7])
def test_a_large_tensor_is_compared_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, chunk: int, spoiled: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(1000, generator=generator)
    found = wanted + 1e-4 * torch.randn(1000, generator=generator)
    wanted[7] = found[7] = float("nan")
    if spoiled is not None:
        found[503] = spoiled
    whole = numerics._measured(found, wanted)
    monkeypatch.setattr(numerics, "_CHUNK", chunk)
    assert numerics._measured(found, wanted) == pytest.approx(whole, rel=1e-6)
    assert whole[3] == (spoiled == float("inf"))


def test_nothing_is_as_nothing() -> None:
    assert compare(torch.empty(0, 4).bfloat16(), torch.empty(0, 4), 0.02, "out") == Difference(0.0)


def test_integers_must_be_equal() -> None:
    wanted = torch.arange(10)
    found = wanted.clone()
    found[0] = 5
    assert compare(found, wanted, 0.9, "out").detail == "1 elements of `out` differ"


def test_views_of_one_storage_share_a_copy() -> None:
    base = torch.randn(8, 12)
    q, k = base[:, :4], base[:, 4:8]
    other = torch.randn(5)
    assert [(end - start) for _, start, end in extents_of([q, k, other])] == [(7 * 12 + 8) * 4, 20]
    arguments = Arguments(["q", "k", "o"], [q, k, other], 0.02)
    copy = arguments.replaced(q)
    assert copy.stride() == q.stride()
    assert copy.data_ptr() % 16 == q.data_ptr() % 16
    copy.fill_(3.0)
    assert arguments.changed() == [0]
    assert not arguments.strayed()
    assert bool((q != 3.0).all()), "the trainer's tensor is as it was"


def test_a_write_between_the_rows_of_a_view_is_seen() -> None:
    base = torch.zeros(8, 12)
    view = base[:, :4]
    arguments = Arguments(["x"], [view], 0.02)
    copy = arguments.replaced(view)
    torch.as_strided(copy, (8, 12), (12, 1), copy.storage_offset())[:7, 6] = 1.0
    assert arguments.strayed()


class _SmallDevice(CpuDevice):
    def free_bytes(self) -> int | None:
        return 10_000


def test_too_little_memory_is_refused_with_numbers() -> None:
    from kernelbake.livesite import check_room

    kernel = Kernel("toykernels", "shift")
    launch = Launch(kernel, None, (Config(),), ())
    check_room(launch, [1, 2.0, None], _SmallDevice())
    needed = 3 * Arguments.bytes_needed([torch.zeros(1000)])
    with pytest.raises(BuildError, match=f"needs {needed} bytes for copies of its arguments; the GPU has 10000 free"):
        check_room(launch, [torch.zeros(1000)], _SmallDevice())


def test_expanded_and_empty_arguments_are_copied() -> None:
    expanded, empty = torch.ones(1, 4).expand(3, 4), torch.empty(0, 4)
    arguments = Arguments(["x", "e"], [expanded, empty], 0.02)
    assert arguments.replaced(expanded).tolist() == expanded.tolist()
    assert arguments.replaced(empty).shape == (0, 4)
    assert arguments.changed() == []


def test_two_results_with_different_gaps_differ() -> None:
    x = torch.zeros(6)
    arguments = Arguments(["x"], [x], 0.02)
    copy = arguments.replaced(x)

    def run(stop: int) -> Result:
        arguments.restore()
        copy[:stop] = 1.0
        changed = arguments.changed()
        plain = arguments.contents(changed)
        filled = arguments.poison(changed)
        copy[:stop] = 1.0
        poisoned = arguments.contents(filled)
        arguments.unpoison(filled)
        return Result(plain, poisoned)

    whole, part = run(6), run(4)
    assert "element" in arguments.difference(part, whole).detail
    assert arguments.difference(whole, run(6)) == Difference(0.0)


def test_an_unused_kernel_module_is_the_interpreters() -> None:
    """The tests here mean something only if kernels really are interpreted."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert type(toykernels.shift).__name__ == "InterpretedFunction"
