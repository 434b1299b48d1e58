"""Parts of the frozen runtime that need no Triton: lookups, misses, counters, settings, late walls, the host."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kernelbake import guards, host, lookup, patterns
from kernelbake.errors import InputError, UnsupportedError
from kernelbake.keys import AutotuneKey, Config, Kernel, Parameter, Specialization, Symbol
from kernelbake.plan import Choice, KernelFacts, Launch, Plan, Variant


def test_typed_values_differ_by_type_and_bits() -> None:
    values = [1, True, 1.0, "1", None, 0.0, -0.0, (1,), (True,), (1.0,), ((1,),), Symbol("dtype", "bf16"), "bf16"]
    assert len({lookup.typed(value) for value in values}) == len(values)
    assert lookup.typed((1, (0.5, None))) == lookup.typed((1, (0.5, None)))


def test_a_key_does_not_depend_on_the_order_of_arguments() -> None:
    first = AutotuneKey((("a", 1), ("b", 2)), (("x", "torch.float32"), ("y", "torch.int32")))
    second = AutotuneKey((("b", 2), ("a", 1)), (("y", "torch.int32"), ("x", "torch.float32")))
    third = AutotuneKey((("a", 1), ("b", 2)), (("x", "torch.int32"), ("y", "torch.float32")))
    assert lookup.typed_key(first) == lookup.typed_key(second) != lookup.typed_key(third)


def test_a_counter_loses_nothing_between_threads() -> None:
    counter = lookup.Counter()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [counter.add() for _ in range(5000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counter.value == counter.value == 40000


# ---------------------------------------------------------------------------------------------- misses

KERNEL = Kernel("some.module", "kernel")


def spec(n: Any, block: int = 64) -> Specialization:
    return Specialization((Parameter("n", "i32", n), Parameter("BLOCK", "constexpr", block)), (("num_warps", 4),))


def held(keys: dict[int, str]) -> lookup.Held:
    """One kernel, tuned at some values of n, each in a case."""
    facts = KernelFacts(KERNEL, ("Autotuner", "JITFunction"), ("n", "BLOCK"), ("n",), "sha256:0", None, 1)
    config = Config((("BLOCK", 64),), 4)
    launches = [
        Launch(KERNEL, AutotuneKey((("n", n),), ()), (config,), (Variant((spec("D"),), (case,)),))
        for n, case in keys.items()
    ]
    plan = Plan({}, {}, {}, (), (), {KERNEL.name: facts}, tuple(launches))
    choices = [Choice(KERNEL, launch.key, config, {spec("D").token: "sha256:1"}) for launch in launches]
    return lookup.hold(plan, choices)[KERNEL.name]


def test_a_missed_key_names_the_nearest_and_its_case() -> None:
    error = lookup.missed_key(held({64: "size=64", 4096: "size=4096"}), AutotuneKey((("n", 65),), ()))
    assert (
        error.message
        == "kernel `some.module.kernel`: no choice for autotune key `n=65 []`; wanted a key that was planned"
    )
    assert error.reasons == ("differs from the nearest in n: here `65`; bundle: `64`",)
    assert error.hint == (
        "add the case that makes this launch to the manifest's axes, and build again; "
        "the nearest planned launch is in case `size=64`"
    )
    assert error.exit_code == 5


def test_a_missed_specialization_names_the_field_and_the_config() -> None:
    error = lookup.missed_specialization(held({64: "size=64"}), spec(""), Config((("BLOCK", 64),), 4))
    assert error.message == (
        "kernel `some.module.kernel`: no code for `n:i32 BLOCK=64` (config `BLOCK=64 num_warps=4`); "
        "wanted a specialization of the bundle"
    )
    assert error.reasons == ("differs from the nearest in n: here `n:i32`; bundle: `n:i32%D`",)
    assert "case `size=64`" in str(error.hint)


def test_a_kernel_without_any_choice_is_missed_without_a_nearest() -> None:
    error = lookup.missed_key(held({}), AutotuneKey((("n", 65),), ()))
    assert error.reasons == ()
    assert "nearest" not in str(error.hint)


def test_an_unknown_kernel_names_those_of_the_same_short_name() -> None:
    error = lookup.unknown_kernel("a.b.kernel", ["c.d.kernel", "c.d.other"], redefined=False)
    assert error.reasons == ("the bundle has `c.d.kernel`",)


def test_two_winners_for_one_key_are_both_held() -> None:
    one = held({64: "size=64"})
    facts, [launch] = one.facts, one.launches
    swapped = [
        Choice(KERNEL, AutotuneKey((), dtypes), Config((("BLOCK", size),)), {})
        for size, dtypes in ((64, (("x", "a"), ("y", "b"))), (128, (("y", "b"), ("x", "a"))))
    ]
    found = lookup.hold(Plan({}, {}, {}, (), (), {KERNEL.name: facts}, (launch,)), swapped)[KERNEL.name]
    [choices] = found.winners.values()
    assert [choice.winner for choice in choices] == [choice.winner for choice in swapped]


# ---------------------------------------------------------------------------------------------- heuristics

GLOBAL = 3


@pytest.mark.parametrize(
    ("heuristic", "test"),
    [
        (lambda args: args["h0"] is not None, ("h0", True)),
        (lambda meta: meta["cu_seqlens"] is None, ("cu_seqlens", False)),
        (lambda args: args["h0"] is not None and args["g"] is not None, None),
        (lambda args: args["h0"] is not None or True, None),
        (lambda args: not args["h0"], None),
        (lambda args: args["h0"] != None, None),  # noqa: E711
        (lambda args: args.get("h0") is not None, None),
        (lambda args: args["n"] % args["BLOCK"] == 0, None),
        (lambda args: args["h0"] is not GLOBAL, None),
        (lambda args, other=3: args["h0"] is not None, None),
        (lambda *args: args["h0"] is not None, None),  # type: ignore[call-overload]
        (lambda args: isinstance(args["h0"], int), None),
        (len, None),
        (3, None),
    ],
)
def test_only_a_test_for_presence_is_proved(heuristic: Any, test: Any) -> None:
    assert patterns.presence_test(heuristic) == test


def test_a_closure_is_not_proved() -> None:
    name = "h0"
    assert patterns.presence_test(lambda args: args[name] is not None) is None


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, 0),
        ({"TRITON_ALWAYS_COMPILE": "0", "TRITON_DEBUG": "", "TRITON_KERNEL_OVERRIDE": "off"}, 0),
        ({"TRITON_CACHE_DIR": "/tmp", "TRITON_PRINT_AUTOTUNING": "1", "TRITON_DISABLE_LINE_INFO": "1"}, 0),
        ({setting.name: "1" for setting in guards.SETTINGS}, len(guards.SETTINGS)),
        ({setting.name: "1" for setting in guards.CODE_SETTINGS}, len(guards.CODE_SETTINGS)),
        ({"DISABLE_MMA_V5": "0", "TRITON_F32_DEFAULT": " "}, 0),
        ({"TRITON_INTERPRET": "1"}, 1),
    ],
)
def test_settings_are_refused_by_what_they_mean(environment: dict[str, str], lines: int) -> None:
    found = guards.refused_settings(environment, interpreted=False)
    assert len(found) == lines
    assert all("wanted" in line for line in found)


def test_a_compilers_setting_may_be_that_of_the_build_and_no_other() -> None:
    built = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_F32_DEFAULT": "ieee", "DISABLE_MMA_V5": "1"}
    same = {"TRITON_DEFAULT_FP_FUSION": "true", "TRITON_F32_DEFAULT": "ieee", "DISABLE_MMA_V5": "on"}
    assert guards.refused_settings(same, interpreted=False, built=built) == []
    other = {"TRITON_DEFAULT_FP_FUSION": "0", "TRITON_F32_DEFAULT": "tf32"}
    assert guards.refused_settings(other, interpreted=False, built=built) == [
        "`TRITON_DEFAULT_FP_FUSION=0` asks the compiler for other code; wanted `1`, as in the build, or it unset",
        "`TRITON_F32_DEFAULT=tf32` asks the compiler for other code; wanted `ieee`, as in the build, or it unset",
    ]
    assert guards.refused_settings({**other, "TRITON_INTERPRET": "1"}, interpreted=True, built=built) == []


def test_the_interpreter_has_to_be_the_bundles() -> None:
    assert guards.refused_settings({"TRITON_INTERPRET": "1"}, interpreted=True) == []
    assert len(guards.refused_settings({}, interpreted=True)) == 1


def test_patches_are_put_back_in_reverse() -> None:
    class Owner:
        kept = 1

    owner, patches = Owner(), guards.Patches()
    patches.set(Owner, "kept", 2)
    patches.set(Owner, "kept", 3)
    patches.set(owner, "kept", 4)
    patches.set(owner, "added", 5)
    patches.restore()
    assert (Owner.kept, vars(owner)) == (1, {})
    patches.restore()


def test_an_interrupt_between_patches_leaves_none_behind() -> None:
    """In the middle of a change, and in the middle of putting changes back."""

    class Interrupted:
        def __init__(self, times: int) -> None:
            vars(self)["times"] = times

        def __setattr__(self, name: str, value: Any) -> None:
            vars(self)[name] = value
            vars(self)["times"] -= 1
            if self.times == 0:
                raise KeyboardInterrupt

    for times in (1, 2, 3, 4):
        owner = Interrupted(times)
        vars(owner).update(first=1, second=2)
        with pytest.raises(KeyboardInterrupt):
            _patch_and_restore(owner)
        assert (owner.first, owner.second) == (1, 2)


def _patch_and_restore(owner: Any) -> None:
    patches = guards.Patches()
    try:
        patches.set(owner, "first", 10)
        patches.set(owner, "second", 20)
    finally:
        patches.restore()


def test_a_module_is_walled_when_someone_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lateone.py").write_text("def work():\n    return 'worked'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused: list[int] = []
    patches = guards.Patches()
    walls = guards.Walls(lambda: refused.append(1))
    finders = list(sys.meta_path)
    walls._install_late(patches, "lateone", "work", "late")
    assert "lateone" not in sys.modules
    module = importlib.import_module("lateone")
    with pytest.raises(Exception, match="late: a function would be traced"):
        module.work()
    assert refused == [1]
    patches.restore()
    assert module.work() == "worked"
    assert sys.meta_path == finders
    del sys.modules["lateone"]
    assert importlib.import_module("lateone").work() == "worked"
    del sys.modules["lateone"]


# ---------------------------------------------------------------------------------------------- the host


def test_variables_that_choose_kernels_belong_to_the_fingerprint() -> None:
    environment = {"FLA_USE_TMA": "1", "FLA_CACHE_MODE": "full", "FLA_CONFIG_DIR": "", "HOME": "/", "FLA_A": "0"}
    assert host.kernel_environment(environment) == {"FLA_A": "0", "FLA_USE_TMA": "1"}
    assert host.overruled(environment) == ["`FLA_CACHE_MODE=full` has no effect: every config comes from the bundle"]


def test_the_build_id_of_a_library_is_read(tmp_path: Path) -> None:
    identity = bytes(range(20))
    note = (4).to_bytes(4, "little") + (20).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"GNU\0" + identity
    other = (4).to_bytes(4, "little") + (5).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"GNU\0" + bytes(8)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    header[32:40], header[54:56], header[56:58] = (64).to_bytes(8, "little"), b"\x38\0", b"\x02\0"
    programs = bytearray(112)
    programs[0:4], programs[56:60] = (1).to_bytes(4, "little"), (4).to_bytes(4, "little")
    programs[64:72] = (176).to_bytes(8, "little")
    programs[88:96] = (len(other) + len(note)).to_bytes(8, "little")
    path = tmp_path / "library.so"
    path.write_bytes(bytes(header) + bytes(programs) + other + note)
    assert host.build_id(path) == identity.hex()
    path.write_bytes(bytes(header) + bytes(programs) + other + other)
    assert host.build_id(path) is None
    path.write_bytes(b"text")
    assert host.build_id(path) is None


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:15:55 UTC 2025\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder)",
    ],
)
def test_the_driver_version_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert host.driver_version() == "580.65.06"


def test_other_platforms_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError) as caught:
        host.check_platform()
    assert caught.value.reasons == (
        "operating system: `darwin`; wanted Linux, the only one that Triton supports with CUDA",
    )
    assert caught.value.exit_code == 4


def test_freezing_loads_neither_torch_nor_triton_at_import() -> None:
    import subprocess

    script = "import sys, kernelbake.freeze; print([n for n in ('torch', 'triton', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_bundle_is_an_input_error(tmp_path: Path) -> None:
    from kernelbake.freeze import current, freeze

    with pytest.raises(InputError):
        freeze(tmp_path / "bundle.tar")
    assert current() is None
