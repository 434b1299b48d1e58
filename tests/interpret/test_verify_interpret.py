"""What ``verify --on-device`` and ``--rebench`` find out by running, with Triton's interpreter in the GPU's place."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toyworkload

from kernelbake import build, bundle, cli, host, levels, planner, profiles, rebench
from kernelbake.build import Options
from kernelbake.bundle import Bundle, Contents
from kernelbake.levels import Level, Outcome, Request
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy
from kernelbake.numerics import Arguments, Result
from kernelbake.outputs import Verdict, judge
from kernelbake.summaries import described, written

SUPPORT = Path(toyworkload.__file__).parent
POLICY = MeasurePolicy(warmup_ms=0.0, samples_ms=4.0, min_samples=5, max_samples=15, rounds=2, max_extra_rounds=1)


@pytest.fixture(autouse=True)
def _path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tensors are small


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "bundle.tar"
    profile, section = (
        profiles.load("interpreter"),
        {"sizes": [100, 256], "kernels": ["scale", "shift", "accumulate", "mark"]},
    )
    plugin, compile_ = "toyworkload:WORKLOAD", CompileOptions()
    manifest = Manifest(1, "toy", profile, plugin, section, POLICY, compile_, b"name: toy\n", "toy.yaml")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(SUPPORT))
        patched.setenv("OMP_NUM_THREADS", "1")
        plan = planner.plan(plugin, section, profile, interpreted=True)
        fingerprint = host.fingerprint(profile, plan.kernels.values(), build=True)
        build.run(manifest, output, Options(plan=plan, fingerprint=fingerprint), lambda event: None)
    return output


def _changed(path: Path, to: Path, record: Callable[[Mapping[str, Any]], Mapping[str, Any]], **fields: Any) -> Path:
    """A sound bundle that says something else."""
    held = bundle.read(path)
    parts = {field.name: getattr(held, field.name, None) for field in dataclasses.fields(Contents)}
    parts |= {"entries": dict(held.entries), "libs": dict(held.libs), "line_info": False, **fields}
    bundle.write(to, Contents(**{**parts, "record": tuple(map(record, held.record))}))
    return to


def _level(path: Path, name: str, **request: Any) -> Level:
    report = levels.verify(path, Request(**request))
    return next(level for level in report.levels if level.name == name)


def _recorded(held: Bundle) -> dict[str, list[dict[str, Any]]]:
    """By kernel: what is recorded of each of its launches."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in held.record:
        found.setdefault(line["kernel"].partition(":")[2], []).extend(line.get("outputs", {}).values())
    return found


def test_every_winners_outputs_are_recorded_in_the_largest_case_that_meets_it(built: Path) -> None:
    held = bundle.read(built)
    recorded = _recorded(held)
    launches = sum(len(launch.variants) for launch in held.plan.launches)
    assert sum(map(len, recorded.values())) == launches
    x = torch.randn(256, generator=torch.Generator("cpu").manual_seed(POLICY.seed))
    [large] = [one for one in recorded["scale"] if one["tensors"][0]["shape"] == [256]]
    assert large["case"] == held.plan.cases[-1].id
    [y] = large["tensors"]
    wanted = (2.0 * x).double()
    assert (y["argument"], y["at"], y["dtype"], y["not_finite"]) == ("y", 1, "float32", 0)
    assert y["digest"] == described(2.0 * x)["digest"]
    assert y["norm"] == pytest.approx(float(wanted.norm()), rel=1e-8)
    assert y["sum"] == pytest.approx(float(wanted.sum()), rel=1e-7)


def test_the_same_machine_gives_the_same_bits(built: Path) -> None:
    level = _level(built, "device", on_device=True)
    assert level.outcome is Outcome.PROVED, level
    assert {one["verdict"] for one in level.findings} == {"same bits"}
    assert {one["same_inputs"] for one in level.findings} == {True}
    count = len(level.findings)
    assert (
        level.text
        == f"the interpreter runs; in the steps of 2 cases, of {count} launches {count} gave the recorded bits"
    )


