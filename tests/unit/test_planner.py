"""The planner's side of the planning process: its environment, its conversation, and every way in which it can end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import samples

from kernelbake import planner, profiles
from kernelbake.bounds import Limits
from kernelbake.errors import InputError, PlanError, UnsupportedError
from kernelbake.workload import Footprint, PartPeak

PROFILE = profiles.load("h200")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the planning process by a script that finds its request in ``request`` and answers with ``say``."""

    def use(body: str) -> None:
        script = tmp_path / "child.py"
        head = """
            import json, os, sys, time
            request = json.loads(sys.stdin.readline())
            def say(**event):
                print(json.dumps(event), flush=True)
        """
        script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        monkeypatch.setattr(planner, "command", lambda: [sys.executable, str(script)])

    return use


def plan(**options: Any) -> Any:
    return planner.plan("toy", {"sizes": [1]}, PROFILE, interpreted=False, **options)


def test_a_plan_comes_back_as_it_was_sent(child: Any, tmp_path: Path) -> None:
    sent = samples.contents().plan
    held = [Footprint(case, (PartPeak("step", 0, 512),)) for case in sent.cases]
    package = str(Path(planner.__file__).resolve().parent)
    event = {"event": "plan", "package": package, "plan": sent.to_json()}
    event["footprints"] = [item.to_json() for item in held]
    (tmp_path / "event.json").write_text(json.dumps(event))
    child(f"say(**json.load(open({str(tmp_path / 'event.json')!r})))")
    with planner.started(interpreted=False) as started:
        assert started.plan("toy", {"sizes": [1]}, PROFILE) == sent
        assert started.footprints == tuple(held)


def test_another_kernelbake_in_the_child_is_refused_by_its_place(child: Any) -> None:
    child("say(event='plan', package='/elsewhere/kernelbake', plan=None)")
    with pytest.raises(InputError, match="found kernelbake in `/elsewhere/kernelbake`; wanted the one of this process"):
        plan()


def test_a_process_that_ignores_variables_of_python_has_a_child_that_does() -> None:
    script = (
        "from kernelbake import planner; found = planner.environment({'PYTHONPATH': '/modules', 'PYTHONHASHSEED': '1', "
        "'HOME': '/home'}, interpreted=False); print(found['PYTHONPATH'], found['HOME'], 'PYTHONHASHSEED' in found)"
    )
    folder = str(Path(planner.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {folder!r}); {script}"
    done = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder} /home False\n"


def test_the_request_holds_all_that_decides(child: Any, tmp_path: Path) -> None:
    child("say(event='refused', kind='PlanError', message=json.dumps(request), hint=None, reasons=[])")
    with pytest.raises(PlanError) as caught:
        plan(paths=[tmp_path / "modules"], limits=Limits(max_variants=3))
    request = json.loads(caught.value.message)
    assert request == {
        "plugin": "toy",
        "section": {"sizes": [1]},
        "profile": PROFILE.to_json(),
        "interpreted": False,
        "paths": [str(tmp_path / "modules")],
        "limits": {"max_variants": 3, "max_elements": 1 << 31},
    }


def test_progress_is_passed_on(child: Any) -> None:
    child("""
        for done in range(3):
            say(event='progress', done=done, total=3, message=f'case {done}')
        say(event='refused', kind='PlanError', message='enough', hint=None, reasons=[])
    """)
    seen: list[tuple[int, int, str]] = []
    with pytest.raises(PlanError):
        plan(on_progress=lambda *event: seen.append(event))
    assert seen == [(0, 3, "case 0"), (1, 3, "case 1"), (2, 3, "case 2")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("PlanError", PlanError),
        ("InputError", InputError),
        ("FaultsError", InputError),
        ("UnsupportedError", UnsupportedError),
        ("SomethingNew", PlanError),
    ],
)
def test_a_refusal_keeps_its_kind_its_reasons_and_its_hint(child: Any, kind: str, expected: type[Exception]) -> None:
    child(f"say(event='refused', kind={kind!r}, message='open: no', hint='do', reasons=['one', 'two'])")
    with pytest.raises(expected) as caught:
        plan()
    error: Any = caught.value
    assert (type(error), error.message, error.hint, error.reasons) == (expected, "open: no", "do", ("one", "two"))


def test_a_process_that_dies_is_reported_with_its_last_words(child: Any) -> None:
    child("print('Segmentation fault in a kernel library', file=sys.stderr); os._exit(11)")
    with pytest.raises(PlanError, match="ended with status 11; wanted a plan") as caught:
        plan()
    assert caught.value.reasons == ("Segmentation fault in a kernel library",)


def test_a_process_that_never_reads_is_no_broken_pipe(
    child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "early.py"
    script.write_text("import sys; print('no torch here', file=sys.stderr); sys.exit(1)")
    monkeypatch.setattr(planner, "command", lambda: [sys.executable, str(script)])
    with planner.started(interpreted=False) as started:
        started._process.wait()
        with pytest.raises(PlanError, match="status 1") as caught:
            started.plan("toy", {"text": "x" * 1_000_000}, PROFILE)
    assert caught.value.reasons == ("no torch here",)


def test_an_interrupt_ends_the_process(child: Any) -> None:
    child("""
        say(event='progress', done=os.getpid(), total=1, message='')
        time.sleep(600)
    """)
    pids: list[int] = []

    def interrupt(done: int, total: int, message: str) -> None:
        pids.append(done)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        plan(on_progress=interrupt)
    assert time.monotonic() - start < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_environment_is_clean_but_for_what_chooses_implementations() -> None:
    inherited = {
        "HOME": "/home/someone",
        "PATH": "/bin",
        "TRITON_CACHE_DIR": "/cache",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
        "FLA_CACHE_MODE": "full",
        "FLA_CONFIG_DIR": "/configs",
        "FLA_GPU_NAME": "NVIDIA_H100",
        "FLA_FLASH_QLA": "0",
        "PYTHONPATH": "/modules",
    }
    found = planner.environment(inherited, interpreted=False)
    gone = {"TRITON_CACHE_DIR", "TRITON_INTERPRET", "FLA_CONFIG_DIR", "FLA_GPU_NAME"}
    assert not gone & found.keys()
    assert Path(found["TORCHINDUCTOR_CACHE_DIR"]) == Path(planner.__file__).parent
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert (found["FLA_CACHE_MODE"], found["FLA_CACHE_RESULTS"]) == ("disabled", "0")
    assert (found["FLA_FLASH_QLA"], found["HOME"], found["PATH"]) == ("0", "/home/someone", "/bin")
    assert found["PYTHONPATH"].split(os.pathsep)[0] == "/modules"
    assert Path(found["PYTHONPATH"].split(os.pathsep)[-1], "kernelbake").is_dir()


def test_the_interpreter_is_asked_for_in_the_environment() -> None:
    assert planner.environment({"TRITON_INTERPRET": "0"}, interpreted=True)["TRITON_INTERPRET"] == "1"


def test_without_a_folder_for_temporary_files_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is mounted read-only; torch would not load there."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(InputError, match="temporary files: No such file or directory; wanted a folder") as caught:
        plan()
    assert "TMPDIR" in str(caught.value.hint)
