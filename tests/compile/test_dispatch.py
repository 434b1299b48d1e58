"""Every form of call: the frozen launch arrives at the device exactly as the stock one, or is refused as it should be.

Triton's own dispatch, launchers and binder run on a device that is made of Python; no code is compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import fakegpu
import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
import triton
import triton.language as tl
from frozenlab import Call, call
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernelbake import triton_api
from kernelbake.errors import FrozenMissError

X = torch.arange(256, dtype=torch.float32)
Y = torch.zeros(256)
BIAS = torch.ones(256)
HALF = torch.zeros(256, dtype=torch.bfloat16)


@pytest.fixture
def gpu() -> Iterator[fakegpu.FakeDriver]:
    with fakegpu.active(fakegpu.FakeDriver()) as driver:
        yield driver


def by_block(meta: dict[str, Any]) -> tuple[int, ...]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


FORMS: dict[str, tuple[Any, Call]] = {
    "function with options": ((4,), call(kernels.plain, X, Y, 64, BLOCK=64, num_warps=4)),
    "function by keyword": ((4,), call(kernels.plain, y=Y, n=64, x=X, BLOCK=32)),
    "function, constexpr by position": ((4,), call(kernels.plain, X, Y, 64, 32)),
    "function in place": ((1,), call(kernels.inplace, X, 1.5, 64, BLOCK=64)),
    "autotuner by position": ((4,), call(kernels.tuned, X, Y, 2.0, 64)),
    "autotuner by keyword": ((4,), call(kernels.tuned, x=X, y=Y, alpha=2.0, n=64)),
    "autotuner by keyword in another order": ((4,), call(kernels.tuned, n=64, alpha=2.0, y=Y, x=X)),
    "autotuner, mixed": ((4,), call(kernels.tuned, X, Y, n=64, alpha=2.0)),
    "another dtype": ((4,), call(kernels.tuned, HALF, Y, 2.0, 64)),
    "number that is one": ((4,), call(kernels.tuned, X, Y, 2.0, 1)),
    "number beyond 32 bits": ((4,), call(kernels.tuned, X, Y, 2.0, 1 << 40)),
    "whole number for a float": ((4,), call(kernels.tuned, X, Y, 2, 64)),
    "tensor off alignment": ((4,), call(kernels.tuned, X[1:], Y, 2.0, 64)),
    "grid as function": (by_block, call(kernels.tuned, X, Y, 2.0, 64)),
    "grid as list": ([2, 3], call(kernels.tuned, X, Y, 2.0, 64)),
    "grid of three": ((2, 3, 4), call(kernels.tuned, X, Y, 2.0, 64)),
    "grid as torch.Size": (torch.Size([2, 3]), call(kernels.tuned, X, Y, 2.0, 64)),
    "grid as partial": (functools.partial(by_block), call(kernels.tuned, X, Y, 2.0, 64)),
    "empty grid": ((0,), call(kernels.tuned, X, Y, 2.0, 64)),
    "one config": ((4,), call(kernels.one_config, X, 64)),
    "None and heuristics": (by_block, call(kernels.optional, X, Y, None, None, 64, D=3, FLAG=True)),
    "tensor and heuristics": (by_block, call(kernels.optional, X, Y, BIAS, 0.5, 64, D=3, FLAG=True)),
    "constexpr 1": ((1,), call(kernels.optional, X, Y, BIAS, 0.5, 64, D=1, FLAG=True)),
    "constexpr True": ((1,), call(kernels.optional, X, Y, BIAS, 0.5, 64, D=True, FLAG=True)),
    "constexpr 1.0": ((1,), call(kernels.optional, X, Y, BIAS, 0.5, 64, D=1.0, FLAG=True)),
    "heuristics around the autotuner": ((1,), call(kernels.outer_heuristic, X, None, 64)),
    "heuristics around the autotuner, tensor": ((1,), call(kernels.outer_heuristic, X, BIAS, 64)),
    "computed heuristic": ((1,), call(kernels.computed, X, Y, 64)),
    "computed heuristic, other value": ((1,), call(kernels.computed, X, Y, 129)),
    "config hook": ((1,), call(kernels.hooked, X, Y, 2.0, 64)),
    "restored and zeroed arguments": ((1,), call(kernels.restoring, X, Y, 2.0, 64)),
    "defaults": ((1,), call(kernels.defaults, X, 64)),
    "one default given": ((1,), call(kernels.defaults, X, 64, 3.0)),
    "tensor for a default": ((1,), call(kernels.defaults, X, 64, other=Y)),
    "unspecialized": ((1,), call(kernels.unspecialized, X, Y, 63, BLOCK=64)),
    "unspecialized, off alignment, one": ((1,), call(kernels.unspecialized, X[1:], Y, 1, BLOCK=64)),
    "annotated": ((1,), call(kernels.annotated, X, 64, 1.0, True, BLOCK=64)),
    "annotated, other values": ((1,), call(kernels.annotated, X, 1, 2.0, False, BLOCK=64)),
    "dtype as constexpr": ((1,), call(kernels.typed, X, 64, KIND=1, DTYPE=tl.float32, BLOCK=64)),
    "text as constexpr": ((1,), call(kernels.typed, X, 64, KIND="one", DTYPE=tl.bfloat16, BLOCK=64)),
    "function as constexpr": ((1,), call(kernels.called, X, 64, FUNCTION=kernels.twice, BLOCK=64)),
    "meta-parameter before an argument": ((1,), call(kernels.meta_first, X, n=64, value=1.0)),
    "function below its autotuner": (
        (1,),
        call(triton_api.innermost(kernels.tuned), X, Y, 2.0, 64, BLOCK=64, num_warps=4),
    ),
    "device memory as parameter": ((4,), call(kernels.tuned, torch.nn.Parameter(X.clone()), Y, 2.0, 64)),
}  # fmt: skip


def seen(driver: fakegpu.FakeDriver) -> list[fakegpu.Launched]:
    launched, driver.launched = driver.launched, []
    return launched


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("through", ["brackets", "run"])
def test_frozen_launches_as_stock(
    form: str, through: str, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, one = FORMS[form]

    def launch() -> tuple[Any, Any]:
        if through == "brackets":
            result = one.launchable[grid](*one.args, **one.kwargs)
        else:
            result = one.launchable.run(*one.args, grid=grid, warmup=False, **one.kwargs)
        return result, seen(gpu)[-1]

    monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **meta: [-config.kwargs["BLOCK"]] * 3)
    stock, stock_launch = launch()
    for level in triton_api.levels(one.launchable):
        getattr(level, "cache", {}).clear()
    with lab.frozen(lab.bake([one]), monkeypatch) as frozen:
        frozen_result, frozen_launch = launch()
        assert frozen.counters.hits == 1
    assert frozen_launch == stock_launch
    assert isinstance(frozen_result, type(stock).__mro__[1])
    assert frozen_result.metadata.name == stock.metadata.name


@pytest.mark.parametrize("form", FORMS)
def test_the_written_code_and_the_general_path_agree(
    form: str, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, one = FORMS[form]
    with lab.frozen(lab.bake([one]), monkeypatch) as frozen:
        kernel = frozen._dispatcher.kernels[triton_api.kernel_of(one.launchable).name]
        if kernel.fused is not None and "below" not in form:
            kernel.fused["kb_general"] = lambda *left: pytest.fail("a planned call was not recognised")
        one.launchable[grid](*one.args, **one.kwargs)
        first = seen(gpu)
        frozen._dispatcher.general(one.launchable)(grid, *one.args, **one.kwargs)
        assert seen(gpu) == first
        if kernel.fused is not None:
            assert kernel.unfused == ""
        else:
            assert "hook" in kernel.unfused or "heuristic" in kernel.unfused or "outermost" in kernel.unfused


def test_what_the_written_code_does_not_serve_is_known() -> None:
    with fakegpu.active(fakegpu.FakeDriver()), pytest.MonkeyPatch.context() as patch:
        calls = [one for form, (_, one) in FORMS.items() if "below" not in form]
        with lab.frozen(lab.bake(calls), patch) as frozen:
            assert {name.rpartition(".")[2] for name in frozen.unfused} == {"hooked", "computed"}


VALUES = st.sampled_from([0, 1, 3, 16, 64, -16, 1 << 31, 1 << 40, 1 << 63, True, False, 1.0, 0.5, None])
TENSORS = st.sampled_from([X, X[1:], X[4:], HALF, HALF[1:], Y, None])
PLANNED = [
    *(
        call(kernels.optional, X, Y, bias, scale, n, D=d, FLAG=flag)
        for bias, scale, n, d, flag in itertools.product([None, BIAS], [None, 0.5], [64, 1, 3], [1, True], [True, 16])
    ),
    call(kernels.optional, X[1:], Y, None, None, 64, D=1, FLAG=True),
    call(kernels.optional, HALF, Y, None, 1, 64, D=1, FLAG=True),
]


@given(st.tuples(TENSORS, TENSORS, TENSORS, VALUES, VALUES), VALUES, VALUES, st.booleans())
def test_the_two_paths_agree_on_any_call(args: Any, d: Any, flag: Any, keywords: bool) -> None:
    """Hit or miss, and which code: the fused function never claims a call that is another one."""
    driver = fakegpu.FakeDriver()
    with fakegpu.active(driver), pytest.MonkeyPatch.context() as patch, lab.frozen(_planned(), patch) as frozen:
        names = ("x", "y", "bias", "scale", "n")
        given_args = () if keywords else args
        given_kwargs = dict(zip(names, args, strict=True)) if keywords else {}
        outcomes = []
        general = frozen._dispatcher.general(kernels.optional)
        for launch in (functools.partial(kernels.optional[(1,)]), functools.partial(general, (1,))):
            try:
                loaded = launch(*given_args, **given_kwargs, D=d, FLAG=flag)
                outcomes.append((id(loaded), seen(driver)))
            except (FrozenMissError, TypeError) as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]


@functools.cache
def _planned() -> lab.FakeBundle:
    return lab.bake(PLANNED)


# ---------------------------------------------------------------------------------------------- what stock refuses too


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, Y, 2.0), {}),
        ((X, Y, 2.0, 64), {"BLOCK": 64}),
        ((X, Y, 2.0, 64), {"num_warps": 4}),
        ((X, Y, 2.0, 64), {"n": 64}),
        ((X, Y, 2.0, 64, 64, 64), {}),
    ],
    ids=["argument missing", "meta-parameter given", "option of the config given", "twice", "too many"],
)
def test_a_wrong_call_is_a_type_error_as_in_stock(
    args: Any, kwargs: Any, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **meta: [1.0] * 3)
    with pytest.raises(TypeError):
        kernels.tuned[(1,)](*args, **kwargs)
    kernels.tuned.nargs = None
    kernels.tuned.cache.clear()
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch), pytest.raises(TypeError):
        kernels.tuned[(1,)](*args, **kwargs)


@pytest.mark.parametrize("name", ["grid", "warmup"])
@pytest.mark.parametrize("launchable", [kernels.plain, kernels.hooked], ids=["fused", "general"])
def test_grid_and_warmup_beside_brackets_are_a_type_error_as_in_stock(
    launchable: Any, name: str, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = [call(kernels.plain, X, Y, 64, BLOCK=64), call(kernels.hooked, X, Y, 2.0, 64)]
    [one] = [item for item in planned if item.launchable is launchable]
    twice: dict[str, Any] = {**one.kwargs, name: (1,) if name == "grid" else True}
    with pytest.raises(TypeError, match="multiple values for keyword argument"):
        launchable[(1,)](*one.args, **twice)
    with lab.frozen(lab.bake(planned), monkeypatch) as frozen:
        with pytest.raises(TypeError, match=f"multiple values for keyword arguments: '{name}'"):
            launchable[(1,)](*one.args, **twice)
        assert frozen.counters.hits == 0


def test_a_grid_that_is_a_number_is_a_type_error_as_in_stock(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError):
        kernels.plain[4](X, Y, 64, BLOCK=64)
    with lab.frozen(lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64)]), monkeypatch), pytest.raises(TypeError):
        kernels.plain[4](X, Y, 64, BLOCK=64)


# ---------------------------------------------------------------------------------------------- hooks and wrappers


def test_a_config_hook_gets_a_dict_of_its_own_on_every_call(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.frozen(lab.bake([call(kernels.hooked, X, Y, 2.0, 64)]), monkeypatch):
        kernels.HOOKED.clear()
        kernels.hooked[(1,)](X, Y, alpha=2.0, n=64)
        kernels.hooked[(1,)](X, Y, 2.0, 64)
    first, second = kernels.HOOKED
    assert first is not second
    assert {name: first[name] for name in ("alpha", "n", "BLOCK", "num_warps")} == {
        "alpha": 2.0, "n": 64, "BLOCK": 128, "num_warps": 8,
    }  # fmt: skip
    assert first["x"] is X
    assert kernels.hooked.nargs is None


def test_the_autotuners_own_hooks_belong_to_benchmarks(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = torch.full((256,), 7.0)
    with lab.frozen(lab.bake([call(kernels.restoring, X, y, 2.0, 64)]), monkeypatch):
        monkeypatch.setattr(kernels.restoring, "pre_hook", lambda *args, **kwargs: pytest.fail("it ran"))
        kernels.restoring[(1,)](X, y, 2.0, 64)
    assert y[0] == 7.0


def test_launch_hooks_see_every_launch_while_they_are_installed(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = triton.knobs.runtime
    noted: list[tuple[str, Any]] = []
    enter, leave = (lambda lazy: noted.append(("enter", lazy.get()))), (lambda lazy: noted.append(("exit", lazy.get())))
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch) as frozen:
        kernels.tuned[(1,)](X, Y, 2.0, 64)
        runtime.launch_enter_hook.add(enter)
        runtime.launch_exit_hook.add(leave)
        try:
            kernels.tuned[(1,)](X, Y, 2.0, 64)
        finally:
            runtime.launch_enter_hook.remove(enter)
            runtime.launch_exit_hook.remove(leave)
        kernels.tuned[(1,)](X, Y, 2.0, 64)
        assert frozen.counters.hits == 3
    assert [which for which, _ in noted] == ["enter", "exit"]
    assert noted[0][1]["name"] == "tuned"
    assert noted[0][1]["stream"] == 100


def test_a_hook_that_replaces_the_chain_is_called(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, "launch_enter_hook", noted.append)
            kernels.tuned[(1,)](X, Y, 2.0, 64)
        kernels.tuned[(1,)](X, Y, 2.0, 64)
    assert len(noted) == 1


def test_a_hook_of_the_function_runs_before_the_launch(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = triton_api.innermost(kernels.tuned)
    noted: list[Any] = []
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch):
        function.add_pre_run_hook(lambda *args, **kwargs: noted.append((args, kwargs)))
        try:
            kernels.tuned[(1,)](X, Y, 2.0, 64)
        finally:
            function.pre_run_hooks.clear()
    [(_, kwargs)] = noted
    assert kwargs["x"] is X
    assert kwargs["BLOCK"] == 128


def test_a_subclass_that_looks_configs_up_itself_is_overruled(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash-linear-attention's autotuner does, from files that know nothing of the bundle."""

    class Looking(Autotuner):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            pytest.fail("its own lookup ran")

    one = call(kernels.tuned, X, Y, 2.0, 64)
    bundle = lab.bake([one])
    monkeypatch.setattr(kernels.tuned, "__class__", Looking)
    with lab.frozen(bundle, monkeypatch) as frozen:
        kernels.tuned[(1,)](X, Y, 2.0, 64)
        kernels.tuned.run(X, Y, 2.0, 64, grid=(1,), warmup=False)
        assert frozen.counters.hits == 2
        with pytest.raises(FrozenMissError):
            kernels.tuned[(1,)](X, Y, 2.0, 65)


