"""The attention kernels' candidates compiled without a GPU: shared memory, registers, spills, matrix instructions."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash.attention import candidates, kernels
from kernelbake import triton_api

GPUS = {90: "sm_90", 100: "sm_100", 120: "sm_120"}
SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376}

_POINTERS = {"lse_ptr": "fp32", "delta_ptr": "fp32", "bounds_ptr": "i32", "counts_ptr": "i32"}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA")


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a call the kernels are compiled for."""

    head_dim: int = 128
    dtype: str = "bf16"
    group: int = 4
    block_size: int = 16
    causal: bool = False
    bounded: bool = False

    def constants(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.head_dim,
            "ITEM_BYTES": 2 if self.dtype == "bf16" else 4,
            "KV_HEADS": 8,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "CAUSAL": self.causal,
            "BOUNDED": self.bounded,
        }


@dataclasses.dataclass(frozen=True)
class Built:
    """What became of a candidate.

    Args:
        shared_bytes, registers, stack_bytes: of the kernel; registers and stack per thread.
        spills, loop_spills: instructions that spill or reload, in all and inside loops of matrix products.
        matrix: kinds of matrix instructions in the machine code.
        ptx: the code before assembly.
    """

    shared_bytes: int
    registers: int
    stack_bytes: int
    spills: int
    loop_spills: int
    matrix: tuple[str, ...]
    ptx: str


def configs(capability: int) -> list[tuple[str, triton.Config]]:
    """All candidates for a compute capability written without a dot, with the kernel's name."""
    major_minor = divmod(capability, 10)
    return [
        *(("forward", config) for config in candidates.forward_configs(major_minor)),
        *(("backward", config) for config in candidates.backward_configs(major_minor)),
    ]


def build(name: str, config: triton.Config, capability: int, form: Form) -> Built:
    """Compiles a candidate and reads its machine code."""
    function = triton_api.compiled_function(getattr(kernels, f"anchor_{name}_kernel"))
    values = {**form.constants(), **config.kwargs}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(function.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[index,] = values[parameter.name]
        elif parameter.name.endswith("_ptr"):
            signature[parameter.name] = "*" + _POINTERS.get(parameter.name, form.dtype)
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if parameter.name.startswith("scale") else "i32"
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (_tool(option, file.name) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    spills, loop_spills, matrix = _read(code)
    return Built(
        compiled.metadata.shared, int(found[1]), int(found[2]), spills, loop_spills, matrix, compiled.asm["ptx"]
    )


def _tool(option: str, file: str) -> str:
    done = subprocess.run([str(_TOOLS / "cuobjdump"), option, file], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _read(code: str) -> tuple[int, int, tuple[str, ...]]:
    """Spills, spills in loops that multiply matrices, and the kinds of matrix instructions of disassembled code."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", code)]
    place = {at: index for index, (at, _) in enumerate(lines)}
    names = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in lines]
    in_loop: set[int] = set()
    for index, (at, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        start = place.get(int(target[1], 16)) if target and int(target[1], 16) < at else None
        if start is not None and any(name in _MATRIX for name in names[start:index]):
            in_loop.update(range(start, index + 1))
    spilling = [index for index, name in enumerate(names) if name in ("STL", "LDL")]
    kinds = collections.Counter(name for name in names if name in _MATRIX)
    return len(spilling), sum(index in in_loop for index in spilling), tuple(sorted(kinds))


def label(config: triton.Config) -> str:
    """A config in one short line."""
    tiles = dict(config.kwargs)
    text = f"{tiles['TILE_M']}×{tiles['TILE_N']}"
    if "KEY_TILE_M" in tiles:
        text += f", keys {tiles['KEY_TILE_M']}×{tiles['KEY_TILE_N']}"
    return f"{text}, {config.num_warps} warps, {config.num_stages} stages"


def row_start(key: tuple[int, str, str]) -> str:
    """The first columns of a candidate's row, which no compiler changes."""
    capability, name, config = key
    return f"| {GPUS[capability]} | {name} | {config} | "


def row(key: tuple[int, str, str], built: Built) -> str:
    """A candidate's row of the table."""
    return (
        f"{row_start(key)}{built.shared_bytes:,} | {built.registers} | {built.stack_bytes} | {built.spills} "
        f"| {built.loop_spills} | {', '.join(built.matrix)} |"
    )


def table(found: dict[tuple[int, str, str], Built]) -> str:
    """The table of docs/attention.md."""
    head = "| GPU | kernel | config | shared bytes | registers | stack bytes | spills | in loops | matrix unit |"
    return "\n".join([head, "|" + " --- |" * 9, *(row(key, built) for key, built in found.items())])
