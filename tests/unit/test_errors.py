"""Errors: the exit codes that both commands share, and what a refusal looks like."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from kernelbake import errors, workload
from kernelbake.errors import ExitCode, KernelbakeError

ROOT = Path(__file__).parents[2]


def _classes(base: type[KernelbakeError]) -> list[type[KernelbakeError]]:
    return [base, *(found for inner in base.__subclasses__() for found in _classes(inner))]


def test_the_codes_are_those_of_the_documents() -> None:
    assert {int(code) for code in ExitCode} == {*range(9), 130, 143}
    for document in ("README.md", "docs/glossary.md"):
        rows = re.findall(r"^\| (\d+(?:, \d+)*) \| ", (ROOT / document).read_text(), flags=re.MULTILINE)
        codes = {int(code) for row in rows for code in row.split(", ")}
        assert codes == {int(code) for code in ExitCode}, document


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.KernelbakeError, 1),
        (errors.InputError, 2),
        (errors.ManifestError, 2),
        (errors.BundleError, 3),
        (errors.SignatureError, 3),
        (errors.MisfitError, 4),
        (errors.UnsupportedError, 4),
        (errors.CoverageError, 5),
        (errors.FrozenMissError, 5),
        (errors.BuildError, 6),
        (errors.PlanError, 6),
        (errors.LockedError, 7),
    ],
)
def test_every_error_has_its_code(error: type[KernelbakeError], code: int) -> None:
    assert error.exit_code == code
    assert isinstance(error("x: y; wanted z"), KernelbakeError)


def test_an_error_shows_its_message_all_reasons_and_the_hint() -> None:
    error = errors.BundleError("bundle.tar: 2 faults; wanted none", hint="build it anew", reasons=["one", "two"])
    assert str(error) == "bundle.tar: 2 faults; wanted none\n  one\n  two\nhint: build it anew"
    assert (error.reasons, error.hint) == (("one", "two"), "build it anew")
    assert str(errors.InputError("short")) == "short"


def test_faults_of_a_plug_in_are_all_in_its_error() -> None:
    faults = [workload.Fault("axes.buckets.2", "found `x`; wanted a whole number"), workload.Fault("", "empty")]
    error = workload.FaultsError(faults)
    assert error.faults == tuple(faults)
    assert error.reasons == ("axes.buckets.2: found `x`; wanted a whole number", ": empty")
    assert error.exit_code == ExitCode.INPUT


def test_a_workload_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(errors.InputError, match="`nobody` is not installed; installed plug-ins: .*`dflash`"):
        workload.load("nobody")
    assert "dflash" in workload.names()


def test_a_workload_whose_module_does_not_import_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = importlib.metadata.EntryPoint("broken", "kernelbake.no_such_module:WORKLOAD", workload.GROUP)
    monkeypatch.setattr(workload, "_points", lambda: iter([broken]))
    with pytest.raises(errors.InputError, match="workload `broken`: its plug-in does not import: .*no_such_module"):
        workload.load("broken")


def test_every_class_says_what_it_means() -> None:
    silent = [found.__name__ for found in _classes(KernelbakeError) if not found.__doc__]
    assert not silent


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(0)", "its plug-in does not import: SystemExit: 0"),
        ("1 / 0", "its plug-in does not import: ZeroDivisionError: division by zero"),
        ("OTHER = None", "its plug-in does not import: AttributeError"),
        ("WORKLOAD = len", "its plug-in has no `parse`, `resolve`, `cases`, `open`, `implementations`"),
        (
            "class WORKLOAD:\n    parse = resolve = cases = open = implementations = oracles = print",
            "has no `prepare`;",
        ),
    ],
)
def test_a_plug_in_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    name = f"hostile_{len(body)}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("hostile", f"{name}:WORKLOAD", workload.GROUP)
    monkeypatch.setattr(workload, "_points", lambda: iter([point]))
    with pytest.raises(errors.InputError, match=said):
        workload.load("hostile")