def test_release_gives_everything_back(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [dict(vars(kind)) for kind in (Autotuner, JITFunction, type(triton.knobs.build))]
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch):
        assert "run" in vars(kernels.tuned)
    assert [dict(vars(kind)) for kind in (Autotuner, JITFunction, type(triton.knobs.build))] == before
    assert "run" not in vars(kernels.tuned)
    assert triton.knobs.build.impl is None
    assert triton.knobs.cache.manager_class is None


# ---------------------------------------------------------------------------------------------- misses


def refused(launch: Any) -> FrozenMissError:
    with pytest.raises(FrozenMissError) as caught:
        launch()
    return caught.value


def test_a_missing_key_names_kernel_key_nearest_and_case(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(kernels.tuned, X, Y, 2.0, 64), call(kernels.tuned, X, Y, 2.0, 4096, case="size=4096")]
    with lab.frozen(lab.bake(calls), monkeypatch) as frozen:
        error = refused(lambda: kernels.tuned[(1,)](X, Y, 2.0, 8192))
        assert frozen.counters.misses == 1
        assert frozen.counters.hits == 0
    assert error.message == (
        "kernel `frozenkernels.tuned`: no choice for autotune key `n=8192 [x:float32,y:float32]`; "
        "wanted a key that was planned"
    )
    assert len(error.reasons) == 1
    assert "n: here `8192`; bundle: `" in error.reasons[0]
    assert "in case `size=" in str(error.hint)


