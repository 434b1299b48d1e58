"""Candidates as the device runs them: the build's code loaded when it is first needed, or the interpreter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from triton.runtime.interpreter import InterpretedFunction

from kernelbake import triton_api
from kernelbake.bundle import Entry
from kernelbake.calls import Resolved
from kernelbake.loading import Libraries, load_entry
from kernelbake.outcome import Code, Files, Rejected
from kernelbake.tune import Failed


class Runner(Protocol):
    """Launches one resolved call with given arguments."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Sequence[Any]) -> Any: ...


class CudaCode:
    """The build's code, loaded when it is first needed.

    Args:
        codes: by kernel and digest of the specialization.
        folder: where they lie, by digest.
    """

    def __init__(self, codes: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        self._codes, self._files = codes, Files(folder)
        self._libraries = Libraries(self._files)
        self._loaded: dict[tuple[str, str], Any] = {}

    def identity(self, launchable: Any, resolved: Resolved) -> str:
        """What the candidate is to the device."""
        return f"{self._code(launchable, resolved).shape} {resolved.grid}"

    def runner(self, launchable: Any, resolved: Resolved) -> Runner:
        """Loads the code of a resolved call.

        Raises:
            Failed: it was rejected when it was compiled.
        """
        kernel = self._load(launchable, resolved)
        device = torch.cuda.current_device()

        def launch(args: Sequence[Any], kwargs: Mapping[str, Any], bound: Sequence[Any]) -> Any:
            triton_api.launch(kernel, resolved.grid, torch.cuda.current_stream(device).cuda_stream, bound)
            return kernel

        return launch

    def _code(self, launchable: Any, resolved: Resolved) -> Code:
        kernel = triton_api.kernel_of(launchable)
        data = self._codes[kernel.to_json()][resolved.specialization.digest]
        if data["outcome"] != "ok":
            raise Failed(Rejected.from_json(data))
        return Code.from_json(data["code"])

    def _load(self, launchable: Any, resolved: Resolved) -> Any:
        kernel = triton_api.kernel_of(launchable)
        name = (kernel.name, resolved.specialization.digest)
        if name not in self._loaded:
            code = self._code(launchable, resolved)
            metadata = json.loads(self._files[code.metadata])
            entry = Entry(kernel, resolved.specialization, metadata, self._files[code.binary], code.launcher)
            self._loaded[name] = load_entry(entry, torch.cuda.current_device(), self._libraries, launchable)
        return self._loaded[name]


class InterpretedCode:
    """No code: the interpreter runs the Python function. Made before launches are intercepted."""

    def __init__(self) -> None:
        self._run = InterpretedFunction.run

    def identity(self, launchable: Any, resolved: Resolved) -> str:
        """The interpreter ignores everything but meta-parameters and grid."""
        constants = [(p.name, p.token) for p in resolved.specialization.parameters if p.type == "constexpr"]
        return f"{constants} {resolved.grid}"

    def runner(self, launchable: Any, resolved: Resolved) -> Runner:
        function = triton_api.innermost(launchable)

        def launch(args: Sequence[Any], kwargs: Mapping[str, Any], bound: Sequence[Any]) -> Any:
            return self._run(function, *args, grid=resolved.grid, warmup=False, **kwargs)

        return launch
