"""Manifests: every fault at once with path and line, nothing guessed, nothing dangerous read."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fakeplugin
import pytest

from kernelbake import gpu, manifest, profiles, workload
from kernelbake.errors import BuildError, InputError, ManifestError

ROOT = Path(__file__).parents[2]
GOOD = """\
format: 1
name: sample
gpu: {profile: h200}
workload:
  plugin: fake
  sizes: [16, 32]
"""


@pytest.fixture(autouse=True)
def _fake_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workload.load
    monkeypatch.setattr(workload, "load", lambda name: fakeplugin.FakeWorkload() if name == "fake" else real(name))


def faults(text: str | bytes) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        manifest.parse(text.encode() if isinstance(text, str) else text, "sample.yaml")
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("manifest `sample.yaml`: ")
    return list(caught.value.reasons)


def test_a_good_manifest_has_every_default() -> None:
    found = manifest.parse(GOOD.encode(), "sample.yaml")
    assert found.name == "sample"
    assert found.profile == profiles.load("h200")
    assert (found.plugin, found.section) == ("fake", {"sizes": [16, 32], "label": "none"})
    assert found.measure == manifest.MeasurePolicy()
    assert found.compile == manifest.CompileOptions(line_info=False, fp_fusion=True)
    assert found.text == GOOD.encode()
    assert not found.interpreted


def test_a_resolved_manifest_comes_back() -> None:
    found = manifest.parse(GOOD.encode(), "sample.yaml")
    assert manifest.Manifest.from_resolved(found.resolved(), found.text, found.source) == found


@pytest.mark.parametrize("broken", [{}, {"format": 1}, {"measure": {"rounds": 0}}])
def test_a_broken_resolved_manifest_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="bundle: the resolved manifest cannot be read"):
        manifest.Manifest.from_resolved(broken)


def test_all_faults_are_listed_at_once_in_the_order_of_lines() -> None:
    text = """\
format: 2
name: 3.10
gpu: {profile: h2000}
workload:
  plugin: fake
  sizes: [32, x, 16]
  label: 0x120
  extra: 1
measure:
  rounds: many
  sed: 1
  tolerance: 2