def test_a_missing_specialization_names_the_field(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), monkeypatch) as frozen:
        error = refused(lambda: kernels.tuned[(1,)](X[1:], Y, 2.0, 64))
        assert frozen.counters.misses == 1
    assert error.message.startswith("kernel `frozenkernels.tuned`: no code for `x:*fp32 y:*fp32%D")
    assert error.reasons == ("differs from the nearest in x: here `x:*fp32`; bundle: `x:*fp32%D`",)
    assert "in case `size=64`" in str(error.hint)


@pytest.mark.parametrize("value", [True, 1.0, 1])
def test_values_that_compare_equal_are_not_taken_for_each_other(
    value: Any, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [other for other in (True, 1.0, 1) if type(other) is not type(value)]
    calls = [call(kernels.typed, X, 64, KIND=other, DTYPE=tl.float32, BLOCK=64) for other in others]
    with lab.frozen(lab.bake(calls), monkeypatch):
        refused(lambda: kernels.typed[(1,)](X, 64, KIND=value, DTYPE=tl.float32, BLOCK=64))
        kernels.typed[(1,)](X, 64, KIND=others[0], DTYPE=tl.float32, BLOCK=64)


def test_a_kernel_that_is_not_in_the_bundle(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.frozen(lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64)]), monkeypatch) as frozen:
        for kernel in (kernels.tuned, kernels.optional, triton_api.innermost(kernels.tuned)):
            error = refused(lambda kernel=kernel: kernel[(1,)](X, Y, 2.0, 64))
            assert "not in the bundle" in error.message
        assert frozen.counters.misses == 3


