"""What a shadow run records of a launch: key, candidates and every class of arguments; and what it refuses."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelbake import planner, profiles, triton_api
from kernelbake.errors import InputError, PlanError
from kernelbake.plan import Launch, Plan

SUPPORT = Path(__file__).parents[1] / "support"
SCENARIOS = (
    *("numbers", "addresses", "marks", "unaligned_marks", "kinds", "heuristics", "pruning", "keys", "options"),
    *("hooks", "restoring", "functions", "prints"),
)


def plan_scenarios(*names: str, profile: str = "h200") -> Plan:
    device = profiles.load(profile)
    return planner.plan(
        "shadowworkload:WORKLOAD",
        {"scenarios": names},
        device,
        interpreted=device.backend == "interpreter",
        paths=[SUPPORT],
    )


@pytest.fixture(scope="module")
def compiled() -> Plan:
    return plan_scenarios(*SCENARIOS)


@pytest.fixture(scope="module")
def interpreted() -> Plan:
    return plan_scenarios(*SCENARIOS, profile="interpreter")


@pytest.fixture(params=["compiled", "interpreted"])
def plan(request: pytest.FixtureRequest) -> Plan:
    """The same scenarios for a GPU and for Triton's interpreter: what is recorded must not differ."""
    found: Plan = request.getfixturevalue(request.param)
    return found


def launches(plan: Plan, kernel: str) -> list[Launch]:
    return [launch for launch in plan.launches if launch.kernel.qualname == kernel]


def classes(plan: Plan, kernel: str, scenario: str) -> set[str]:
    """Every class of arguments with which a scenario launches a kernel, for the first candidate."""
    return {
        str(variant.specializations[0])
        for launch in launches(plan, kernel)
        for variant in launch.variants
        if f"scenario={scenario}" in variant.cases
    }


def blocks(launch: Launch) -> list[Any]:
    return [dict(candidate.meta)["BLOCK"] for candidate in launch.candidates]


def test_one_number_has_five_classes(plan: Plan) -> None:
    assert classes(plan, "plain", "numbers") == {
        f"x:*fp32%D y:*fp32%D {n} stride:i32 BLOCK=32" for n in ("n=1", "n:i32", "n:i32%D", "n:i64%D")
    }


def test_views_have_the_alignment_of_where_they_start(plan: Plan) -> None:
    assert classes(plan, "plain", "addresses") == {
        "x:*bf16%D y:*fp32%D n:i32 stride:i32 BLOCK=32",
        "x:*bf16 y:*fp32%D n:i32 stride:i32 BLOCK=32",
        "x:*bf16%D y:*fp32 n:i32 stride:i32 BLOCK=32",
    }


def test_what_is_specialized_on_is_observed_and_not_read_off_the_decorator(plan: Plan) -> None:
    """A constexpr marked ``do_not_specialize`` makes a binary for each value all the same."""
    assert classes(plan, "marked", "marks") == {"x:*fp32%D n:i32 SIZE=3", "x:*fp32%D n:i32 SIZE=5"}
    assert classes(plan, "unaligned", "unaligned_marks") == {"x:*fp32 n:i32"}


def test_arguments_that_are_no_tensors(plan: Plan) -> None:
    assert classes(plan, "optional", "kinds") == {
        "x:*fp32%D bias:*fp32%D scale:fp32 flag:u1 pair:('i32', 'i32')%('', 'D') n:i32",
        "x:*fp32%D bias=None scale:fp32 flag:u1 pair:('i32', 'i32')%('', 'D') n:i32",
        "x:*fp32%D bias=None scale:i32 flag:u1 pair:('constexpr', ('*fp32', 'i32'))%(1, ('D', '')) n:i32",
    }


def test_heuristics_are_asked_for_every_candidate(plan: Plan) -> None:
    by_n = {dict(launch.key.values)["n"]: launch for launch in launches(plan, "heuristics_inside") if launch.key}
    even = {
        n: [{p.name: p.key for p in item.parameters}["EVEN"] for item in launch.variants[0].specializations]
        for n, launch in by_n.items()
    }
    assert even == {64: [True, True, False], 96: [True, False, False]}
    assert by_n[96].variants[0].grids == ((3,),)


def test_heuristics_around_the_autotuner_stand_in_the_key(plan: Plan) -> None:
    keys = [str(launch.key) for launch in launches(plan, "heuristics_outside")]
    assert keys == ["B=64 HAS_BIAS=True [x:float32,bias:float32]", "B=64 HAS_BIAS=False [x:float32]"]


def test_only_candidates_that_pruning_leaves_are_planned(plan: Plan) -> None:
    pruned = {dict(launch.key.values)["n"]: blocks(launch) for launch in launches(plan, "pruned") if launch.key}
    assert pruned == {64: [16, 32, 64], 16: [16]}
    [modelled] = launches(plan, "modelled")
    assert blocks(modelled) == [128, 64]


def test_keys_keep_types_and_the_order_of_the_call(plan: Plan) -> None:
    """Triton's own key makes ``True`` and 1 one, and tells positional from keyword arguments only by their order."""
    assert {str(launch.key) for launch in launches(plan, "keyed")} == {
        "n=8 [x:float32,y:float16]",
        "n=8 [y:float16,x:float32]",
        "n=True [x:float32,y:float16]",
        "n=1 [x:float32,y:float16]",
    }