measure: {}
colour: blue
"""
    assert faults(text) == [
        "line 1, format: `2`; this version of kernelbake reads `1`",
        "line 2, name: found the number `3.10`; wanted text (write it in quotes)",
        "line 3, gpu.profile: device profile: `h2000` is unknown; known: "
        + ", ".join(f"`{name}`" for name in profiles.names()),
        "line 6, workload.sizes.1: found `x`; wanted a whole number",
        "line 8, workload.extra: unknown key",
        "line 10, measure.rounds: found the text `many`; wanted a whole number",
        "line 11, measure.sed: unknown key; did you mean `seed`",
        "line 12, measure.tolerance: found the number `2`; wanted a number below 1.0",
        "line 13, measure: the key stands twice; the first is on line 9",
        "line 14, colour: unknown key; known: `format`, `name`, `gpu`, `workload`, `measure`, `compile`",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("12:30:45", "12:30:45"),
        ("0x120", "0x120"),
        ("0o17", "0o17"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("+5", "+5"),
        ("2.10.1", "2.10.1"),
        ("'2.10'", "2.10"),
        ('"3.10"', "3.10"),
        ("NVIDIA  H200 ", "NVIDIA  H200"),
        ("2024-01-01", "2024-01-01"),
        ("True", "True"),
        ("Null", "Null"),
        ("a/(b", "a/(b"),
    ],
)
def test_text_stays_as_it_is_written(text: str, value: str) -> None:
    found = manifest.parse(GOOD.replace("  plugin", f"  label: {text}\n  plugin").encode(), "x")
    assert found.section["label"] == value


@pytest.mark.parametrize("text", ["3.10", "3.7", "288", "6e-4", "true", "[a]", "-1"])
def test_what_is_no_text_is_refused_where_text_is_wanted(text: str) -> None:
    assert [line.partition(":")[0] for line in faults(GOOD.replace("sample", text))] == ["line 2, name"]


@pytest.mark.parametrize(
    ("text", "value"), [("6e-4", 6e-4), ("6.0e-4", 6e-4), ("1E-2", 1e-2), (".5", 0.5), ("5.e-1", 0.5), ("0", 0.0)]
)
def test_numbers_are_numbers(text: str, value: float) -> None:
    found = manifest.parse((GOOD + f"measure: {{tie_threshold: {text}}}\n").encode(), "x")
    assert found.measure.tie_threshold == value
    assert type(found.measure.tie_threshold) is float


@pytest.mark.parametrize("text", ["'6e-4'", "1e5", "1.0", "yes", "null", ".inf", "1e999", "-1", "1_000"])
def test_what_is_no_whole_number_is_refused_by_its_field(text: str) -> None:
    [fault] = faults(GOOD + f"measure: {{rounds: {text}}}\n")
    assert fault.startswith("line 7, measure.rounds: ")


@pytest.mark.parametrize("text", ["86401", "1e300", "0"])
def test_a_limit_that_no_wait_can_keep_is_refused(text: str) -> None:
    [fault] = faults(GOOD + f"measure: {{time_limit_s: {text}}}\n")
    assert fault.startswith("line 7, measure.time_limit_s: ")


def test_a_policy_in_disorder_is_a_fault() -> None:
    found = faults(GOOD + "measure: {min_samples: 9, max_samples: 3}\n")
    assert found == ["line 7, measure: `min_samples` 9 is above `max_samples` 3; wanted them the other way round"]


def test_faults_of_the_plug_in_and_of_kernelbake_come_together() -> None:
    text = GOOD.replace("[16, 32]", "[32, 16]").replace("h200", "h999")
    assert [line.partition(":")[0] for line in faults(text)] == ["line 3, gpu.profile", "line 6, workload.sizes"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workload: {sizes: [1]}", "workload.plugin: missing; wanted the name of a workload's plug-in"),
        ("workload: {plugin: 7}", "workload.plugin: found the number `7`; wanted the name of a workload's plug-in"),
        ("workload: {plugin: nobody}", "workload.plugin: workload: `nobody` is not installed"),
        ("workload: 5", "workload: found the number `5`; wanted a mapping"),
        ("workload:", "workload: found nothing; wanted a mapping"),
    ],
)
def test_a_workload_that_cannot_be_asked(text: str, message: str) -> None:
    head = GOOD.partition("workload")[0]
    [fault] = faults(head + text + "\n")
    assert fault.startswith(f"line 4, {message}")


@pytest.mark.parametrize("text", ["{}", "{profile: h200, custom: {}}"])
def test_the_gpu_is_named_or_written_out(text: str) -> None:
    found = faults(GOOD.replace("{profile: h200}", text))
    assert "line 3, gpu: wanted either `profile` or `custom`" in found


def test_the_gpu_of_this_machine_is_asked_for_where_nothing_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Probe:
        def __init__(self, environment: Mapping[str, str], log: Path) -> None:
            assert log.parent.is_dir()

        def answer(self) -> dict[str, Any]:
            asked.append("once")
            return {"profile": {**profiles.load("h200").to_json(), "name": "NVIDIA Mine"}, "uuid": "GPU-1"}

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr(gpu, "Probe", Probe)
    text = GOOD.replace("h200", "running")
    assert manifest.parse(text.encode(), "x").profile.name == "NVIDIA Mine"
    assert asked == ["once", "closed"]
    faults(text.replace("[16, 32]", "[]"))
    assert asked == ["once", "closed"]


def test_no_gpu_to_ask_is_a_build_error_that_names_the_profiles() -> None:
    class Probe:
        def __init__(self, environment: Mapping[str, str], log: Path) -> None:
            pass

        def answer(self) -> dict[str, Any]:
            raise BuildError("GPU: device 0 is not there", hint="something else")

        def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "Probe", Probe)
        with pytest.raises(BuildError, match="GPU: device 0 is not there") as caught:
            manifest.parse(GOOD.replace("h200", "running").encode(), "x")
    assert str(caught.value.hint).startswith("name a device profile instead of `running`: b200, h100")


CUSTOM = """\
  custom:
    id: mine
    name: NVIDIA Something
    capability: [12, 1]
    sm_count: 20
    shared_memory_bytes: 101376
    shared_memory_per_sm_bytes: 102400
    total_memory_bytes: 1000000000
    l2_bytes: 1000000
