"""Freezes a process onto a bundle: from then on every Triton launch comes from it, or is refused.

The order is: verify the bundle, compare its fingerprint and kernels with what is here, load every kernel on every
device, put the launch path and the walls in place, hand over. Nothing is published before all of it is known to be
sound. Call it in the main thread, before workers start and, where no C compiler is, before anything imports
flash-linear-attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kernelbake import fingerprint, guards, host, lookup
from kernelbake.errors import BundleError, InputError, MisfitError
from kernelbake.plan import KernelFacts, functions_in, sources_of
from kernelbake.words import counted

if TYPE_CHECKING:
    from kernelbake.bundle import Bundle
    from kernelbake.dispatch import Dispatcher, FrozenKernel
    from kernelbake.lookup import Held


@dataclasses.dataclass(frozen=True)
class Counters:
    """What happened since the freeze.

    Args:
        hits: launches made from the bundle.
        misses: launches refused because the bundle does not hold what they need.
        loads: binaries loaded, each device counted; all of them by the freeze itself.
        refusals: other ways to make code, tune, or touch a cache that were refused.
    """

    hits: int
    misses: int
    loads: int
    refusals: int


class Frozen:
    """A frozen process; releasing it, or leaving its context, gives Triton back.

    Attributes:
        digest, name: the bundle's.
        devices: indices of the devices that the kernels were loaded on; empty under the interpreter.
        seconds: how long each part of the freeze took.
        notes: what a person should know, one line each.
    """

    def __init__(self, bundle: Bundle, dispatcher: Dispatcher, patches: guards.Patches) -> None:
        self.digest = bundle.digest
        self.name = bundle.name
        self.devices = dispatcher.devices
        self.notes: tuple[str, ...] = ()
        self.seconds: Mapping[str, float] = {}
        self._dispatcher = dispatcher
        self._patches = patches
        self._holders = 1

    @property
    def counters(self) -> Counters:
        """Exact at the moment of asking, from any thread."""
        kernels = self._dispatcher.kernels.values()
        return Counters(
            hits=sum(kernel.hits.value for kernel in kernels),
            misses=self._dispatcher.misses.value,
            loads=sum(len(loaded) for kernel in kernels for loaded in kernel.entries.values()),
            refusals=self._dispatcher.refusals.value,
        )

    @property
    def hits_by_kernel(self) -> dict[str, int]:
        """Launches made, by kernel name."""
        return {name: kernel.hits.value for name, kernel in self._dispatcher.kernels.items()}

    @property
    def unfused(self) -> dict[str, str]:
        """The kernels that are launched on the general path only, which is slower, and why."""
        return {name: kernel.unfused for name, kernel in self._dispatcher.kernels.items() if kernel.unfused}

    def release(self) -> None:
        """Gives Triton back, once every ``freeze`` of this bundle was released."""
        global _current
        with _lock:
            self._holders -= 1
            if self._holders == 0 and _current is self:
                self._patches.restore()
                _current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_lock = threading.RLock()
_current: Frozen | None = None


def current() -> Frozen | None:
    """The frozen bundle of this process, or None."""
    return _current


def freeze(
    bundle: Bundle | Path | str, devices: Sequence[int] | None = None, *, trusted: Sequence[Path | str] = ()
) -> Frozen:
    """Freezes this process onto a bundle.

    Freezing onto the same bundle again gives the same handle back; it is released with the last of them.

    Args:
        bundle: a bundle or its path.
        devices: indices of every device that will launch; None means the current one. Not used for a bundle of the
            interpreter.
        trusted: files with public keys; if there are any, the bundle has to be signed by one of them.

    Raises:
        InputError: the file cannot be opened; no such device; another bundle is frozen; not the main thread.
        BundleError: the bundle is not sound, not signed as required, or its code does not load.
        CoverageError: it was not measured yet, so that it lacks every choice.
        MisfitError: it was made for something else, or a setting would change code; with every difference.
        UnsupportedError: this platform, or this version of Triton.
    """
    global _current
    with _lock, _without_collection():
        clock = _Clock()
        host.check_platform()
        held = _opened(bundle)
        if trusted:
            from kernelbake import signing

            signing.check(held, trusted)
        clock.lap("verify")
        if _current is not None:
            return _again(_current, held, devices)
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise InputError(f"freeze: called in thread `{name}`; wanted the main thread, before workers start")
        patches = guards.Patches()
        try:
            frozen = _freeze(held, devices, patches, clock)
            frozen.seconds = clock.laps
            _current = frozen
        except BaseException:
            patches.restore()
            raise
        return frozen


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Spares the collector of reference cycles walks over everything that torch loaded, which nothing here made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Clock:
    """How long each part took."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _opened(bundle: Bundle | Path | str) -> Bundle:
    if isinstance(bundle, Path | str):
        from kernelbake import bundle as bundles

        return bundles.read(bundle)
    return bundle


