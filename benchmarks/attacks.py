"""Attacks on bundles: bytes flipped, files cut, hostile files, fuzzing; and how fast a sound bundle is checked.

``python benchmarks/attacks.py`` runs all of it and writes ``results/attacks.json``; for a look, ``--fuzz-cpu-s`` and
the numbers can be smaller.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import common

sys.path[:0] = [str(common.ROOT), str(common.ROOT / "tests" / "support")]

import damage  # noqa: E402
import hostile  # noqa: E402
import samples  # noqa: E402

from kernelbake import archive, bundle, verify  # noqa: E402
from kernelbake.errors import BundleError  # noqa: E402
from kernelbake.rules import Rule, ViolationsError  # noqa: E402

SEED = 1


def main() -> int:
    """Runs everything; the exit status is 1 if any attack was not refused."""
    parser = common.parser(__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--cuts", type=int, default=1_000)
    parser.add_argument("--fuzz-cpu-s", type=float, default=3600.0)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the bundle whose check is timed")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    recorder = common.Recorder("attacks", __file__, options.commit, options.results)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _damage(recorder, folder, options.flips, options.cuts)
        _files(recorder, folder)
        _speed(recorder, folder, options.megabytes, options.rounds)
    _fuzz(recorder, options.fuzz_cpu_s)
    path = recorder.write()
    print(json.dumps(recorder.figures), path, sep="\n")
    figures = recorder.figures
    refused = all(figures[what] == figures[f"{what}_refused"] for what in ("flips", "cuts", "files"))
    return 0 if refused and figures["fuzz_failures"] == 0 else 1


def _say(text: str) -> None:
    print(f"attacks: {text}", file=sys.stderr, flush=True)


def _damage(recorder: common.Recorder, folder: Path, flips: int, cuts: int) -> None:
    """A bundle of the shape of a real one: some dozens of entries of some ten thousand bytes."""
    members, _ = bundle._members(samples.contents(8, keys_each=2, cubin_bytes=16_000), 0)
    data = b"".join(archive.pack(members, 0))
    recorder.raw["damaged_bundle_bytes"] = len(data)
    path = folder / "damaged.tar"
    for what, number, damaged in (
        ("flips", flips, damage.flips(data, flips, SEED)),
        ("cuts", cuts, damage.cuts(data, cuts, SEED)),
    ):
        refused, places, rules = _refusals(path, damaged)
        recorder.add(what, number)
        recorder.add(f"{what}_refused", refused)
        recorder.raw[what] = {"named_a_member_or_a_place": places, "refusals_by_rule": rules}
        _say(f"{refused} of {number} {what} refused")


def _refusals(path: Path, damaged: Iterable[tuple[int, bytes]]) -> tuple[int, int, dict[str, int]]:
    """How many were refused, how many of these named a member or a byte, and by which rules."""
    refused = named = 0
    rules = dict.fromkeys((rule.name for rule in Rule), 0)
    for _, content in damaged:
        path.write_bytes(content)
        try:
            bundle.read(path)
        except ViolationsError as error:
            refused += 1
            named += all(violation.place for violation in error.violations)
            for rule in {violation.rule for violation in error.violations}:
                rules[rule.name] += 1
    return refused, named, {name: number for name, number in rules.items() if number}


def _files(recorder: common.Recorder, folder: Path) -> None:
    files = hostile.load()
    refused, slowest = 0, ("", 0.0)
    for number, (name, file) in enumerate(files.items()):
        path = folder / f"hostile{number}.tar"
        file.make(path)
        start = time.process_time()
        try:
            bundle.read(path)
        except ViolationsError as error:
            refused += set(file.rules) <= {violation.rule for violation in error.violations}
        slowest = max(slowest, (name, time.process_time() - start), key=lambda pair: pair[1])
        if path.is_file():
            path.unlink()
    recorder.add("files", len(files))
    recorder.add("files_refused", refused)
    recorder.raw["files"] = {"rules_attacked": len(Rule), "slowest": slowest[0], "slowest_cpu_s": round(slowest[1], 3)}
    _say(f"{refused} of {len(files)} hostile files refused by the right rule")


def _speed(recorder: common.Recorder, folder: Path, megabytes: int, rounds: int) -> None:
    """Every byte of a large bundle checked, against the hash of the same bytes in memory, in turns."""
    path = folder / "large.tar"
    size = 100_000
    bundle.write(path, samples.contents(megabytes * 10 // 20, keys_each=10, cubin_bytes=size))
    data = path.read_bytes()
    times: dict[str, list[float]] = {"hash": [], "integrity": [], "read": []}
    runs: dict[str, Callable[[], object]] = {
        "hash": lambda: hashlib.sha256(data).digest(),
        "integrity": lambda: verify.inspect(path),
        "read": lambda: bundle.read(path),
    }
    for _ in range(rounds):
        for what, run in runs.items():
            start = time.perf_counter()
            result = run()
            times[what].append(time.perf_counter() - start)
            del result
    medians = {what: statistics.median(values) for what, values in times.items()}
    recorder.add("integrity_speed_ratio", round(medians["hash"] / medians["integrity"], 3))
    recorder.raw["speed"] = {
        "bundle_bytes": len(data),
        "entries": len(bundle.read(path).entries),
        "seconds": {what: [round(value, 4) for value in values] for what, values in times.items()},
        "read_speed_ratio": round(medians["hash"] / medians["read"], 3),
        "what": "hash: sha256 of the bytes in memory; integrity: MUST 1 to 20, from the file; read: all MUSTs",
    }
    _say(f"integrity at {medians['hash'] / medians['integrity']:.2f} of the speed of sha256 in memory")


def _fuzz(recorder: common.Recorder, cpu_s: float) -> None:
    script = common.ROOT / "tests" / "fuzz" / "fuzz.py"
    with tempfile.TemporaryDirectory() as failures:
        command = [sys.executable, str(script), "--cpu-seconds", str(cpu_s), "--failures", failures]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.stdout:
        raise BundleError("fuzz: it ended without a result", reasons=done.stderr.splitlines()[-20:])
    result = json.loads(done.stdout.splitlines()[-1])
    recorder.add("fuzz_cpu_s", result["cpu_s"])
    recorder.add("fuzz_failures", result["failures"])
    counts = [line.removeprefix("fuzz: ") for line in done.stderr.splitlines() if line.startswith("fuzz: ")]
    recorder.raw["fuzz"] = {"engine": result["engine"], "inputs": counts}
    _say(f"{result['cpu_s']} CPU seconds of fuzzing, {result['failures']} failures")


if __name__ == "__main__":
    sys.exit(main())