"""


def test_a_profile_written_out() -> None:
    found = manifest.parse(GOOD.replace(" {profile: h200}", "\n" + CUSTOM.rstrip()).encode(), "x")
    assert (found.profile.gpu_target, found.profile.sm_count, found.profile.backend) == ("sm_121", 20, "cuda")


def test_faults_of_a_profile_written_out() -> None:
    text = CUSTOM.replace("sm_count: 20", "sm_count: 0").replace("[12, 1]", "[12]").replace("l2_bytes", "l2_byte")
    found = faults(GOOD.replace(" {profile: h200}", "\n" + text.rstrip()))
    assert [line.partition(":")[0] for line in found] == [
        "line 4, gpu.custom.l2_bytes",
        "line 7, gpu.custom.capability",
        "line 8, gpu.custom.sm_count",
        "line 12, gpu.custom.l2_byte",
    ]


# ---------------------------------------------------------------------------------------------- hostile files


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))

HOSTILE = {
    "aliases": (BOMB, "wanted no anchors and no aliases"),
    "merge key": ("<<: {a: 1}\n", "unknown key"),
    "tag": ("name: !!python/object/apply:os.system [exit]\n", "wanted no tags"),
    "local tag": ("name: !thing 1\n", "wanted no tags"),
    "deep list": ("[" * 60_000, "nested deeper than"),
    "deep mapping": ("{a: " * 5000, "nested deeper than"),
    "deep block": ("".join(" " * n + "a:\n" for n in range(300)), "nested deeper than"),
    "huge": ("- x\n" * 200_000, "wanted at most"),
    "many keys": ("".join(f"k{n}: 1\n" for n in range(6_000)), "5,904 more faults"),
    "one long line": ("name: " + "x" * 60_000 + "\n", "wanted up to 100 letters"),
    "long number": ("measure: {rounds: " + "9" * 60_000 + "}\n", "wanted a whole number"),
    "not utf-8": (b"name: \xff\n", "is not UTF-8"),
    "utf-16": ("name: x\n".encode("utf-16"), "is not UTF-8"),
    "nul": (b"name: \x00\n", "the character `U+0000`"),
    "empty": ("", "wanted a mapping"),
    "only a comment": ("# nothing\n", "wanted a mapping"),
    "a list": ("[1, 2]\n", "wanted a mapping"),
    "a text": ("hello\n", "wanted a mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "a second document"),
    "yaml 1.1": ("%YAML 1.1\n---\nname: no\n", "wanted YAML 1.2"),
    "key that is a list": ("? [a]\n: 1\n", "a key that is no text"),
    "key that is a number": ("1: a\n", "the key `1` is no text"),
    "key that is null": ("~: a\n", "the key `~` is no text"),
    "half a pair of surrogates": ('name: "\\ud800"\n', "half of a pair of surrogates"),
    "half a pair in a key": ('"\\ud800": 1\n', "half of a pair of surrogates"),
    "a line end of other systems": ("name: a\u2028b\n", "the character `U+2028`"),
    "tabs": ("a:\n\t- 1\n", "wanted YAML 1.2"),
    "open quote": ("name: 'x\n", "wanted YAML 1.2"),
    "infinity": ("measure: {rounds: .inf}\n", "is not finite"),
    "not a number": ("measure: {rounds: .nan}\n", "is not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_quickly(name: str) -> None:
    text, message = HOSTILE[name]
    start = time.process_time()
    found = faults(text)
    assert any(message in line for line in found), found
    assert time.process_time() - start < 5.0


def test_a_byte_order_mark_is_no_fault() -> None:
    assert manifest.parse(b"\xef\xbb\xbf" + GOOD.encode(), "x").name == "sample"


def test_a_duplicate_key_deep_inside_is_found_by_line() -> None:
    assert faults(GOOD + "measure:\n  rounds: 3\n  seed: 1\n  rounds: 4\n") == [
        "line 10, measure.rounds: the key stands twice; the first is on line 8"
    ]


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wanted a file that can be read"):
        manifest.load(tmp_path)


def test_reading_stops_behind_the_limit(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(2**33)  # sparse: reading all of it would take 8 GiB of memory
    with pytest.raises(ManifestError, match="wanted at most"):
        manifest.load(large)


# ---------------------------------------------------------------------------------------------- finding


def test_a_path_goes_before_the_folder_and_the_folder_before_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert manifest.find("sm120.yaml") == manifest.PACKAGED / "sm120.yaml"
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "sm120.yaml").write_text(GOOD)
    assert manifest.find("sm120.yaml") == Path("manifests/sm120.yaml")
    (tmp_path / "sm120.yaml").write_text(GOOD)
    assert manifest.find("sm120.yaml") == Path("sm120.yaml")


def test_a_name_that_is_nowhere_lists_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        manifest.find("sm999.yaml")
    assert all(name in str(caught.value.hint) for name in manifest.names())


def test_the_checkout_and_the_package_hold_the_same_manifests() -> None:
    top = ROOT / "manifests"
    assert {path.name: path.read_bytes() for path in top.glob("*")} == {
        path.name: path.read_bytes() for path in manifest.PACKAGED.glob("*")
    }
    assert manifest.names() == ["cpu.yaml", "demo-sm120.yaml", "demo-sm90.yaml", "sm120.yaml", "sm90.yaml"]


def test_an_installed_package_has_the_manifests() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "manifests/*.yaml" in tool["package-data"]["kernelbake"]
    assert all((ROOT / package.replace(".", "/")).is_dir() for package in tool["packages"])


# ---------------------------------------------------------------------------------------------- packaged ones


def _axes(name: str) -> tuple[manifest.Manifest, Any]:
    found = manifest.load(manifest.find(name))
    plugin = workload.load(found.plugin)
    return found, plugin.cases(plugin.parse(found.section))


@pytest.mark.parametrize("name", manifest.names())
def test_packaged_manifests_have_no_fault_and_survive_their_own_resolution(name: str) -> None:
    found, cases = _axes(name)
    assert cases.planned
    plugin = workload.load(found.plugin)
    assert plugin.resolve(plugin.parse(found.section)) == found.section


@pytest.mark.parametrize(("name", "profile"), [("sm120.yaml", "rtx-pro-6000-blackwell"), ("sm90.yaml", "h200")])
def test_the_main_manifests_ask_for_what_they_promise(name: str, profile: str) -> None:
    found, cases = _axes(name)
    assert found.profile.id == profile
    target, drafter = found.section["target"], found.section["drafter"]
    assert (target["num_layers"], target["hidden_size"]) == (64, 5120)
    assert target["num_layers"] - target["num_layers"] // target["full_attention_interval"] == 48
    assert (target["linear_num_key_heads"], target["linear_num_value_heads"]) == (16, 48)
    assert (target["linear_key_head_dim"], target["linear_value_head_dim"]) == (128, 128)
    assert (drafter["num_layers"], drafter["num_heads"], drafter["num_kv_heads"]) == (5, 32, 8)
    assert (drafter["head_dim"], drafter["block_size"]) == (128, 16)
    pairs = {(case["bucket"], case["anchors"]) for case in cases.planned}
    buckets, anchors = (512, 1024, 2048, 3072, 4096), (128, 256, 512)
    assert pairs == {(bucket, count) for bucket in buckets for count in anchors if count <= bucket / 2}
    assert [(case["bucket"], case["anchors"]) for case, _ in cases.skipped] == [(512, 512)]
    assert all(reason for _, reason in cases.skipped)


def test_the_main_manifests_differ_in_their_gpu_only() -> None:
    one, two = (manifest.load(manifest.find(name)) for name in ("sm120.yaml", "sm90.yaml"))
    assert one.section == two.section
    assert (one.measure, one.compile) == (two.measure, two.compile)


def test_the_document_lists_every_key_with_its_default() -> None:
    text = (ROOT / "docs" / "manifest.md").read_text()
    for model in (manifest.MeasurePolicy, manifest.CompileOptions):
        defaults = model().to_json()
        shown = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in defaults.items()
        }
        absent = [name for name, value in shown.items() if f"| `{name}` | `{value}` |" not in text]
        assert not absent
    custom = [name for name in profiles.DeviceProfile.__dataclass_fields__ if name != "backend"]
    assert not [name for name in custom if f"| `{name}` |" not in text]
    assert not [name for name in profiles.names() if f"`{name}`" not in text]


@pytest.mark.parametrize("name", ["", ".", "nowhere.yaml", "x" * 5000])
def test_what_no_file_is_called_is_not_found(name: str) -> None:
    with pytest.raises(InputError, match="is neither a file nor a name"):
        manifest.find(name)