def _again(frozen: Frozen, bundle: Bundle, devices: Sequence[int] | None) -> Frozen:
    if bundle.digest != frozen.digest:
        raise InputError(
            f"freeze: bundle `{frozen.name}` ({frozen.digest:.19}) is frozen already; wanted the same one, "
            f"not `{bundle.name}` ({bundle.digest:.19})",
            hint="release the first, or use one process for each",
        )
    more = sorted(set(devices or ()) - set(frozen.devices)) if bundle.made != "interpreted" else []
    if more:
        raise InputError(f"freeze: frozen already for devices {list(frozen.devices)}; wanted {more} as well, too late")
    frozen._holders += 1
    return frozen


def _freeze(held: Bundle, devices: Sequence[int] | None, patches: guards.Patches, clock: _Clock) -> Frozen:
    """All of it, step by step; nothing is in place until the last one."""
    from kernelbake.bundle import refuse_unmeasured

    refuse_unmeasured(held.made, held.name, "freeze")
    interpreted = held.made == "interpreted"
    guards.check_settings(interpreted=interpreted, built=_built_with(held))
    from kernelbake import triton_api

    triton_api.check_interfaces()
    libraries = None if interpreted else _prepared_driver(held)
    live = _live_kernels(held)
    clock.lap("import")
    places, refused = _places(held, devices, interpreted=interpreted)
    clock.lap("compare")
    from kernelbake.dispatch import Dispatcher

    kernels = _frozen_kernels(held, live, places, libraries)
    clock.lap("load")
    dispatcher = Dispatcher(kernels, interpreted=interpreted, devices=places, refused_devices=refused)
    dispatcher.install(patches)
    guards.Walls(dispatcher.refusals.add).install(patches)
    _watch_forks()
    clock.lap("install")
    frozen = Frozen(held, dispatcher, patches)
    frozen.notes = tuple(host.overruled(os.environ))
    return frozen


def _built_with(held: Bundle) -> dict[str, str]:
    """The variables of the compiler with which a bundle was built."""
    found = held.fingerprint.get("build.environment")
    fusion = "1" if held.fingerprint.get("build.fp_fusion", True) else "0"
    return {**(found if isinstance(found, dict) else {}), "TRITON_DEFAULT_FP_FUSION": fusion}


def _prepared_driver(held: Bundle) -> Any:
    """The bundle's libraries, with Triton's driver made from them: torch has to be there before."""
    import torch

    from kernelbake import loading, triton_api

    host.check_platform()
    libraries = loading.Libraries(held.libs)
    if not triton_api.has_driver():
        if not torch.cuda.is_available():
            raise MisfitError(
                f"bundle `{held.name}`: made for `{held.fingerprint.get('gpu.device')}`; this process sees no GPU",
                hint="a bundle for Triton's interpreter is made by `kernelbake build --manifest cpu.yaml`",
            )
        loading.prepare_driver(libraries)
    return libraries


# ---------------------------------------------------------------------------------------------- comparison


def _live_kernels(held: Bundle) -> dict[str, Any]:
    """The live object of every planned kernel, each checked to be the one that was planned.

    Raises:
        MisfitError: with every difference of every kernel.
    """
    from kernelbake import triton_api

    live: dict[str, Any] = {}
    reasons: list[str] = []
    for name, planned in sorted(held.plan.kernels.items()):
        try:
            with host.inductor_makes_no_folder():
                live[name] = triton_api.find(planned.kernel)
            reasons += [f"kernel `{name}`: {line}" for line in _changes(planned, triton_api.facts(live[name]))]
            if triton_api.asks_for_assertions(live[name], {}):
                reasons.append(f"kernel `{name}`: `debug` is on, for which the bundle has no code; wanted it off")
        except (LookupError, TypeError) as error:
            reasons.append(str(error) if str(error).startswith("kernel") else f"kernel `{name}`: {error}")
    reasons += [
        f"kernel `{one.name}`: a device function that launches get as a value; the bundle holds no source digest of it"
        for one in sources_of(held.plan.launches)
        if one.name not in held.plan.kernels
    ]
    if reasons:
        number = counted(len(reasons), "difference")
        raise MisfitError(
            f"bundle `{held.name}`: {number} between its kernels and those here; wanted none",
            reasons=reasons,
            hint="build the bundle again with these sources",
        )
    return live


def _changes(planned: KernelFacts, here: KernelFacts) -> Iterator[str]:
    """What differs between a kernel's facts, one line each."""
    for field in dataclasses.fields(KernelFacts):
        then, now = getattr(planned, field.name), getattr(here, field.name)
        if then != now:
            shown = [f"{value:.19}" if isinstance(value, str) else str(value) for value in (now, then)]
            yield f"{field.name.replace('_', ' ')}: here `{shown[0]}`; bundle: `{shown[1]}`"