def test_only_what_a_launch_writes_counts(built: Path) -> None:
    """The other half of its outputs holds something else in every process; the build's is not recorded."""
    held = bundle.read(built)
    seeded = torch.Generator("cpu").manual_seed(POLICY.seed)
    x = [torch.randn(256, generator=seeded) for _ in range(4)][-1]
    [marked] = [one for one in _recorded(held)["mark"] if one["tensors"][0]["shape"] == [512]]
    loss, positive = marked["tensors"]
    rest = torch.zeros(256)
    assert loss["digest"] == described(torch.cat([x * x, rest]))["digest"]
    assert positive["digest"] == described(torch.cat([x > 0, rest.bool()]))["digest"]
    assert marked["inputs"].startswith("sha256:")


def test_other_outputs_than_recorded_are_told_apart_by_their_size(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``scale`` has other bits on record, ``shift`` other values, ``accumulate`` nothing."""

    def record(line: Mapping[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(dict(line))
        for outputs in changed.get("outputs", {}).values():
            for tensor in outputs["tensors"]:
                if not line["kernel"].endswith(":mark"):
                    tensor["digest"] = "sha256:" + "0" * 64
                if line["kernel"].endswith(":shift"):
                    tensor["sketch"] = [1.01 * number for number in tensor["sketch"]]
        if line["kernel"].endswith(":accumulate"):
            changed.pop("outputs", None)
        return changed

    path = _changed(built, tmp_path / "bundle.tar", record)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(path), "--on-device", "--json"])
    assert ended.value.code == 3
    out, err = capsys.readouterr()
    level = next(level for level in json.loads(out)["levels"] if level["level"] == "device")
    verdicts = {(one["name"].split()[0], one["verdict"]) for one in level["findings"]}
    assert verdicts == {
        ("toykernels.scale", "within tolerance"),
        ("toykernels.shift", "differs"),
        ("toykernels.accumulate", "not recorded"),
        ("toykernels.mark", "same bits"),
    }
    assert "not write what was recorded" in err
    far = (
        r"toykernels\.shift \(not tuned\), in size=256: `x` is off by about \d\.\d\de-0[23] of its norm; "
        r"allowed 1e-03, on the recorded inputs"
    )
    assert re.search(far, err), err


def test_a_winner_wins_again_and_a_slow_one_is_beaten(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``scale`` is launched with eight programs, of 32 elements, where two do, and with four where one does.

    The rest is as built. On a busy machine one of the two may be too uncertain to be called beaten.
    """
    held = bundle.read(built)

    def worse(choice: Any) -> Any:
        launch = held.plan.launch(choice.id)
        assert launch is not None
        if choice.kernel.qualname != "scale":
            return choice
        place = [dict(candidate.meta)["BLOCK"] for candidate in launch.candidates].index(32)
        entries = {variant.specializations[place].token: None for variant in launch.variants}
        return dataclasses.replace(choice, winner=launch.candidates[place], entries=entries)

    path = _changed(built, tmp_path / "bundle.tar", dict, choices=tuple(map(worse, held.choices)))
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(path), "--rebench", "99", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 6, err
    level = next(level for level in json.loads(out)["levels"] if level["level"] == "rebench")
    standings = {(one["name"].split()[0], one["standing"]) for one in level["findings"]}
    assert ("toykernels.scale", "beaten") in standings
    assert {standing for name, standing in standings if name != "toykernels.scale"} <= {"still the winner", "tied"}
    beaten = r"toykernels\.scale n=\d+ .*: beaten: `BLOCK=32 .*` \d+\.\d{4} ms, `BLOCK=\d+ .*\(\+\d+\.\d%\)"
    assert re.search(beaten, err), err


def test_a_seed_samples_the_same_keys(built: Path) -> None:
    held = bundle.read(built)
    choosable = [place for place, launch in enumerate(held.plan.launches) if len(launch.candidates) > 1]
    assert rebench.sampled(held, 99, 0) == choosable
    drawn = [tuple(rebench.sampled(held, 2, seed)) for seed in range(20)]
    assert drawn == [tuple(rebench.sampled(held, 2, seed)) for seed in range(20)]
    assert len(set(drawn)) > 1


# ---------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_sketch_tells_how_far_two_tensors_are_apart(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    one = torch.randn(1 << 16, generator=generator, dtype=torch.float64)
    errors = []
    for number in range(4):
        gap = torch.randn(1 << 16, generator=generator, dtype=torch.float64) * 10.0**-number
        then, now = one.to(dtype), (one + gap).to(dtype)
        real = float((now.double() - then.double()).norm() / then.double().norm())
        _, error, _ = judge(
            [{"argument": "y", "at": 0, **described(then)}], [{"argument": "y", "at": 0, **described(now)}], 9
        )
        assert error is not None
        errors.append(error / real)
    assert all(0.5 < ratio < 1.7 for ratio in errors), errors


def test_one_wrong_row_shows_in_a_sketch() -> None:
    """A structured difference is as visible as noise: signs depend on the place of every single element."""
    then = torch.ones(512, 1024)
    now = then.clone()
    now[7] = -1.0
    tensors = [[{"argument": "y", "at": 0, **described(tensor)}] for tensor in (then, now)]
    _, error, _ = judge(tensors[0], tensors[1], 9)
    assert error == pytest.approx(2 / math.sqrt(512), rel=0.5)


def test_what_a_launch_left_alone_does_not_count() -> None:
    """The rest of an output is what the allocator left there."""
    found = []
    for rubbish in (7.0, 8.0):
        x = torch.full((6,), rubbish)
        arguments = Arguments(["x"], [x], 0.02)
        copy_ = arguments.replaced(x)
        copy_[:4] = 1.0
        plain = arguments.contents(arguments.changed())
        filled = arguments.poison([0])
        copy_[:4] = 1.0
        found.append(written(arguments, Result(plain, arguments.contents(filled)), (), {}))
    assert found[0] == found[1]
    assert found[0][0]["sum"] == 4.0


def test_a_digest_feels_every_byte_place_and_length() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    digests = {described(data[:length])["digest"] for length in range(100)}
    for place in range(100):
        changed = data.clone()
        changed[place] ^= 0x80
        digests.add(described(changed)["digest"])
    swapped = data.reshape(-1, 4).flip(0).reshape(-1)
    digests |= {described(swapped)["digest"], described(data)["digest"]}
    assert len(digests) == 202
    table = data.reshape(10, 10)
    assert described(table.t())["digest"] == described(table.t().contiguous())["digest"] != described(table)["digest"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_a_sketch_of_integers_tells_how_many_differ(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    then = torch.randint(0, 2, (1 << 16,), generator=generator).to(dtype)
    for number in (1, 30, 5000):
        now = then.clone()
        now[:number] = 1 - now[:number].to(torch.int64)
        tensors = [[{"argument": "y", "at": 0, **described(tensor)}] for tensor in (then, now)]
        verdict, share, _ = judge(*tensors, 0.5, same_inputs=False)
        assert share is not None
        assert 0.5 < share * len(then) / number < 1.7
        assert (verdict is Verdict.CLOSE) == (number <= 30)
    facts = described(then)
    assert set(facts) == {"dtype", "shape", "digest", "sketch"}


def test_numbers_out_of_range_are_left_out() -> None:
    odd = described(torch.tensor([1.0, math.nan, math.inf]))
    assert (odd["not_finite"], odd["norm"], odd["sum"]) == (2, 1.0, 1.0)
    assert "sketch" not in described(torch.full((4,), 1e300, dtype=torch.float64))
    assert described(torch.empty(0))["norm"] == 0.0


def test_descriptions_of_other_tensors_differ() -> None:
    one = [{"argument": "y", "at": 0, **described(torch.ones(4))}]
    assert judge(one, one, 0.0) == (Verdict.SAME, 0.0, "")
    verdict, _, detail = judge(one, [{**one[0], "dtype": "float64"}], 0.1)
    assert (verdict, detail) == (Verdict.DIFFERS, "dtype of `y` is `float64`; recorded `float32`")
