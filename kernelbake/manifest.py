"""The manifest: what a person asks to be baked. YAML in, a frozen value out, every fault at once with path and line.

The workload's own section is checked by its plug-in; kernelbake adds the lines. Device profiles are data
(``kernelbake/profiles``): a manifest names one, writes one out under ``gpu.custom``, or takes the GPU of this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from kernelbake import profiles, workload, yamlfile
from kernelbake.errors import BuildError, InputError, ManifestError
from kernelbake.profiles import DeviceProfile
from kernelbake.words import counted
from kernelbake.yamlfile import Document, Fault

FORMAT = 1
RUNNING = "running"
MAX_LIMIT_S = 86_400.0
"""A day; the system's waits take no number of any size."""
MAX_SHOWN = 100
"""Faults that a refusal lists; a file with more of them is no manifest."""

PACKAGED = Path(__file__).parent / "manifests"
"""The manifests that come with the package; in a checkout, ``manifests`` at the top is the same folder."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FROZEN = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MeasurePolicy(pydantic.BaseModel):
    """How candidates are measured. Part of a build's identity: another policy makes another journal.

    Args:
        warmup_ms: device time for which a candidate runs before its first sample, in ms.
        samples_ms: device time spent on one candidate's samples in one round, in ms.
        min_samples: samples of one candidate in one round at least, however long they take; and all that it makes in
            the first of several rounds.
        max_samples: samples of one candidate in one round at most, however short they are.
        rounds: how often all candidates of a key that are not hopeless are sampled in turn.
        max_extra_rounds: further rounds for those that may still change the winner.
        hopeless_ratio: a candidate this many times slower than the fastest is sampled no more.
        tie_threshold: relative difference of times within which two candidates may be tied; of the tied, the one that
            takes least of the GPU wins: fewest warps, then fewest stages, then by its token.
        tie_floor_us: absolute difference that is added to it, in µs.
        tolerance: largest ‖out − reference‖ / ‖reference‖ between candidates, where the workload names no oracle; for
            bfloat16, wider types get a fraction of it.
        repeats: runs on equal inputs whose outputs must have the same bits.
        time_limit_s: wall time after which a candidate counts as hanging and its worker is ended, in s.
        seed: of the step whose inputs candidates run on.
    """

    model_config = _FROZEN

    warmup_ms: float = Field(default=1.0, ge=0)
    samples_ms: PositiveFloat = 15.0
    min_samples: PositiveInt = 5
    max_samples: PositiveInt = 150
    rounds: PositiveInt = 5
    max_extra_rounds: int = Field(default=6, ge=0)
    hopeless_ratio: float = Field(default=1.25, ge=1)
    tie_threshold: float = Field(default=0.01, ge=0, lt=1)
    tie_floor_us: float = Field(default=0.25, ge=0)
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    repeats: int = Field(default=2, ge=2)
    time_limit_s: float = Field(default=30.0, gt=0, le=MAX_LIMIT_S)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @pydantic.model_validator(mode="after")
    def _samples_in_order(self) -> MeasurePolicy:
        if self.min_samples > self.max_samples:
            raise ValueError(f"`min_samples` {self.min_samples} is above `max_samples` {self.max_samples}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``MeasurePolicy(**data)`` gives the policy back."""
        return self.model_dump()


class CompileOptions(pydantic.BaseModel):
    """What decides the code of a cubin besides kernel, specialization and gpu target.

    Args:
        line_info: keep source lines in the code for profilers; the bytes then depend on the folder of the sources.
        fp_fusion: let the compiler contract a multiplication and an addition into one rounding.
    """

    model_config = _FROZEN

    line_info: bool = False
    fp_fusion: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``CompileOptions(**data)`` gives the options back."""
        return self.model_dump()


class _Custom(pydantic.BaseModel):
    """A device profile written out, field by field as in ``DeviceProfile``."""

    model_config = _FROZEN

    id: str
    name: str = Field(min_length=1)
    capability: list[int] = Field(min_length=2, max_length=2)
    sm_count: PositiveInt
    shared_memory_bytes: PositiveInt
    shared_memory_per_sm_bytes: PositiveInt
    total_memory_bytes: PositiveInt
    l2_bytes: PositiveInt
    warp_size: PositiveInt = 32
    source: str = ""

    def profile(self) -> DeviceProfile:
        return DeviceProfile.from_json({**self.model_dump(), "backend": "cuda"})


class _Gpu(pydantic.BaseModel):
    model_config = _FROZEN

    profile: str | None = None
    custom: _Custom | None = None


class _Model(pydantic.BaseModel):
    """The file as it is written, but for the plug-in's section."""

    model_config = _FROZEN

    format: int
    name: str
    gpu: _Gpu
    workload: dict[str, Any]
    measure: MeasurePolicy = MeasurePolicy()
    compile: CompileOptions = CompileOptions()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest without faults.

    Args:
        format: 1.
        name: what the bundle is called.
        profile: the facts of the GPU to bake for.
        plugin: name of the workload's plug-in.
        section: the workload's section as its plug-in resolved it, defaults filled in; plain data.
        measure: how candidates are measured.
        compile: what decides the code besides kernel and gpu target.
        text: the file's bytes as given.
        source: where it came from, for messages.
    """

    format: int
    name: str
    profile: DeviceProfile
    plugin: str
    section: Mapping[str, Any]
    measure: MeasurePolicy
    compile: CompileOptions
    text: bytes
    source: str

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, and no GPU."""
        return self.profile.backend == profiles.INTERPRETER

    def resolved(self) -> dict[str, Any]:
        """The manifest as plain JSON data, nothing left to defaults; ``from_resolved`` takes it."""
        return {
            "format": self.format,
            "name": self.name,
            "gpu": self.profile.to_json(),
            "workload": {"plugin": self.plugin, "section": dict(self.section)},
            "measure": self.measure.to_json(),
            "compile": self.compile.to_json(),
        }

    @classmethod
    def from_resolved(cls, data: Mapping[str, Any], text: bytes = b"", source: str = "bundle") -> Manifest:
        """The manifest whose ``resolved()`` this is, with the file's bytes where they are known.

        Raises:
            ManifestError: the data is not that of a resolved manifest.
        """
        try:
            return cls(
                format=data["format"],
                name=data["name"],
                profile=DeviceProfile.from_json(data["gpu"]),
                plugin=data["workload"]["plugin"],
                section=data["workload"]["section"],
                measure=MeasurePolicy(**data["measure"]),
                compile=CompileOptions(**data["compile"]),
                text=text,
                source=source,
            )
        except (KeyError, TypeError, pydantic.ValidationError) as error:
            raise ManifestError(f"{source}: the resolved manifest cannot be read ({error})") from error