def _places(
    held: Bundle, devices: Sequence[int] | None, *, interpreted: bool
) -> tuple[tuple[int, ...], dict[int, str]]:
    """The devices to load on, and why each other one here is not among them.

    Raises:
        MisfitError: a device that was asked for does not fit; every difference of every one.
    """
    kernels = list(held.plan.kernels.values())
    if interpreted:
        _refuse_misfit(held, {"": host.fingerprint(host.interpreter_profile(), kernels, build=False)})
        return (), {}
    from kernelbake import triton_api

    wanted = tuple(dict.fromkeys(devices)) if devices is not None else (triton_api.device_access().current(),)
    first = host.fingerprint(wanted[0], kernels, build=False)
    _refuse_misfit(
        held,
        {f"device {wanted[0]}: ": first} | {f"device {device}: ": _on_device(first, device) for device in wanted[1:]},
    )
    return wanted, _other_devices(held, first, wanted)


def _on_device(known: fingerprint.Fingerprint, device: int) -> fingerprint.Fingerprint:
    """The fingerprint of another device of the same process."""
    values = {field.name: field.value for field in known.fields}
    return fingerprint.Fingerprint.of({**values, **host.gpu_fields(host.running_profile(device))})


def _refuse_misfit(held: Bundle, places: Mapping[str, fingerprint.Fingerprint]) -> None:
    reasons = [
        f"{where}{difference}"
        for where, here in places.items()
        for difference in fingerprint.compare(held.fingerprint, here)
        if difference.refuses
    ]
    if reasons:
        raise MisfitError(
            f"bundle `{held.name}`: {counted(len(reasons), 'difference')} from what it was made for; wanted none",
            reasons=reasons,
            hint="build a bundle for this GPU and these versions",
        )


def _other_devices(held: Bundle, first: fingerprint.Fingerprint, wanted: Sequence[int]) -> dict[int, str]:
    """Why each visible device that was not asked for has no kernels; a different model is named."""
    import torch

    found = {}
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if device not in wanted:
            differences = fingerprint.compare(held.fingerprint, _on_device(first, device))
            misfit = [str(difference) for difference in differences if difference.refuses]
            found[device] = misfit[0] if misfit else "it was not among the devices of the freeze"
    return found


# ---------------------------------------------------------------------------------------------- loading


def _frozen_kernels(
    held: Bundle, live: Mapping[str, Any], devices: Sequence[int], libraries: Any
) -> dict[str, FrozenKernel]:
    """Every kernel of the bundle, with its entries loaded on every device."""
    from kernelbake import loading, triton_api
    from kernelbake.dispatch import FrozenKernel

    table = lookup.hold(held.plan, held.choices)
    wanted = {
        identity: live[name] for name, one in table.items() for identity in one.entries.values() if identity is not None
    }
    loaded = loading.load_all(wanted, held.entries, devices, libraries) if libraries is not None else {}
    gpu_target = triton_api.gpu_target(fingerprint.arch_of(str(held.fingerprint["gpu.capability"])))
    return {
        name: FrozenKernel(
            held=one,
            launchable=live[name],
            function=triton_api.innermost(live[name]),
            bind=triton_api.live_binder(live[name], gpu_target),
            configs=_configs(held, one, live[name]),
            entries={
                device: {typed: found[identity] for typed, identity in one.entries.items() if identity is not None}
                for device, found in loaded.items()
            },
            functions=tuple(_device_functions(one)),
        )
        for name, one in table.items()
    }


def _configs(held: Bundle, one: Held, launchable: Any) -> dict[tuple[str, str], Any]:
    """Choice → the autotuner's own config of its winner.

    Raises:
        BundleError: a winner that the kernel does not offer, although its list of configs is the planned one.
    """
    from kernelbake import triton_api

    autotuner = triton_api.autotuner_of(launchable)
    if autotuner is None:
        return {}
    tuned = triton_api.is_tuned(autotuner)
    live = triton_api.live_configs(autotuner)
    found = {}
    for choice in one.choices:
        if tuned and choice.key is None:
            continue  # launched directly, past the autotuner
        if choice.winner in live:
            found[choice.id] = live[choice.winner]
        elif tuned:
            kernel = choice.kernel.name
            raise BundleError(f"bundle `{held.name}`: kernel `{kernel}` does not offer config `{choice.winner}`")
    return found


def _device_functions(one: Held) -> Iterator[Any]:
    """The device functions that stand as values of constexprs in what the bundle holds."""
    from kernelbake import triton_api

    keys = tuple(parameter.key for spec in one.specializations.values() for parameter in spec.parameters)
    for function in dict.fromkeys(functions_in(keys)):
        yield triton_api.innermost(triton_api.find(function))


def _after_fork() -> None:
    """Runs in every forked child, whose launches are refused: it cannot use its parent's CUDA context."""
    global _lock
    _lock = threading.RLock()
    if _current is not None:
        _current._dispatcher.after_fork()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)