def test_a_single_config_is_no_choice(plan: Plan) -> None:
    [single] = launches(plan, "single")
    assert single.key is None
    assert str(single.candidates[0]) == "BLOCK=64 num_warps=8 num_stages=1 num_ctas=1"
    assert dict(single.variants[0].specializations[0].options) == {"num_ctas": 1, "num_stages": 1, "num_warps": 8}


def test_options_of_the_call_are_part_of_the_class(plan: Plan) -> None:
    [plain] = launches(plan, "plain")
    found = [
        (dict(variant.specializations[0].options), variant.grids)
        for variant in plain.variants
        if "scenario=options" in variant.cases
    ]
    assert ({"num_warps": 8}, ((2, 3),)) in found
    assert ({}, ((1,),)) in found


def test_absent_and_present_buffers_are_both_planned(plan: Plan) -> None:
    dtypes = [[name for name, _ in launch.key.dtypes] for launch in launches(plan, "restored") if launch.key]
    assert dtypes == [["x", "cache", "total"], ["x", "total"]]
    facts = plan.kernels["shadowkernels.restored"]
    assert (facts.hooks, facts.mutated) == (("reset_to_zero", "restore_value"), ("total", "cache"))


def test_device_functions_and_dtypes_are_constants_by_name(plan: Plan) -> None:
    assert classes(plan, "chosen", "functions") == {
        "x:*fp32%D n:i32 FUNCTION=shadowkernels:double DTYPE=fp32",
        "x:*fp32%D n:i32 FUNCTION=shadowkernels:triple DTYPE=fp32",
        "x:*fp32%D n:i32 FUNCTION=shadowkernels:double DTYPE=bf16",
    }


def test_the_source_of_a_function_given_as_a_value_is_held(plan: Plan) -> None:
    """Which functions callers give, no source of the kernel says."""
    given = {name for name in plan.kernels if name not in {launch.kernel.name for launch in plan.launches}}
    assert given == {"shadowkernels.double", "shadowkernels.triple"}


def test_the_interpreter_is_planned_as_the_compiler_is(compiled: Plan, interpreted: Plan) -> None:
    assert [launch.to_json() for launch in interpreted.launches] == [launch.to_json() for launch in compiled.launches]
    assert {name: facts.source_digest for name, facts in interpreted.kernels.items()} == {
        name: facts.source_digest for name, facts in compiled.kernels.items()
    }


def test_the_plan_says_where_it_holds(compiled: Plan) -> None:
    assert compiled.profile == profiles.load("h200").to_json()
    assert {"python", "torch", "triton", "fla", "transformers"} <= compiled.versions.keys()
    assert compiled.implementations["toy"] == "triton"
    assert compiled.implementations["package flash_qla"] in ("absent", "importable")


@pytest.fixture(scope="module")
def checks() -> Any:
    """Outcomes of ``shadowchecks``, which needs a process of its own."""
    environment = {**planner.environment(os.environ, interpreted=False)}
    done = subprocess.run(
        [sys.executable, "shadowchecks.py"], cwd=SUPPORT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name",
    [
        *("the_device_answers_from_the_profile", "streams_and_events_do_nothing", "a_fake_device_times_nothing"),
        *("tensors_stay_where_they_are", "tensors_move", "modules_move_in_place", "a_training_step_runs_through"),
        *("autocast_casts_as_on_a_gpu_forward_and_backward", "integers_are_followed", "content_lives_in_the_storage"),
        *("an_unknown_value_is_asked_for_in_vain", "draws_are_known_from_a_generator_on_the_host"),
        *("a_known_mask_selects_from_the_unknown", "large_tensors_cost_nothing"),
        *("modules_and_states_are_copied", "routing_of_experts_is_planned"),
        *("stand_ins_have_the_tensors_alignment", "equal_layouts_are_remembered_and_right"),
        *("storages_are_counted_while_they_live", "what_a_step_leaves_behind_is_not_its_own"),
        *("a_part_tells_what_it_allocates_and_frees_again", "a_graph_holds_what_a_backward_pass_needs"),
        "a_norm_keeps_its_input_and_a_number_a_row",
        "what_an_operation_is_made_of_is_not_counted",
    ],
)
def test_fake_tensors(checks: Any, name: str) -> None:
    outcome = checks["checks"].pop(name)
    assert outcome == "ok", outcome