def names() -> list[str]:
    """The packaged manifests' file names, sorted."""
    return sorted(path.name for path in PACKAGED.glob("*.yaml"))


def find(name: str) -> Path:
    """A manifest by path, else by that name in ``./manifests``, else the packaged one.

    Raises:
        InputError: there is none; the hint lists the packaged ones.
    """
    for path in (Path(name), Path("manifests") / name, PACKAGED / name):
        with contextlib.suppress(OSError):  # a name that is too long for the system is no file either
            if path.is_file():
                return path
    packaged = ", ".join(f"`{known}`" for known in names())
    raise InputError(
        f"manifest: `{name}` is neither a file nor a name in `./manifests` nor packaged; wanted a manifest",
        hint=f"packaged manifests: {packaged}",
    )


def load(path: Path | str) -> Manifest:
    """Reads and checks a manifest.

    Raises:
        ManifestError: with every fault of the file.
        InputError: the file cannot be read.
        BuildError: it asks for the GPU of this machine, and there is none.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(yamlfile.MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"manifest `{path}`: {error.strerror or error}; wanted a file that can be read") from error
    return parse(text, str(path))


def parse(text: bytes, source: str) -> Manifest:
    """Checks the bytes of a manifest.

    Args:
        text: YAML 1.2.
        source: where it came from, for messages.

    Raises:
        ManifestError: with every fault, each with its line and dotted path.
        BuildError: it asks for the GPU of this machine, and there is none.
    """
    document = yamlfile.read(text)
    faults = list(document.faults)
    if not faults and not isinstance(document.data, dict):
        faults.append(Fault(1, (), f"{_shown(document, ())}; wanted a mapping with the keys of a manifest"))
    manifest = None
    if isinstance(document.data, dict):
        manifest = _check(document, text, source, faults)
    if faults or manifest is None:
        raise _refusal(source, faults)
    return manifest


def _refusal(source: str, faults: list[Fault]) -> ManifestError:
    unique = sorted(set(faults), key=lambda fault: (fault.line, yamlfile.dotted(fault.path), fault.message))
    count = counted(len(unique), "fault")
    reasons = [str(fault) for fault in unique[:MAX_SHOWN]]
    if len(unique) > MAX_SHOWN:
        reasons.append(f"and {counted(len(unique) - MAX_SHOWN, 'more fault')}")
    return ManifestError(f"manifest `{source}`: {count}; wanted none", reasons=reasons)


def _check(document: Document, text: bytes, source: str, faults: list[Fault]) -> Manifest | None:
    """Adds every fault of the content; the manifest where there is none."""
    data = document.data
    model, found = _validated(document)
    unread = {fault.path for fault in faults}
    faults += [fault for fault in found if fault.path not in unread]
    faults += _own_faults(document, data)
    plugin, section = _section(document, data.get("workload"), faults)
    profile = _profile(document, data.get("gpu"), faults)
    if faults or model is None or profile is None or section is None:
        return None
    return Manifest(FORMAT, model.name, profile, plugin, section, model.measure, model.compile, text, source)


def _own_faults(document: Document, data: Mapping[str, Any]) -> Iterator[Fault]:
    """What the model's types do not say."""
    format_, name = data.get("format"), data.get("name")
    if type(format_) is int and format_ != FORMAT:
        yield Fault(
            document.line(("format",)), ("format",), f"`{format_}`; this version of kernelbake reads `{FORMAT}`"
        )
    if isinstance(name, str) and not _NAME.fullmatch(name):
        wanted = "wanted up to 100 letters, digits, `.`, `_` and `-`, the first a letter or digit"
        yield Fault(document.line(("name",)), ("name",), f"`{name:.120}`; {wanted}")


