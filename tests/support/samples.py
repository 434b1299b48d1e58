"""Bundles made for tests: small, sound in every respect, and of any size that is asked for. No GPU and no Triton."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from kernelbake import fingerprint, profiles
from kernelbake.bundle import Contents, Entry
from kernelbake.fingerprint import Fingerprint
from kernelbake.keys import AutotuneKey, Case, Config, Kernel, Parameter, Specialization, Symbol
from kernelbake.plan import Choice, KernelFacts, Launch, Plan, Variant
from kernelbake.profiles import DeviceProfile


def cubin(arch: int = 90, size: int = 4096, seed: int = 0, *, new_abi: bool = False) -> bytes:
    """Bytes with the header of a cubin for the GPU and noise behind it."""
    head = bytearray(64)
    head[:8] = b"\x7fELF\x02\x01\x01" + bytes([0x41 if new_abi else 0x33])
    head[8] = 8 if new_abi else 7
    head[16:20] = b"\x02\x00" + (190).to_bytes(2, "little")
    flags = arch << 8 | 0x06000002 if new_abi else arch << 16 | 0x0500 | arch
    head[48:52] = flags.to_bytes(4, "little")
    noise = hashlib.shake_128(seed.to_bytes(8, "little")).digest(size - len(head))
    return bytes(head) + noise


def specialization(block: int, warps: int, divisible: bool, n: int = 512) -> Specialization:
    """What a call of the sample kernels specializes on."""
    pointer = Parameter("x", "*bf16", "D" if divisible else "")
    parameters = (pointer, Parameter("n", "constexpr", n), Parameter("BLOCK", "constexpr", block))
    return Specialization(parameters, (("num_stages", 3), ("num_warps", warps)))


def metadata(arch: int, warps: int, shared: int = 1024, **more: Any) -> dict[str, Any]:
    """Launch metadata as Triton gives it, as far as anyone asks."""
    target = {"arch": arch, "backend": "cuda", "warp_size": 32}
    fixed = {"name": "kernel", "num_ctas": 1, "num_stages": 3, "num_warps": warps, "shared": shared}
    return {**fixed, "target": target, "tmem_size": 0, "global_scratch_size": 0, **more}


def facts(kernel: Kernel) -> KernelFacts:
    """Facts of a sample kernel."""
    digest_ = "sha256:" + hashlib.sha256(kernel.name.encode()).hexdigest()
    wrappers = ("Autotuner", "JITFunction")
    return KernelFacts(kernel, wrappers, ("x", "n", "BLOCK"), ("n",), digest_, digest_, 2)


def fingerprint_of(profile: DeviceProfile, kernels: Sequence[KernelFacts], **changes: Any) -> Fingerprint:
    """The fingerprint of a machine with that GPU; ``changes`` by field name with ``__`` for the dot."""
    values: dict[str, Any] = {
        "gpu.backend": profile.backend,
        "gpu.capability": fingerprint.capability(*profile.capability),
        "gpu.device": profile.name,
        "gpu.sm_count": profile.sm_count,
        "gpu.shared_memory_bytes": profile.shared_memory_bytes,
        "triton.version": "3.7.1",
        "triton.key": "sha256:" + "ab" * 32,
        "triton.environment": {},
        "kernel.sources": fingerprint.sources_digest(kernels),
        "build.ptxas": "12.8.93",
        "build.line_info": False,
        "build.fp_fusion": True,
        "build.environment": {},
        "driver.version": "580.65.06",
        "torch.version": "2.13.0",
        "fla.version": "0.6.0",
        "transformers.version": "5.17.0",
    }
    return Fingerprint.of({**values, **{name.replace("__", "."): value for name, value in changes.items()}})


CANDIDATES = (Config((("BLOCK", 64),), 4, 3), Config((("BLOCK", 128),), 8, 3))


def launch(kernel: Kernel, n: int, case: str) -> Launch:
    """One tuned launch with two candidates and two variants of arguments."""
    key = AutotuneKey((("n", n), ("dtype", Symbol("dtype", "bf16"))), (("x", "torch.bfloat16"),))
    variants = tuple(
        Variant(
            tuple(specialization(int(c.meta[0][1]), c.num_warps or 4, divisible, n) for c in CANDIDATES),  # type: ignore[arg-type]
            (case,),
            ((n, 1, 1),),
        )
        for divisible in (False, True)
    )
    return Launch(kernel, key, CANDIDATES, variants)


def contents(
    num_kernels: int = 2,
    *,
    keys_each: int = 2,
    cubin_bytes: int = 4096,
    profile: str = "h200",
    made: Any = "measured",
    launchers: bool = False,
) -> Contents:
    """The contents of a sound bundle: each kernel at some keys, two entries for each key."""
    device = profiles.load("interpreter" if made == "interpreted" else profile)
    kernels = [Kernel(f"sample.module{number}", f"kernel{number}") for number in range(num_kernels)]
    cases = tuple(Case((("bucket", 512 * (number + 1)), ("batch", 1))) for number in range(keys_each))
    launches = tuple(
        sorted(
            (launch(kernel, 512 * (i + 1), cases[i].id) for kernel in kernels for i in range(keys_each)),
            key=lambda item: item.id,
        )
    )
    libs = {}
    if launchers:
        library = b"\x7fELF" + bytes(124)
        libs["sha256:" + hashlib.sha256(library).hexdigest()] = library
    entries: dict[str, Entry] = {}
    choices = []
    for number, item in enumerate(launches):
        winner = number % 2
        code = [
            entry(item.kernel, variant.specializations[winner], device.arch, cubin_bytes, next(iter(libs), None))
            for variant in item.variants
        ]
        if made != "interpreted":
            entries |= {each.digest: each for each in code}
        names = {each.specialization.token: None if made == "interpreted" else each.digest for each in code}
        times = {"median_ms": 0.5 + number / 8, "runner_up_ms": 0.75 + number / 8, "distinguishable": True}
        choices.append(Choice(item.kernel, item.key, item.candidates[winner], names, times))
    all_facts = {kernel.name: facts(kernel) for kernel in kernels}
    abi = {"python__abi": "cpython-311-x86_64-linux-gnu"} if launchers else {}
    return Contents(
        name="sample",
        made=made,
        manifest_text=b"format: 1\nname: sample\n",
        manifest_resolved=_resolved(device),
        fingerprint=fingerprint_of(device, list(all_facts.values()), **abi),
        plan=Plan(device.to_json(), {"python": "3.11.7"}, {"conv": "triton"}, cases, (), all_facts, launches),
        choices=tuple(choices),
        record=tuple(_record(item, config) for item in launches for config in item.candidates),
        entries=entries,
        libs=libs,
    )


def entry(kernel: Kernel, wanted: Specialization, arch: int, cubin_bytes: int, launcher: str | None) -> Entry:
    """An entry whose code is noise that follows from what it is for."""
    noise = int(hashlib.sha256(f"{kernel} {wanted.token}".encode()).hexdigest()[:12], 16)
    warps = dict(wanted.options)["num_warps"]
    code = cubin(arch, cubin_bytes, noise, new_abi=arch >= 100)
    return Entry(kernel, wanted, metadata(arch, warps, seed=noise), code, launcher)  # type: ignore[arg-type]


def _record(item: Launch, config: Config) -> dict[str, Any]:
    return {
        "kernel": item.kernel.to_json(),
        "key": item.key.to_json() if item.key else None,
        "config": config.to_json(),
        "outcome": "ok",
        "samples_ms": [0.5, 0.25],
    }


def _resolved(device: DeviceProfile) -> dict[str, Any]:
    return {
        "format": 1,
        "name": "sample",
        "gpu": device.to_json(),
        "workload": {"plugin": "sample", "section": {}},
        "measure": {},
        "compile": {"line_info": False, "fp_fusion": True},
    }


def changed(base: Contents, **changes: Any) -> Contents:
    """The contents with other fields; with another resolved manifest also under its name."""
    if "manifest_resolved" in changes:
        changes.setdefault("name", changes["manifest_resolved"]["name"])
    return dataclasses.replace(base, **changes)


def named(base: Contents, name: str) -> Contents:
    """The contents under another name."""
    return changed(base, manifest_resolved={**base.manifest_resolved, "name": name})