def test_every_check_was_asked_about(checks: Any) -> None:
    assert not checks["checks"]


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("numpy_number", "kernel `shadowkernels.plain`: `np.int64(32)` of type `int64` cannot stand in a key"),
        ("numpy_number", "argument `BLOCK` is a `numpy.int64`"),
        ("torch_dtype", "argument `DTYPE` is a `torch.dtype`"),
        ("descriptor", "argument `x` is a `TensorDescriptor`; wanted a tensor"),
        ("assertions", "kernel `shadowkernels.plain`: `debug` is on, for which Triton makes code with assertions"),
        ("local_kernel", "kernel `shadowworkload.local_kernel.<locals>.inner`: not found"),
        ("replaced_kernel", "kernel `shadowkernels.plain`: the launched object is not the one of that name"),
        ("compiled_by_torch", "hint: `torch.compile` makes kernels of its own, which no plan can hold"),
        ("reads_a_loss", "needs the content of a tensor of shape () and dtype `torch.float32`"),
        ("reads_a_loss", "shadowworkload.py:"),
        ("reads_a_loss", "hint: let the step read no result"),
        ("values", "`tolist` needs the content of a tensor of shape (8,) and dtype `torch.int64`"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(checks: Any, scenario: str, wanted: str) -> None:
    assert wanted in checks["refusals"][scenario]


def test_a_library_that_ends_the_process_is_reported() -> None:
    with pytest.raises(PlanError, match="ended with status 77") as caught:
        plan_scenarios("dies")
    assert caught.value.reasons[-1] == "fatal: a library ended the process"


def test_the_process_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from kernelbake import planner, profiles; "
        "planner.plan('shadowworkload:WORKLOAD', {'scenarios': ['waits']}, profiles.load('h200'), interpreted=False, "
        f"paths=[{str(SUPPORT)!r}])"
    )
    file = tmp_path / "pid"
    environment = {**planner.environment(os.environ, interpreted=False), "SCENARIO_FILE": str(file)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        try:
            _wait_until(file.exists)
        finally:
            parent.kill()
    child = int(file.read_text())
    _wait_until(lambda: not _runs(child))


def _wait_until(holds: Callable[[], bool], limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"it did not happen within {limit_s} s"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_workload_that_is_not_there_is_an_input_error() -> None:
    with pytest.raises(InputError, match="workload: `nothing` is not installed"):
        planner.plan("nothing", {}, profiles.load("h200"), interpreted=False)


def test_an_edited_callee_changes_the_source_digest(tmp_path: Path) -> None:
    """Also where the callee is picked by a compile-time string, which the kernel's own source does not show."""
    module = """
        import triton
        import triton.language as tl

        @triton.jit
        def twice(x):
            return x * 2

        CHOICES = {"twice": twice}

        @triton.jit
        def kernel(x, NAME: tl.constexpr):
            tl.store(x, CHOICES[NAME](tl.load(x)))
    """
    workload = """
        from shadowworkload import WORKLOAD, scenario

        @scenario
        def edited(kernels, device):
            import torch
            from editedkernels import kernel

            kernel[(1,)](torch.empty(8, device=device), "twice")
    """
    (tmp_path / "editedworkload.py").write_text(textwrap.dedent(workload))
    digests = []
    for operator in ("*", "+"):
        (tmp_path / "editedkernels.py").write_text(textwrap.dedent(module).replace("x * 2", f"x {operator} 2"))
        found = planner.plan(
            "editedworkload:WORKLOAD",
            {"scenarios": ["edited"]},
            profiles.load("h200"),
            interpreted=False,
            paths=[tmp_path, SUPPORT],
        )
        digests.append(found.kernels["editedkernels.kernel"].source_digest)
    assert digests[0] != digests[1]


_USED = """
import triton
import triton.language as tl
from used_deeper import deeper

SCALE = tl.constexpr(3)
DTYPE = tl.float32
PAIR = (1, 2)

@triton.constexpr_function
def half(n):
    return deeper(n) // 2
"""
_DEEPER = """
import triton

@triton.constexpr_function
def deeper(n):
    return n + 1
"""
_KERNELS = """
import triton
import triton.language as tl
import {imported}

@triton.jit
def kernel(x):
    tl.store(x, {value})
"""


@pytest.mark.parametrize(
    ("imported", "value", "edited", "old", "new"),
    [
        ("used", "used.half(8)", "used", "// 2", "// 3"),
        ("used", "used.half(8)", "used_deeper", "n + 1", "n + 2"),
        ("used", "used.SCALE", "used", "constexpr(3)", "constexpr(4)"),
        ("used", "used.DTYPE(1)", "used", "float32", "bfloat16"),
        ("used", "used.PAIR[0]", "used", "(1, 2)", "(3, 2)"),
        ("package.used", "package.used.SCALE", "used", "constexpr(3)", "constexpr(4)"),
        ("package.used", "package.used.half(8)", "used", "// 2", "// 3"),
    ],
)
def test_whatever_a_kernel_names_belongs_to_its_source_digest(
    imported: str, value: str, edited: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that run at compile time, and constants, of other modules, also named through their module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sources = {
        "used_deeper.py": _DEEPER,
        f"{imported.replace('.', '/')}.py": _USED,
        "using.py": _KERNELS.format(imported=imported, value=value),
    }
    digests = []
    for text in (old, old, new):
        for name, source in sources.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source.replace(old, text) if Path(name).stem == edited else source)
        importlib.invalidate_caches()
        for name in ("used_deeper", "package", imported, "using"):
            sys.modules.pop(name, None)
        digests.append(triton_api.source_digest(importlib.import_module("using").kernel))
    assert digests[0] == digests[1] != digests[2]