def test_an_object_made_after_the_freeze_is_refused(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.frozen(lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64)]), monkeypatch):
        again = triton.jit(kernels.plain.fn)
        error = refused(lambda: again[(1,)](X, Y, 64, BLOCK=64))
    assert error.message.startswith("kernel `frozenkernels.plain`: the object was defined again after the freeze")


def test_a_newer_device_function_of_the_same_name_is_not_taken_for_the_old_one(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.frozen(lab.bake([call(kernels.called, X, 64, FUNCTION=kernels.twice, BLOCK=64)]), monkeypatch):
        kernels.called[(1,)](X, 64, FUNCTION=kernels.twice, BLOCK=64)
        refused(lambda: kernels.called[(1,)](X, 64, FUNCTION=triton.jit(kernels.twice.fn), BLOCK=64))


@pytest.mark.parametrize("option", [{"debug": True}, {"num_warps": 8}, {"maxnreg": 64}])
def test_an_option_that_needs_other_code_is_refused(
    option: dict[str, Any], gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.frozen(lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64, num_warps=4)]), monkeypatch):
        refused(lambda: kernels.plain[(1,)](X, Y, 64, BLOCK=64, **{"num_warps": 4, **option}))


def test_an_argument_that_no_key_can_hold_is_refused(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.frozen(lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64)]), monkeypatch):
        error = refused(lambda: kernels.plain[(1,)](X, Y, 64, BLOCK=object()))
    assert "cannot stand in a key" in error.message
