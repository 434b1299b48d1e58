"""What a bundle is worth, level by level: integrity, signature, fit, coverage, and on request what it does here.

A level proves something, refuses with every reason, or says plainly that it was not checked and why. Without a device
nothing here imports torch or Triton: integrity needs bytes, fit for a named GPU compares recorded facts, and coverage
compares the plan inside the bundle with its entries (``replan`` makes the plan anew in a child process). What runs the
bundle's code does so in a child too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelbake import bundle, fingerprint, host, inspect, profiles
from kernelbake.errors import InputError, KernelbakeError, MisfitError
from kernelbake.fingerprint import Fingerprint
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle


class Outcome(enum.StrEnum):
    """What became of a level."""

    PROVED = "proved"
    REFUSED = "refused"
    UNCHECKED = "not checked"


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of a verification.

    Args:
        name: ``integrity``, ``signature``, ``fit``, ``coverage``, ``device``, ``rebench``.
        outcome: what became of it.
        text: what was proved, or why it was not checked; the error's message where it was refused.
        error: what to raise, where it was refused; its reasons are every single finding.
        findings: what was found about each launch or key, as plain data.
        details: of those, what a person should see where the level did not refuse.
    """

    name: str
    outcome: Outcome
    text: str
    error: KernelbakeError | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        findings = {"findings": [dict(one) for one in self.findings]} if self.findings else {}
        return {
            **findings,
            "level": self.name,
            "outcome": self.outcome.value,
            "text": self.text,
            "reasons": list(self.error.reasons) if self.error is not None else [],
            "hint": self.error.hint if self.error is not None else None,
            "exit_code": int(self.error.exit_code) if self.error is not None else 0,
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """A verification.

    Args:
        path: the bundle's file.
        digest: the bundle's digest; None where it could not be read.
        levels: in the order in which they were checked.
    """

    path: Path
    digest: str | None
    levels: tuple[Level, ...]

    @property
    def refusals(self) -> tuple[KernelbakeError, ...]:
        """The errors of the levels that refused, in order; a command ends with the exit code of the first."""
        return tuple(level.error for level in self.levels if level.error is not None)

    def to_json(self) -> dict[str, Any]:
        levels = [level.to_json() for level in self.levels]
        return {"bundle": str(self.path), "digest": self.digest, "sound": not self.refusals, "levels": levels}


@dataclasses.dataclass(frozen=True)
class Request:
    """What to verify beside integrity and the coverage inside.

    Args:
        manifest: path or name of a manifest to cover.
        config: a run's configuration to cover.
        gpu_target: check the fit for this gpu target or device profile, not for this machine.
        device: the device name that goes with ``gpu_target``.
        replan: plan anew although the plan inside the bundle would do.
        on_device: load every binary on this machine's GPUs, run every launch, and compare what it writes with what is
            recorded.
        rebench: decide this many keys anew.
        seed: which of them, with ``rebench``.
        allow_busy_gpu: with ``rebench``, measure although other processes use the GPU.
        trusted: public keys of which one must have signed.
    """

    manifest: str | None = None
    config: Path | None = None
    gpu_target: str | None = None
    device: str | None = None
    replan: bool = False
    on_device: bool = False
    rebench: int | None = None
    seed: int = 0
    allow_busy_gpu: bool = False
    trusted: tuple[Path, ...] = ()


OnProgress = Callable[[int, int, str], None]


def verify(path: Path, request: Request, *, on_progress: OnProgress | None = None) -> Report:
    """Checks a bundle level by level; one that cannot be trusted is not looked at further.

    Args:
        path: the bundle.
        request: what to check.
        on_progress: called while planning, running or measuring with how much is done, how much there is, and what.

    Raises:
        InputError: the request itself cannot be used.
    """
    if request.device is not None and request.gpu_target is None:
        raise InputError("verify: `--device` without `--for`; wanted both", hint="add `--for sm_120`, say")
    if request.manifest is not None and request.config is not None:
        raise InputError("verify: `--manifest` and `--config` both given; wanted one of them")
    if request.allow_busy_gpu and request.rebench is None:
        raise InputError("verify: `--allow-busy-gpu` without `--rebench`; wanted both")
    try:
        held = bundle.read(path)
    except InputError:
        raise
    except KernelbakeError as error:
        return Report(path, None, (_refused("integrity", error),))
    return Report(path, held.digest, tuple(_levels(path, held, request, on_progress)))


def _levels(path: Path, held: Bundle, request: Request, on_progress: OnProgress | None) -> Iterator[Level]:
    entries = "no code" if held.made == "interpreted" else counted(len(held.entries), "entry")
    yield _proved("integrity", f"each of {held.size_bytes:,} bytes is accounted for; {entries}, made: {held.made}")
    if request.trusted:
        yield _level("signature", lambda: _signature(held, request))
    fit = _level("fit", lambda: _fit(held, request))
    yield fit
    yield _level("coverage", lambda: _coverage(path, held, request, on_progress))
    if request.on_device:
        yield _after(fit, "device", lambda: _device(path, held, on_progress))
    if request.rebench is not None:
        yield _after(fit, "rebench", lambda: _rebench(held, request, on_progress))


def _level(name: str, check: Callable[[], Level]) -> Level:
    try:
        return check()
    except InputError:
        raise
    except KernelbakeError as error:
        return _refused(name, error)


def _after(fit: Level, name: str, check: Callable[[], Level]) -> Level:
    """A level that runs the bundle's code, which only makes sense where the bundle fits."""
    if fit.outcome is Outcome.REFUSED:
        return Level(name, Outcome.UNCHECKED, "the bundle does not fit")
    return _level(name, check)


def _proved(name: str, text: str) -> Level:
    return Level(name, Outcome.PROVED, text)


def _refused(name: str, error: KernelbakeError, findings: tuple[Mapping[str, Any], ...] = ()) -> Level:
    return Level(name, Outcome.REFUSED, error.message, error, findings)


# ---------------------------------------------------------------------------------------------- signature, fit


def _signature(held: Bundle, request: Request) -> Level:
    from kernelbake import signing

    return _proved("signature", f"signed by {signing.check(held, request.trusted)}")


def _fit(held: Bundle, request: Request) -> Level:
    if request.gpu_target is not None:
        return _compared(held, {request.device or request.gpu_target: _named(request.gpu_target, request.device)})
    if held.made == "interpreted":
        return _compared(held, {"Triton's interpreter": _installed()})
    count = gpu_count()
    if count == 0:
        return Level("fit", Outcome.UNCHECKED, "no GPU here; use `--for sm_120 --device NAME` to compare with one")
    return _compared(held, {f"cuda:{index}": _here(index) for index in range(count)})


def _compared(held: Bundle, places: Mapping[str, Fingerprint]) -> Level:
    """Compares with every place the fields known of it, and says which enforced ones are not known."""
    reasons = []
    for place, here in places.items():
        known = Fingerprint(tuple(field for field in held.fingerprint.fields if field.name in here))
        differences = [item for item in fingerprint.compare(known, here) if item.refuses]
        prefix = f"{place} " if len(places) > 1 else ""
        reasons += [f"{prefix}{difference}" for difference in differences]
    if reasons:
        raise MisfitError(
            f"bundle `{held.name}`: {counted(len(reasons), 'difference')} from what it was made for; wanted none",
            reasons=reasons,
            hint="build a bundle for this GPU and these versions",
        )
    refusing = (fingerprint.FieldClass.ENFORCED, fingerprint.FieldClass.FLOOR)
    decisive = [field.name for field in held.fingerprint.fields if field.cls in refusing]
    known_names = {field.name for here in places.values() for field in here.fields}
    agreeing = ", ".join(name for name in decisive if name in known_names)
    left = ", ".join(name for name in decisive if name not in known_names)
    rest = f"; left for the start of a run: {left}" if left else ""
    return _proved("fit", f"{' and '.join(places)}: {agreeing} agree{rest}")


def _here(index: int) -> Fingerprint:
    """What this process knows of a GPU here, but for the kernels' sources, which ``--replan`` or a run looks at."""
    found = host.fingerprint(index, (), build=False)
    return Fingerprint(tuple(field for field in found.fields if field.name != "kernel.sources"))


def _named(gpu_target: str, device: str | None) -> Fingerprint:
    """What is known of a named GPU.

    Raises:
        InputError: neither a gpu target nor a device profile.
    """
    known = [profiles.load(name) for name in profiles.names()]
    for profile in known:
        named = gpu_target == profile.id and device in (None, profile.name)
        if named or (gpu_target == profile.gpu_target and device == profile.name):
            return Fingerprint.of(host.gpu_fields(profile))
    digits = gpu_target.removeprefix("sm_").removesuffix("a")
    if not (gpu_target.startswith("sm_") and digits.isascii() and digits.isdigit() and 2 <= len(digits) <= 3):
        ids = ", ".join(f"`{profile.id}`" for profile in known)
        raise InputError(f"--for: `{gpu_target}` is no gpu target; wanted `sm_120`, say, or a device profile ({ids})")
    capability = fingerprint.capability(int(digits[:-1]), int(digits[-1]))
    name = {"gpu.device": device} if device is not None else {}
    return Fingerprint.of({"gpu.backend": "cuda", "gpu.capability": capability, **name})


def _installed() -> Fingerprint:
    """What package metadata says of this environment, without importing any of it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Fingerprint.of({"gpu.backend": profiles.INTERPRETER, "triton.version": None})
    return Fingerprint.of({"gpu.backend": profiles.INTERPRETER, "triton.version": version})


def gpu_count() -> int:
    """CUDA devices visible to this process, asked of the driver itself; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


# ---------------------------------------------------------------------------------------------- coverage, device


def _coverage(path: Path, held: Bundle, request: Request, on_progress: OnProgress | None) -> Level:
    anew = request.replan or request.config is not None or not _is_own(held, request.manifest)
    if anew:
        found = inspect.coverage_of(path, manifest=request.manifest, config=request.config, on_progress=on_progress)
    else:
        found = inspect.covered_inside(held)
    found.refuse("coverage")
    origin = "a plan made anew" if anew else "the plan inside"
    spare = counted(len(found.coverage.unused), "more is", "more are")
    unused = f"; {spare} held and not needed" if found.coverage.unused else ""
    launches = counted(found.coverage.num_needed, "launch")
    are_held = "is held" if found.coverage.num_needed == 1 else "are all held"
    needed = f"{launches} of {counted(len(found.plan.cases), 'case')}, by {origin}, {are_held}"
    return _proved("coverage", f"{needed}{unused}")


def _is_own(held: Bundle, name: str | None) -> bool:
    """Whether a manifest asks for exactly what the bundle's own asks for, so that the plan inside is its plan."""
    if name is None:
        return True
    from kernelbake import manifest

    wanted = manifest.load(manifest.find(name)).resolved()
    return all(wanted[part] == held.manifest_resolved.get(part) for part in ("gpu", "workload"))


def _device(path: Path, held: Bundle, on_progress: OnProgress | None) -> Level:
    from kernelbake import ondevice, outputs
    from kernelbake.outputs import Verdict

    bundle.refuse_unmeasured(held.made, held.name, "device")
    done = ondevice.replay(path, held, _devices(held), on_progress)
    findings = tuple(one.to_json() for one in done.launches)
    try:
        done.refuse(held.name)
    except KernelbakeError as error:
        return _refused("device", error, findings)
    loads = counted(done.loads, "binary was", "binaries were")
    where = f"{loads} loaded in {done.load_s:.2f} s" if done.loads else "the interpreter runs"
    steps = f"in the {'step' if done.cases == 1 else 'steps'} of {counted(done.cases, 'case')}"
    text = f"{where}; {steps}, of {counted(len(findings), 'launch')} {outputs.summed(done.launches)}"
    seen = any(one.verdict in (Verdict.SAME, Verdict.CLOSE) for one in done.launches)
    details = tuple(str(one) for one in done.launches if one.verdict in (Verdict.UNMET, Verdict.UNRECORDED))
    return Level("device", Outcome.PROVED if seen else Outcome.UNCHECKED, text, None, findings, details)


def _rebench(held: Bundle, request: Request, on_progress: OnProgress | None) -> Level:
    from kernelbake import rebench
    from kernelbake.progress import Event

    assert request.rebench is not None
    bundle.refuse_unmeasured(held.made, held.name, "rebench")
    _devices(held)

    def on_event(event: Event) -> None:
        if on_progress is not None and event.done is not None and event.total is not None:
            on_progress(event.done, event.total, event.message)

    seed, busy = request.seed, request.allow_busy_gpu
    found = rebench.rebench(held, request.rebench, seed=seed, allow_busy_gpu=busy, on_event=on_event)
    findings = tuple(one.to_json() for one in found)
    if not found:
        return Level("rebench", Outcome.UNCHECKED, "nothing is chosen among several candidates")
    try:
        rebench.refuse(found, held.name)
    except KernelbakeError as error:
        return _refused("rebench", error, findings)
    tied = sum(one.standing is rebench.Standing.TIED for one in found)
    ties = f", {tied} of them tied with another candidate" if tied else ""
    decided = (
        "1 key was decided anew; its winner wins"
        if len(found) == 1
        else f"{len(found)} keys were decided anew; the winners win"
    )
    text = f"{decided} again{ties}"
    return Level("rebench", Outcome.PROVED, text, None, findings, tuple(map(str, found)))


def _devices(held: Bundle) -> range:
    """The GPUs on which a bundle's code runs here; none for the interpreter's.

    Raises:
        MisfitError: it wants one and there is none.
    """
    count = 0 if held.made == "interpreted" else gpu_count()
    if count == 0 and held.made != "interpreted":
        raise MisfitError(
            f"bundle `{held.name}`: made for `{held.fingerprint.get('gpu.device')}`; this machine shows no GPU",
            hint="without one, `kernelbake verify` still proves integrity, fit (with `--for`) and coverage",
        )
    return range(count)
