"""Every wall of a frozen process is walked into, and every refusal of a freeze is provoked."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import frozenkernels as kernels
import frozenlab as lab
import pytest
import torch
import triton
from frozenlab import call
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernelbake import freeze, host, triton_api
from kernelbake.errors import FrozenMissError, InputError, MisfitError, UnsupportedError
from kernelbake.fingerprint import Fingerprint
from kernelbake.profiles import DeviceProfile

X, Y = torch.zeros(64), torch.zeros(64)
TUNED = call(kernels.tuned, X, Y, 2.0, 64)
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture
def gpu() -> Iterator[fakegpu.FakeDriver]:
    with fakegpu.active(fakegpu.FakeDriver()) as driver:
        yield driver


@pytest.fixture
def frozen(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[freeze.Frozen]:
    with lab.frozen(lab.bake([TUNED]), monkeypatch) as handle:
        yield handle


def _source() -> Any:
    request = triton_api.compile_request(kernels.plain, lab.plan_of([call(kernels.plain, X, Y, 64, BLOCK=64)])
                                         .launches[0].variants[0].specializations[0])  # fmt: skip
    return request.source


STOCK_COMPILE = triton.compile


def _build() -> None:
    from triton.runtime import build

    build._build("helper", "helper.c", ".", [], [], [], *([[]] if triton_api.version() >= (3, 6) else []))


def _cache(method: str, *args: Any) -> Callable[[], None]:
    def touch() -> None:
        from triton.runtime.cache import get_cache_manager

        getattr(get_cache_manager("ab" * 32), method)(*args)

    return touch


WALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "triton.compile": (lambda: triton.compile(_source(), target=triton_api.gpu_target(90)), "triton.compile: "),
    "triton.compile taken before": (
        lambda: STOCK_COMPILE(_source(), target=triton_api.gpu_target(90)),
        "triton cache: ",
    ),
    "the function's own compilation": (
        lambda: kernels.plain._do_compile("key", {}, 0, {}, None, {}, False),
        "triton: a launch beside the bundle",
    ),
    "preload": (lambda: kernels.plain.preload("{}"), "triton.preload: "),
    "benchmark": (
        lambda: kernels.tuned._bench(X, Y, 2.0, 64, config=kernels.tuned.configs[0]),
        "triton.autotune: configs would be benchmarked",
    ),
    "warm-up of an autotuner": (lambda: kernels.tuned.warmup(X, Y, 2.0, 64, grid=(1,)), "`warmup` would compile"),
    "warm-up of a function": (lambda: kernels.plain.warmup(X, Y, 64, BLOCK=64, grid=(1,)), "`warmup` would compile"),
    "run with warmup": (lambda: kernels.tuned.run(X, Y, 2.0, 64, grid=(1,), warmup=True), "`warmup` would compile"),
    "C compiler": (_build, "triton: a C compiler would be run"),
    "cache read": (_cache("get_file", "a.json"), "triton cache: "),
    "cache group": (_cache("get_group", "a.json"), "triton cache: "),
    "cache write": (_cache("put", b"", "a.json"), "triton cache: "),
    "cache group write": (_cache("put_group", "a.json", {}), "triton cache: "),
}  # fmt: skip


@pytest.mark.parametrize("wall", WALLS)
def test_every_wall_stands(wall: str, frozen: freeze.Frozen) -> None:
    walk, message = WALLS[wall]
    with pytest.raises(FrozenMissError) as caught:
        walk()
    assert message in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 5
    counters = frozen.counters
    assert counters.refusals + counters.misses == 1
    assert counters.hits == 0


@pytest.mark.parametrize("imported", ["before the freeze", "after the freeze"])
def test_torch_compile_is_refused_when_it_would_compile(imported: str) -> None:
    """In a process of its own: torch's compiler cannot be taken out of one again."""
    script = textwrap.dedent(f"""
        import sys, torch, pytest, fakegpu, frozenlab as lab, frozenkernels as kernels
        from frozenlab import call
        from kernelbake.errors import FrozenMissError
        if {imported == "before the freeze"}:
            import torch._dynamo
        X, Y = torch.zeros(64), torch.zeros(64)
        with fakegpu.active(fakegpu.FakeDriver()), pytest.MonkeyPatch.context() as patch:
            with lab.frozen(lab.bake([call(kernels.tuned, X, Y, 2.0, 64)]), patch) as frozen:
                assert ("torch._dynamo" in sys.modules) is {imported == "before the freeze"}
                compiled = torch.compile(lambda x: x + 1, backend="eager")
                try:
                    compiled(X)
                except FrozenMissError as error:
                    print(error.message)
                print(frozen.counters.refusals)
                from torch._inductor import compile_fx
                try:
                    compile_fx.compile_fx(None, [])
                except FrozenMissError as error:
                    print(error.message)
            print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == [
        "torch.compile: a function would be traced and compiled; wanted only what the bundle holds",
        "1",
        "torch inductor: a function would be traced and compiled; wanted only what the bundle holds",
        "2.0",
    ], done.stderr


# ---------------------------------------------------------------------------------------------- the handle


def test_freezing_again_gives_the_same_handle(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED])
    with lab.frozen(bundle, monkeypatch) as first:
        with freeze.freeze(bundle) as second:  # type: ignore[arg-type]
            assert second is first
        assert freeze.current() is first
        kernels.tuned[(1,)](X, Y, 2.0, 64)
        assert first.counters == freeze.Counters(hits=1, misses=0, loads=1, refusals=0)
        assert first.hits_by_kernel == {"frozenkernels.tuned": 1}
    assert freeze.current() is None


def test_another_bundle_is_refused(frozen: freeze.Frozen) -> None:
    other = lab.bake([call(kernels.tuned, X, Y, 2.0, 128)])
    with pytest.raises(InputError, match="is frozen already"):
        freeze.freeze(other)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"wanted \[3\] as well, too late"):
        freeze.freeze(lab.bake([TUNED]), devices=[0, 3])  # type: ignore[arg-type]


def test_a_worker_thread_cannot_freeze(gpu: fakegpu.FakeDriver) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            freeze.freeze(lab.bake([TUNED]))  # type: ignore[arg-type]
        except InputError as error:
            caught.append(error)

    thread = threading.Thread(target=work, name="pair 1")
    thread.start()
    thread.join()
    assert "called in thread `pair 1`; wanted the main thread" in str(caught[0])


def test_a_forked_child_is_refused_by_name_and_the_parent_goes_on(frozen: freeze.Frozen) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kernels.tuned[(1,)](X, Y, 2.0, 64)
            message = "launched"
        except FrozenMissError as error:
            message = error.message
        os.write(write, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == (
        "kernel `frozenkernels.tuned`: launched in a forked child of the frozen process; wanted a process of its own"
    )
    kernels.tuned[(1,)](X, Y, 2.0, 64)
    assert frozen.counters.hits == 1


def test_nothing_changes_if_the_freeze_fails(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED])
    monkeypatch.setattr(gpu.utils, "load_binary", lambda *args: (_ for _ in ()).throw(RuntimeError("invalid image")))
    with pytest.raises(Exception, match="1 binary of 1 does not load") as caught, lab.frozen(bundle, monkeypatch):
        pass
    assert caught.value.reasons == ("kernel `frozenkernels.tuned` on device 0: invalid image",)
    assert freeze.current() is None
    assert "run" not in vars(kernels.tuned)
    assert Autotuner.run.__module__ == "triton.runtime.autotuner"


def test_code_that_the_device_cannot_take_is_named(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = fakegpu.metadata
    monkeypatch.setattr(fakegpu, "metadata", lambda name, **more: stock(name, **{**more, "shared": 300_000}))
    with pytest.raises(Exception, match="1 binary of 1 ") as caught, lab.frozen(lab.bake([TUNED]), monkeypatch):
        pass
    assert "needs 300000 bytes of shared memory; device 0 has 232448" in caught.value.reasons[0]


# ---------------------------------------------------------------------------------------------- what does not fit


def _misfit(bundle: lab.FakeBundle, monkeypatch: pytest.MonkeyPatch, **more: Any) -> MisfitError:
    with pytest.raises(MisfitError) as caught, lab.frozen(bundle, monkeypatch, **more):
        pass
    assert freeze.current() is None
    return caught.value


def test_every_difference_of_the_machine_is_listed(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED])
    other = dataclasses.replace(lab.PROFILE, name="NVIDIA H100 80GB HBM3", capability=(12, 0), sm_count=114)
    values = {field.name: field.value for field in bundle.fingerprint.fields}
    bundle.fingerprint = Fingerprint.of(
        {**values, "triton.version": "3.5.0", "torch.version": "2.0", "python.abi": "cpython-39"}
    )
    error = _misfit(bundle, monkeypatch, profile_of=lambda device: other)
    assert [reason.split(":")[1].strip() for reason in error.reasons] == [
        "gpu.capability", "gpu.device", "gpu.sm_count", "python.abi", "triton.version",
    ]  # fmt: skip
    assert error.reasons[0] == "device 0: gpu.capability: here `120a`; bundle: `90a`"
    assert error.exit_code == 4


def test_a_second_model_is_refused_when_it_is_asked_for_and_when_it_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def profile_of(device: int) -> DeviceProfile:
        return lab.PROFILE if device != 1 else dataclasses.replace(lab.PROFILE, name="NVIDIA L40", capability=(8, 9))

    class OnDevice(torch.Tensor):
        """A tensor that says that it lies on device 1."""

        def get_device(self) -> int:
            return 1

    with fakegpu.active(fakegpu.FakeDriver(on_tensors=True)):
        bundle = lab.bake([TUNED])
        error = _misfit(bundle, monkeypatch, devices=[0, 1], profile_of=profile_of)
        assert error.reasons == (
            "device 1: gpu.capability: here `89`; bundle: `90a`",
            "device 1: gpu.device: here `NVIDIA L40`; bundle: `NVIDIA H200`",
        )
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with lab.frozen(bundle, monkeypatch, devices=[0], profile_of=profile_of):
            x, y = X.as_subclass(OnDevice), Y.as_subclass(OnDevice)
            with pytest.raises(FrozenMissError) as caught:
                kernels.tuned[(1,)](x, y, 2.0, 64)
    assert caught.value.message == (
        "kernel `frozenkernels.tuned`: device 1 has no kernels (gpu.capability: here `89`; bundle: `90a`); "
        "wanted one of 0"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("source_digest", "sha256:" + "0" * 64), ("configs_digest", "sha256:" + "0" * 64), ("wrappers", ("JITFunction",))],
)
def test_a_kernel_that_changed_is_named(
    field: str, value: Any, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake([TUNED, call(kernels.plain, X, Y, 64, BLOCK=64)])
    name = "frozenkernels.tuned"
    changed = {**bundle.plan.kernels, name: dataclasses.replace(bundle.plan.kernels[name], **{field: value})}
    bundle.plan = dataclasses.replace(bundle.plan, kernels=changed)
    error = _misfit(bundle, monkeypatch)
    assert len(error.reasons) == 1
    assert error.reasons[0].startswith(f"kernel `{name}`: {field.replace('_', ' ')}: here `")


def test_a_kernel_that_asks_for_assertions_is_named(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would make other code for it than the bundle's."""
    bundle = lab.bake([call(kernels.plain, X, Y, 64, BLOCK=64)])
    monkeypatch.setattr(kernels.plain, "debug", True)
    assert _misfit(bundle, monkeypatch).reasons == (
        "kernel `frozenkernels.plain`: `debug` is on, for which the bundle has no code; wanted it off",
    )


def test_kernels_that_are_gone_are_all_named(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED, call(kernels.plain, X, Y, 64, BLOCK=64)])
    monkeypatch.delattr(kernels, "tuned")
    monkeypatch.setattr(kernels, "plain", 3)
    error = _misfit(bundle, monkeypatch)
    assert [reason.split(":")[0] for reason in error.reasons] == [
        "kernel `frozenkernels.plain`", "kernel `frozenkernels.tuned`",
    ]  # fmt: skip


