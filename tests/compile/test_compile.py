"""Compiling without a GPU, through the compile server: real cubins, and every way in which a candidate can fail."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compilekernels
import pytest
import toyworkload

from kernelbake import build, bundle, digest, elf, packing, planner, profiles, triton_api
from kernelbake.build import Options
from kernelbake.compiling import CompileServer, Task, tasks_of
from kernelbake.errors import BuildError
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.outcome import Code, Files
from kernelbake.plan import Launch, Plan, Variant

SUPPORT = Path(toyworkload.__file__).parent
BLACKWELL = profiles.load("rtx-pro-6000-blackwell")


def _environment(folder: Path, **changes: str) -> dict[str, str]:
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    inherited = {**os.environ, "PYTHONPATH": paths}
    fixed = {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_DISABLE_LINE_INFO": "1"}
    return {**planner.environment(inherited, interpreted=False), **fixed, "TRITON_DEFAULT_FP_FUSION": "1", **changes}


class Served:
    """A compile server and what it answered."""

    def __init__(
        self,
        folder: Path,
        launchables: Sequence[Any],
        *,
        jobs: int = 2,
        time_limit_s: float = 120.0,
        profile: profiles.DeviceProfile = BLACKWELL,
        **environment: str,
    ) -> None:
        (folder / "code").mkdir(exist_ok=True)
        self.files = Files(folder / "code")
        job = {
            "profile": profile.to_json(),
            "kernels": [triton_api.facts(launchable).to_json() for launchable in launchables],
            "folder": str(self.files.folder),
            "jobs": jobs,
            "time_limit_s": time_limit_s,
            "interpreted": False,
            "line_info": False,
            "fp_fusion": True,
        }
        self._server = CompileServer(job, _environment(folder, **environment), folder / "log")

    def run(self, tasks: Sequence[Task]) -> dict[tuple[str, str], dict[str, Any]]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        with self._server as server:
            server.facts()
            server.compile(tasks, lambda task, data: found.update({task.id: data}))
        return found


def _misbehaving(how: str) -> Task:
    kernel = Kernel("compilekernels", "misbehaving")
    return Task(kernel, Specialization((Parameter("x", "*i32", "D"), Parameter("HOW", "constexpr", how))))


def _product(tile: tuple[int, int, int], stages: int) -> Task:
    constants = dict(zip(("M", "N", "K", "BM", "BN", "BK"), (512, 512, 512, *tile), strict=True))
    pointers = [Parameter(name, "*bf16", "D") for name in ("a", "b", "c")]
    parameters = (*pointers, *(Parameter(name, "constexpr", value) for name, value in constants.items()))
    options = (("num_stages", stages), ("num_warps", 8))
    return Task(Kernel("compilekernels", "product"), Specialization(parameters, options))


def test_each_bad_candidate_costs_itself_only(tmp_path: Path) -> None:
    wanted = {
        "abort": ("crash", "the compiler ended with signal SIGABRT"),
        "segfault": ("crash", "the compiler ended with signal SIGSEGV"),
        "exit": ("crash", "the compiler ended with exit status 7"),
        "hang": ("timeout", "the compilation took longer than 8 s"),
        "runtime": ("compile-error", "PassManager::run failed"),
        "assertion": ("compile-error", "not this tile"),
        "quit": ("compile-error", "SystemExit"),
    }
    tasks = [_misbehaving(how) for how in (*wanted, "well", "fine")]
    found = Served(tmp_path, [compilekernels.misbehaving], time_limit_s=8.0).run(tasks)
    outcomes = {how: found[_misbehaving(how).id] for how in (*wanted, "well", "fine")}
    for how, (outcome, detail) in wanted.items():
        assert outcomes[how]["outcome"] == outcome, how
        assert detail in outcomes[how]["detail"], how
    assert outcomes["well"]["outcome"] == outcomes["fine"]["outcome"] == "ok"
    left = [path.name for path in (tmp_path / "code").iterdir() if path.name.startswith("tmp.")]
    assert len(left) <= 2, "a process that died leaves no private folder"


def test_a_person_stops_the_compiling(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Served(tmp_path, [compilekernels.misbehaving]).run([_misbehaving("interrupt")])


def test_code_for_blackwell_and_what_does_not_fit(tmp_path: Path) -> None:
    fits, large = _product((64, 64, 32), 3), _product((128, 256, 64), 4)
    served = Served(tmp_path, [compilekernels.product])
    found = served.run([fits, large])
    code = Code.from_json(found[fits.id]["code"])
    assert elf.read(served.files[code.binary]).arch == 120
    metadata = json.loads(served.files[code.metadata])
    assert (metadata["num_warps"], metadata["num_stages"], metadata["target"]["arch"]) == (8, 3, 120)
    assert metadata["shared"] == code.shared_bytes <= BLACKWELL.shared_memory_bytes
    rejected = found[large.id]
    assert rejected["outcome"] == "out-of-shared-memory"
    assert rejected["limit_bytes"] == 101_376
    assert rejected["need_bytes"] > 101_376
    assert rejected["detail"] == f"needs {rejected['need_bytes']} bytes of shared memory; the GPU has 101376"


def test_a_launch_of_which_nothing_fits_ends_the_build_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    tasks = [_product((128, 256, 64), 4), _product((256, 256, 64), 3)]
    configs = tuple(Config((("BM", 128 * place),), num_warps=8, num_stages=4) for place in (1, 2))
    variant = Variant(tuple(task.specialization for task in tasks), ("size=1",))
    key = AutotuneKey((("M", 512),), (("a", "torch.bfloat16"),))
    facts = triton_api.facts(compilekernels.product)
    plan = Plan(
        profile=BLACKWELL.to_json(),
        versions={},
        implementations={},
        cases=(Case((("size", 1),)),),
        skipped=(),
        kernels={facts.kernel.name: facts},
        launches=(Launch(facts.kernel, key, configs, (variant,)),),
    )
    with pytest.raises(BuildError) as caught:
        build.run(
            _manifest(), tmp_path / "bundle.tar", Options(compile_only=True, jobs=2, plan=plan), lambda event: None
        )
    message = caught.value.message
    assert message.startswith(
        "compilekernels.product M=512 [a:bfloat16]: all 2 candidates are rejected (the least of them"
    )
    assert message.endswith("bytes of shared memory; the GPU has 101376); wanted one that can be used")
    assert len(caught.value.reasons) == 2
    assert not (tmp_path / "bundle.tar").exists()


def test_bytes_do_not_depend_on_the_folder_of_the_sources(tmp_path: Path) -> None:
    task = _product((64, 64, 32), 3)
    digests = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(SUPPORT / "compilekernels.py", folder)
        served = Served(folder, [compilekernels.product], jobs=1, PYTHONPATH=f"{folder}{os.pathsep}{_own_folder()}")
        digests.append(served.run([task])[task.id]["code"])
    assert digests[0] == digests[1]


def _own_folder() -> str:
    return str(Path(build.__file__).parents[1])


def _assembler(tmp_path: Path) -> str:
    path = tmp_path / "ptxas"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.8, V12.8.93"; exit 0; fi\n'
        "echo \"ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'\" >&2\nexit 255\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_assembler_without_the_target_is_one_line(tmp_path: Path) -> None:
    path = _assembler(tmp_path)
    served = Served(tmp_path, [compilekernels.product], TRITON_PTXAS_BLACKWELL_PATH=path)
    with pytest.raises(BuildError) as caught:
        served.run([_product((64, 64, 32), stages) for stages in (2, 3, 4)])
    assert caught.value.message == (
        f"compile: {path} V12.8.93: ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'"
        "; wanted an assembler that knows the gpu target"
    )
    assert "TRITON_PTXAS_BLACKWELL_PATH" in str(caught.value.hint)


def test_compilers_are_processes_and_not_threads(tmp_path: Path) -> None:
    """Each forked compiler has one thread that runs Python, and the server itself compiles nothing."""
    seen: list[tuple[int, int]] = []
    task = _misbehaving("hang")
    served = Served(tmp_path, [compilekernels.misbehaving], jobs=3, time_limit_s=2.0)
    with served._server as server:
        server.facts()
        pid = server._child.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        seen = [(int(child), len(list(Path(f"/proc/{child}/task").iterdir()))) for child in children]
        server.compile([task], lambda task, data: None)
    assert len(seen) == 3
    assert all(threads == 1 for _, threads in seen)


# ---------------------------------------------------------------------------------------------- a whole build


KERNELS = ["scale", "shift", "accumulate", "wrong_at_128"]


def _manifest(**compile_: bool) -> Manifest:
    return Manifest(
        format=1,
        name="toy-sm120",
        profile=BLACKWELL,
        plugin="toyworkload:WORKLOAD",
        section={"sizes": [100, 128], "kernels": KERNELS},
        measure=MeasurePolicy(),
        compile=CompileOptions(**compile_),
        text=b"name: toy-sm120\n",
        source="toy.yaml",
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compiled") / "compiled.tar"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(SUPPORT))
        build.build(_manifest(), output, compile_only=True, jobs=2)
    return output


def test_a_compile_only_bundle_holds_every_variant_of_every_candidate(compiled: Path) -> None:
    held = bundle.read(compiled)
    assert held.made == "compiled-only"
    assert held.choices == ()
    tasks = tasks_of(held.plan)
    entries = {(entry.kernel.to_json(), entry.specialization.digest) for entry in held.entries.values()}
    assert entries == {task.id for task in tasks}
    assert len({variant for launch in held.plan.launches for variant in launch.variants}) > len(held.plan.launches) - 1
    archs = Counter(elf.read(entry.binary).arch for entry in held.entries.values())
    assert archs == {120: len(tasks)}
    assert Counter(line["outcome"] for line in held.record) == {"ok": held.plan.num_candidates}
    assert not (compiled.parent / "compiled.tar.work").exists()


def test_a_compile_only_bundle_gives_its_code_back(compiled: Path, tmp_path: Path) -> None:
    held = bundle.read(compiled)
    files = Files(tmp_path)
    known = packing.take_code(held, files)
    assert known.keys() == {task.id for task in tasks_of(held.plan)}
    for data in known.values():
        code = Code.from_json(data["code"])
        assert files.sound(code.binary)
        assert files.sound(code.metadata)


def test_measuring_for_another_gpu_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BuildError, match="GPU: device 0 is not there; this process sees no CUDA GPU") as caught:
        build.build(_manifest(), tmp_path / "bundle.tar")
    assert caught.value.exit_code == 6
    assert "--compile-only" in str(caught.value.hint)


def test_two_compilations_give_the_same_bytes(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    build.build(_manifest(), tmp_path / "again.tar", compile_only=True, jobs=1)
    assert (tmp_path / "again.tar").read_bytes() == compiled.read_bytes()


def test_a_broken_file_of_an_earlier_build_is_compiled_again(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    class StopError(Exception):
        pass

    def stop(event: Any) -> None:
        if event.kind == "phase" and event.phase == "pack":
            raise StopError

    output = tmp_path / "bundle.tar"
    plan = bundle.read(compiled).plan
    options = Options(compile_only=True, jobs=2, plan=plan)
    with pytest.raises(StopError):
        build.run(_manifest(), output, options, stop)
    entry = next(iter(bundle.read(compiled).entries.values()))
    files = Files(tmp_path / "bundle.tar.work" / "code")
    files.path(digest.of_bytes(entry.binary)).write_bytes(b"torn")
    events: list[Any] = []
    build.run(_manifest(), output, options, events.append)
    assert output.read_bytes() == compiled.read_bytes()
    counted = [event for event in events if event.kind == "progress" and event.phase == "compile"]
    assert 1 <= len(counted) - 1 <= 2, "what was sound is not compiled again"
