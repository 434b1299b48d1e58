"""Kills the builder 50 times with SIGKILL at random moments, and lets it go on each time. Any machine, no GPU.

Candidates are scripted: what each does and how long it takes is written in its name, and one of them aborts its worker.
Half of the moments are random in time, the other half in the journal's length, since most of a small build's time is
spent on starting processes. A kill is bad if the final name then holds anything but nothing or a sound bundle, or if
the build that goes on from the journal chooses otherwise than one that nothing disturbed, to the last byte. Writes
``build_kills.json``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"

_BUILDER = """
import sys
from pathlib import Path
import build_kills
build_kills.build_once(Path(sys.argv[1]))
"""


def build_once(output: Path) -> None:
    """One build, in the process that is killed."""
    import scripted

    from kernelbake import build
    from kernelbake.build import Options

    plan = scripted.plan(
        [
            scripted.launch("a", ["time=2.0", "time=1.0", "time=1.005", "wrong+time=0.1"], cases=["size=1"]),
            scripted.launch("b", ["time=1.0", "abort", "time=3.0", "nan"], cases=["size=1", "size=2"]),
            scripted.launch("c", ["time=4.0", "time=3.0", "noise+time=1.0"], cases=["size=2"]),
            scripted.launch("d", ["time=1.0"], key=None, cases=["size=2"]),
        ],
        cases=2,
    )
    options = Options(engine=scripted.ENGINE, plan=plan, fingerprint=scripted.fingerprint(plan))
    build.run(scripted.manifest(pause_s=0.2), output, options, lambda event: None)


def builder(output: Path) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(map(str, (SUPPORT, ROOT, ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", _BUILDER, str(output)], env=environment)


def choices(output: Path) -> bytes:
    """The canonical bytes of a sound bundle's choices."""
    from kernelbake import bundle, digest

    return digest.canonical_json([choice.to_json() for choice in bundle.read(output).choices])


def journal_of(output: Path) -> Path:
    return output.with_name(output.name + ".work") / "journal"


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def undisturbed(output: Path) -> tuple[float, int]:
    """Builds once; how long it took in s, and how long its journal became in bytes."""
    start = time.perf_counter()
    process = builder(output)
    longest = 0
    while process.poll() is None:
        longest = max(longest, size_of(journal_of(output)))
        time.sleep(0.005)
    if process.returncode:
        sys.exit("build_kills: the undisturbed build failed")
    return time.perf_counter() - start, longest


def wait(victim: subprocess.Popen[bytes], output: Path, *, after_s: float | None, after_bytes: int | None) -> None:
    """Until the moment of the kill, or until the build has ended."""
    start = time.perf_counter()
    while victim.poll() is None:
        if after_s is not None and time.perf_counter() - start >= after_s:
            return
        if after_bytes is not None and size_of(journal_of(output)) >= after_bytes:
            return
        time.sleep(0.001)


def one_kill(output: Path, unbroken: bytes, **moment: Any) -> dict[str, Any]:
    """Kills a build once and finishes it; says what went wrong, if anything."""
    victim = builder(output)
    wait(victim, output, **moment)
    ended = victim.poll() is not None
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    faults = []
    if output.exists():
        try:
            choices(output)
        except Exception as error:
            faults.append(f"a bad bundle under the final name: {error}")
    journal = journal_of(output)
    records = len(journal.read_bytes().splitlines()) if journal.exists() else 0
    if builder(output).wait():
        faults.append("the build did not go on")
    elif choices(output) != unbroken:
        faults.append("other choices than undisturbed")
    return {**moment, "had_ended": ended, "journal_lines": records, "faults": faults}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recorder = common.Recorder("build_kills", __file__, options.commit, options.results)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole_s, whole_bytes = undisturbed(folder / "unbroken.tar")
        unbroken = choices(folder / "unbroken.tar")
        trials: list[dict[str, Any]] = []
        killed = 0
        while killed < options.kills:
            in_time = chance.random() < 0.5
            after_s = round(chance.uniform(0.1, 0.95) * whole_s, 3) if in_time else None
            after_bytes = None if in_time else chance.randrange(whole_bytes)
            output = folder / f"{len(trials)}.tar"
            trials.append(one_kill(output, unbroken, after_s=after_s, after_bytes=after_bytes))
            killed += not trials[-1]["had_ended"]
            print(f"{killed}/{options.kills} {trials[-1]}", flush=True)
    recorder.add("kills_tried", killed)
    recorder.add("kills_bad", sum(bool(trial["faults"]) for trial in trials))
    recorder.raw |= {"undisturbed_s": whole_s, "trials": trials, "seed": options.seed}
    print(recorder.write())


if __name__ == "__main__":
    main()