def test_a_reloaded_module_is_refused_before_and_after(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The object that was checked goes on; one that a reload makes is refused, whatever its source says."""
    source = Path(kernels.__file__).read_text()
    path = tmp_path / "reloaded.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("reloaded")
    old = module.tuned
    bundle = lab.bake([call(old, X, Y, 2.0, 64)])
    with lab.frozen(bundle, monkeypatch) as frozen:
        path.write_text(source.replace("* alpha", "* alpha * 1.0"))
        importlib.invalidate_caches()
        importlib.reload(module)
        with pytest.raises(FrozenMissError, match="defined again after the freeze"):
            module.tuned[(1,)](X, Y, 2.0, 64)
        with pytest.raises(FrozenMissError, match="defined again after the freeze"):
            module.tuned.run(X, Y, 2.0, 64, grid=(1,))
        old[(1,)](X, Y, 2.0, 64)
        assert frozen.counters.hits == 1
    assert "source digest" in _misfit(bundle, monkeypatch).reasons[0]


@pytest.mark.parametrize("changed", ["given", "called by it"])
def test_a_changed_function_that_a_launch_gets_as_a_value_is_named(
    changed: str, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing in the kernel's module leads to it, and its name stays the same."""
    sources = {
        "given": "import triton\nfrom called_by_given import inner\n\n"
        "@triton.jit\ndef outer(x):\n    return inner(x) * 2\n",
        "called by it": "import triton\n\n@triton.jit\ndef inner(x):\n    return x + 1\n",
    }
    files = {"given": tmp_path / "given.py", "called by it": tmp_path / "called_by_given.py"}
    for name, path in files.items():
        path.write_text(sources[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    called_by_given, given = map(importlib.import_module, ("called_by_given", "given"))
    bundle = lab.bake([call(kernels.called, X, 64, given.outer, BLOCK=64)])
    with lab.frozen(bundle, monkeypatch) as frozen:
        kernels.called[(1,)](X, 64, given.outer, BLOCK=64)
        assert frozen.counters.hits == 1
    files[changed].write_text(sources[changed].replace("return x + 1", "return x - 1").replace("* 2", "* 3"))
    importlib.invalidate_caches()
    for module in (called_by_given, given):
        importlib.reload(module)
    [reason] = _misfit(bundle, monkeypatch).reasons
    assert reason.startswith("kernel `given.outer`: source digest: here `")
    kept = {name: facts for name, facts in bundle.plan.kernels.items() if name != "given.outer"}
    bundle.plan = dataclasses.replace(bundle.plan, kernels=kept)
    [reason] = _misfit(bundle, monkeypatch).reasons
    assert reason.startswith("kernel `given.outer`: a device function that launches get as a value")
    for name in ("given", "called_by_given"):
        del sys.modules[name]


def test_settings_that_change_code_are_refused_all_at_once(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake([TUNED])
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    error = _misfit(bundle, monkeypatch)
    assert [reason.split(" ")[0] for reason in error.reasons] == [
        "`TRITON_ALWAYS_COMPILE=1`", "`PTXAS_OPTIONS=-O1`", "`TRITON_INTERPRET=1`", "`triton.knobs.runtime.debug`",
    ]  # fmt: skip


def test_a_setting_of_the_compiler_has_to_be_the_builds(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake([TUNED])
    values = {field.name: field.value for field in bundle.fingerprint.fields}
    bundle.fingerprint = Fingerprint.of(
        {**values, "build.fp_fusion": True, "build.environment": {"DISABLE_MMA_V5": "1"}}
    )
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("DISABLE_MMA_V5", "1")
    with lab.frozen(bundle, monkeypatch):
        pass
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert _misfit(bundle, monkeypatch).reasons == (
        "`TRITON_DEFAULT_FP_FUSION=0` asks the compiler for other code; wanted `1`, as in the build, or it unset",
    )


@pytest.mark.parametrize("value", [None, "", " ", "relative/cache", "stale"])
def test_no_cache_folder_is_looked_at_or_made(
    value: str | None, gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = lab.bake([TUNED])
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    if value is None:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", value if value != "stale" else str(tmp_path / "stale"))
    opened: list[str] = []
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    watching = [True]

    def audit(event: str, args: Any) -> None:
        if watching[0] and (event in ("os.mkdir", "os.rename", "subprocess.Popen", "os.posix_spawn") or (
            event == "open" and isinstance(args[2], int) and args[2] & writing
        )):  # fmt: skip
            opened.append(f"{event} {args}")

    sys.addaudithook(audit)
    try:
        with lab.frozen(bundle, monkeypatch) as frozen:
            kernels.tuned[(1,)](X, Y, 2.0, 64)
            assert frozen.counters.hits == 1
    finally:
        watching[0] = False
    assert opened == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


# ---------------------------------------------------------------------------------------------- the version of Triton


def test_another_version_of_triton_is_refused(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED])
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with pytest.raises(UnsupportedError, match=r"version `3\.10\.0`; wanted 3\.6 to 3\.9"):
        freeze.freeze(bundle)  # type: ignore[arg-type]


def test_a_function_of_triton_that_takes_other_arguments_is_refused_at_once(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake([TUNED])

    def run(self: Any, *args: Any, grid: Any, warmup: bool, stream: Any = None, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(Autotuner, "_bench", lambda self, config: None)
    with pytest.raises(UnsupportedError) as caught:
        freeze.freeze(bundle)  # type: ignore[arg-type]
    assert caught.value.reasons == (
        "`Autotuner._bench` takes (self, config); wanted (self, args, config, meta)",
        "`JITFunction.run` takes (self, args, grid, warmup, stream, kwargs); wanted (self, args, grid, warmup, kwargs)",
    )


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    with pytest.raises(UnsupportedError) as caught:
        host.check_platform()
    assert [reason.split(":")[0] for reason in caught.value.reasons] == ["operating system", "python", "torch"]


def test_a_python_without_docstrings_is_refused() -> None:
    """transformers reads its own when it is imported."""
    script = textwrap.dedent("""
        from kernelbake import errors, host
        try:
            host.check_platform()
        except errors.UnsupportedError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-OO", "-c", script], capture_output=True, text=True, check=True)
    assert "python: `-OO` drops the docstrings" in done.stdout
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_settings_of_another_lookup_are_reported(gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = lab.bake([TUNED])
    monkeypatch.setenv("FLA_CACHE_MODE", "full")
    with lab.frozen(bundle, monkeypatch) as frozen:
        assert frozen.notes == ("`FLA_CACHE_MODE=full` has no effect: every config comes from the bundle",)


def test_a_setting_that_chooses_kernels_has_to_be_the_builds(
    gpu: fakegpu.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = lab.bake([TUNED])
    monkeypatch.setenv("FLA_USE_FAST_OPS", "1")
    error = _misfit(bundle, monkeypatch)
    assert error.reasons == ('device 0: triton.environment: here `{"FLA_USE_FAST_OPS":"1"}`; bundle: `{}`',)
