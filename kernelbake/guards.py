"""The walls of a frozen process: every way to make code, run a compiler, write a cache or tune, refused by name.

The launch path itself never gets to them. They are for everything beside it: a kernel launched through something that
was taken from Triton before the freeze, a library that compiles by itself, a setting that asks for other code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from kernelbake.errors import FrozenMissError, MisfitError
from kernelbake.words import counted

_ABSENT: Any = object()


class Patches:
    """Changes for a time, and undone in reverse order, whole also where an interrupt comes in between."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute of a module, class or object."""
        before = vars(owner).get(name, _ABSENT)
        self._undo.append(functools.partial(_put_back, owner, name, before))
        setattr(owner, name, value)

    def undo_by(self, function: Callable[[], Any]) -> None:
        """Has the function called among the others, in its turn; before what it undoes, and maybe twice."""
        self._undo.append(function)

    def restore(self) -> None:
        """Puts everything back."""
        interrupt = None
        while self._undo:
            try:
                self._undo[-1]()
                self._undo.pop()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)


# ---------------------------------------------------------------------------------------------- environment


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable under which a frozen process would not do what it says.

    Args:
        name: the variable.
        why: what it would do.
        switch: whether only values that mean *on* count.
    """

    name: str
    why: str
    switch: bool = True


SETTINGS = (
    Setting("TRITON_ALWAYS_COMPILE", "asks for every kernel to be compiled again"),
    Setting("TRITON_KERNEL_OVERRIDE", "replaces the code of kernels by files"),
    Setting("TRITON_DEBUG", "needs code with assertions, which the bundle does not hold"),
    Setting("TRITON_INSTRUMENTATION_MODE", "needs instrumented code, which the bundle does not hold", switch=False),
    Setting("TRITON_ENABLE_ASAN", "needs instrumented code, which the bundle does not hold"),
    Setting("TRITON_OVERRIDE_ARCH", "asks for code of another gpu target than the card's", switch=False),
    Setting("PTXAS_OPTIONS", "asks for code assembled in another way", switch=False),
    Setting("DISABLE_PTXAS_OPT", "asks for code assembled in another way"),
    Setting("USE_IR_LOC", "asks for code with other line information", switch=False),
)
"""What is refused when a bundle is frozen."""

_CODE = "asks the compiler for other code"

CODE_SETTINGS = (
    Setting("TRITON_DEFAULT_FP_FUSION", _CODE, switch=False),
    Setting("TRITON_F32_DEFAULT", _CODE, switch=False),
    Setting("TRITON_LIBDEVICE_PATH", _CODE, switch=False),
    Setting("TRITON_MOCK_PTX_VERSION", _CODE, switch=False),
    Setting("TRITON_PLUGIN_PATHS", _CODE, switch=False),
    Setting("TRITON_ENABLE_EXPERIMENTAL_CONSAN", _CODE),
    Setting("TRITON_PREFER_TMEM_16x256_LAYOUT", _CODE),
    Setting("ALLOW_LHS_TMEM_LAYOUT_CONVERSION", _CODE),
    Setting("DISABLE_LLVM_OPT", _CODE, switch=False),
    Setting("DISABLE_MMA_V3", _CODE),
    Setting("DISABLE_MMA_V5", _CODE),
    Setting("LLVM_PASS_PLUGIN_PATH", _CODE, switch=False),
)
"""What is refused unless the bundle was built with it: a run with other code is not the run that was asked for."""

_ON = frozenset({"1", "true", "yes", "on", "y"})
_OFF = frozenset({"0", "false", "no", "off", "n"})


def refused_settings(
    environment: Mapping[str, str], *, interpreted: bool, built: Mapping[str, str] | None = None
) -> list[str]:
    """One line for every variable that stands in the way.

    Args:
        environment: the process's.
        interpreted: whether the bundle is one of decisions for Triton's interpreter, which has no code.
        built: values of variables with which the bundle was built.
    """
    lines = []
    for setting in SETTINGS:
        value = environment.get(setting.name, "").strip()
        if value.lower() in _ON or (value and not setting.switch):
            lines.append(f"`{setting.name}={value}` {setting.why}; wanted it unset")
    for setting in () if interpreted else CODE_SETTINGS:
        value, then = environment.get(setting.name, "").strip(), (built or {}).get(setting.name, "")
        asks = value.lower() in _ON or (value and not setting.switch)
        if asks and _plain(value) != _plain(then):
            wanted = f"`{then}`, as in the build, or it unset" if then else "it unset, as in the build"
            lines.append(f"`{setting.name}={value}` {setting.why}; wanted {wanted}")
    on = environment.get("TRITON_INTERPRET", "").strip().lower() in _ON
    if on != interpreted:
        wanted = "`TRITON_INTERPRET=1`, since the bundle was made by the interpreter" if interpreted else "it unset"
        lines.append(f"`TRITON_INTERPRET={'1' if on else ''}` decides who runs the kernels; wanted {wanted}")
    return lines


def _plain(value: str) -> str:
    """A value, with every spelling of *on* and *off* as one."""
    lowered = value.strip().lower()
    return "1" if lowered in _ON else "0" if lowered in _OFF else value.strip()


def check_settings(*, interpreted: bool, built: Mapping[str, str] | None = None) -> None:
    """Refuses a process whose environment or Triton settings would change code or launches.

    Args:
        interpreted, built: as of ``refused_settings``.

    Raises:
        MisfitError: with one line for each.
    """
    from kernelbake import triton_api

    reasons = refused_settings(os.environ, interpreted=interpreted, built=built)
    for knob, variable in triton_api.changed_knobs().items():
        if not any(f"`{variable}=" in reason for reason in reasons if variable):
            reasons.append(f"`{knob}` is set in the program and asks for other code; wanted it unset")
    if reasons:
        raise MisfitError(
            f"environment: {counted(len(reasons), 'setting')} would change code or launches; wanted none",
            reasons=reasons,
            hint="unset them, or run without a frozen bundle",
        )


# ---------------------------------------------------------------------------------------------- walls


class Walls:
    """The refusals of a frozen process.

    Args:
        refused: called at each refusal, to count it.
    """

    def __init__(self, refused: Callable[[], Any]) -> None:
        self._refused = refused

    def refuse(self, where: str, found: str, hint: str) -> Callable[..., Any]:
        """A function that takes anything and refuses it.

        Args:
            where, found: of the message ``where: found; wanted only what the bundle holds``.
            hint: what a person can do.
        """

        def refuse(*args: Any, **kwargs: Any) -> Any:
            self._refused()
            raise FrozenMissError(f"{where}: {found}; wanted only what the bundle holds", hint=hint)

        return refuse

    def install(self, patches: Patches) -> None:
        """Builds them. Nothing is imported that is not there already."""
        from kernelbake import triton_api

        add = "add what needs it to the workload, and build the bundle again"
        triton_api.install_walls(
            patches,
            compile_=self.refuse("triton.compile", "a kernel would be compiled", add),
            do_compile=self.refuse("triton", "a launch beside the bundle would compile its kernel", add),
            preload=self.refuse("triton.preload", "code that was saved by Triton would be compiled", add),
            bench=self.refuse("triton.autotune", "configs would be benchmarked", add),
            build=self.refuse("triton", "a C compiler would be run", "build the bundle again with this Triton"),
            cache=self.refuse("triton cache", "a file would be read from or written to it", add),
        )
        self._install_late(patches, "torch._dynamo.convert_frame", "_compile", "torch.compile")
        self._install_late(patches, "torch._inductor.compile_fx", "compile_fx", "torch inductor")

    def _install_late(self, patches: Patches, module: str, name: str, where: str) -> None:
        """Refuses a function of a module that is costly to import: now if it is there, else once someone imports it."""
        hint = "run without compilation; what it would make is not in the bundle"
        refuse = self.refuse(where, "a function would be traced and compiled", hint)
        if module in sys.modules:
            patches.set(sys.modules[module], name, refuse)
            return
        finder = _AfterImport(module, lambda loaded: patches.set(loaded, name, refuse))
        patches.undo_by(finder.remove)
        sys.meta_path.insert(0, finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Does something to a module right after someone imports it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        stock = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stock(module)
            if self in sys.meta_path:
                self._then(module)

        loader.exec_module = exec_module

    def remove(self) -> None:
        """Stops watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