def _profile(document: Document, gpu: Any, faults: list[Fault]) -> DeviceProfile | None:
    """The device profile that the section names; adds its faults."""
    if not isinstance(gpu, dict):
        return None
    line = document.line(("gpu",))
    if ("profile" in gpu) == ("custom" in gpu):
        faults.append(Fault(line, ("gpu",), "wanted either `profile` or `custom`"))
    elif isinstance(gpu.get("profile"), str):
        try:
            if gpu["profile"] == RUNNING:
                return None if faults else _running()  # asking the GPU takes seconds
            return profiles.load(gpu["profile"])
        except InputError as error:
            faults.append(Fault(document.line(("gpu", "profile")), ("gpu", "profile"), error.message))
    elif isinstance(gpu.get("custom"), dict):
        try:
            return _Custom(**gpu["custom"]).profile()
        except (pydantic.ValidationError, TypeError):
            return None  # its faults are already listed
    return None


def _running() -> DeviceProfile:
    """The profile of the GPU in this machine, asked in a child process: no CUDA context may stay in this one.

    Raises:
        BuildError: there is no GPU that can be used.
    """
    from kernelbake import gpu, planner

    own_path = planner.environment(os.environ, interpreted=False)["PYTHONPATH"]
    with tempfile.TemporaryDirectory() as folder:
        probe = gpu.Probe({**os.environ, "PYTHONPATH": own_path}, Path(folder) / "probe.log")
        try:
            return DeviceProfile.from_json(probe.answer()["profile"])
        except BuildError as error:
            hint = f"name a device profile instead of `{RUNNING}`: {', '.join(profiles.names())}"
            raise BuildError(error.message, reasons=error.reasons, hint=hint) from error
        finally:
            probe.close()


def _section(document: Document, section: Any, faults: list[Fault]) -> tuple[str, dict[str, Any] | None]:
    """The plug-in's name and its section as it resolves it; adds the faults that the plug-in finds."""
    if not isinstance(section, dict):
        return "", None
    at: yamlfile.Path = ("workload", "plugin")
    plugin = section.get("plugin")
    if not isinstance(plugin, str):
        found = f"found {_shown(document, at)}; " if "plugin" in section else "missing; "
        faults.append(Fault(document.line(at), at, f"{found}wanted the name of a workload's plug-in"))
        return "", None
    try:
        loaded = workload.load(plugin)
        spec = loaded.parse({name: value for name, value in section.items() if name != "plugin"})
        return plugin, loaded.resolve(spec)
    except workload.FaultsError as error:
        for fault in error.faults:
            path = ("workload", *(int(part) if part.isdigit() else part for part in fault.path.split(".") if part))
            faults.append(Fault(document.line(path), path, fault.message))
    except InputError as error:
        faults.append(Fault(document.line(at), at, error.message))
    return plugin, None


# ---------------------------------------------------------------------------------------------- pydantic's faults


def _validated(document: Document) -> tuple[_Model | None, list[Fault]]:
    try:
        return _Model(**document.data), []
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)
        return None, [_fault(document, item) for item in found]


def _fault(document: Document, item: Any) -> Fault:
    path: yamlfile.Path = tuple(item["loc"])
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        return Fault(document.line(path), path, "missing; wanted a value")
    if kind == "extra_forbidden":
        return Fault(document.line(path), path, _unknown(path))
    if kind == "value_error":
        return Fault(document.line(path), path, f"{context['error']}; wanted them the other way round")
    wanted = _WANTED.get(kind, "").format(**context) or item["msg"].lower()
    return Fault(document.line(path), path, f"found {_shown(document, path)}; wanted {wanted}")


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "`true` or `false`",
    "string_type": "text (write it in quotes)",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of {ge} or above",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of {le} or below",
    "string_too_short": "text that is not empty",
    "too_short": "{min_length} items",
    "too_long": "{max_length} items",
}


def _unknown(path: yamlfile.Path) -> str:
    """The message for a key that nothing reads, with the key that was probably meant."""
    model: Any = _Model
    inner = {"measure": MeasurePolicy, "compile": CompileOptions, "gpu": _Gpu, "custom": _Custom}
    for part in path[:-1]:
        model = inner.get(str(part), model)
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    if near:
        return f"unknown key; did you mean `{near[0]}`"
    return f"unknown key; known: {', '.join(f'`{name}`' for name in known)}"


def _shown(document: Document, path: yamlfile.Path) -> str:
    """What stands at a path, with its type, the way it was written."""
    value = document.data
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return "nothing"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return f"the text `{value:.60}`"
    written = document.scalars.get(path, repr(value))
    return f"`{written}`" if isinstance(value, bool) else f"the number `{written:.60}`"
