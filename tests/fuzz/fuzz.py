"""Fuzzes the readers of bundles and manifests: ``python tests/fuzz/fuzz.py --cpu-seconds 600``.

Atheris drives, with coverage of kernelbake as its guide; where it is not installed, hypothesis draws the inputs. The
time is CPU time and is shared by the targets. An input that fails is kept under ``--failures``; the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

HANG_S = 20
"""An input that takes longer is a hang."""


def main() -> int:
    """Runs the targets one after the other, each in a process of its own; prints one line of JSON."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of bundles and manifests.")
    parser.add_argument("--cpu-seconds", type=float, default=600.0, help="CPU time of all targets together")
    parser.add_argument("--target", action="append", choices=["bundle", "manifest"], help="only this target")
    parser.add_argument("--failures", type=Path, default=ROOT / "build" / "fuzz", help="folder for inputs that fail")
    parser.add_argument(
        "--engine", choices=["atheris", "hypothesis"], help="the default is atheris where it is installed"
    )
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or ["bundle", "manifest"]
    engine = options.engine or _engine()
    options.failures.mkdir(parents=True, exist_ok=True)
    if options.inner:
        run = {"atheris": _atheris, "hypothesis": _hypothesis}[engine]
        run(targets[0], options.cpu_seconds, options.failures)
        return 0
    before = set(options.failures.iterdir())
    shares = {target: options.cpu_seconds / len(targets) for target in targets}
    done = {target: _child(target, share, options.failures, engine) for target, share in shares.items()}
    found = sorted(path.name for path in set(options.failures.iterdir()) - before)
    broken = [target for target, (_, code) in done.items() if code != 0]
    cpu = sum(seconds for seconds, _ in done.values())
    failures = max(len(found), len(broken))
    print(json.dumps({"engine": engine, "cpu_s": round(cpu, 1), "failures": failures, "inputs": found}))
    return 1 if failures else 0


def _engine() -> str:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return "hypothesis"
    return "atheris"


def _child(target: str, seconds: float, failures: Path, engine: str) -> tuple[float, int]:
    """CPU seconds used, children of the child included, and the exit status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--inner", "--target", target, "--engine", engine]
    command += ["--cpu-seconds", str(seconds), "--failures", str(failures)]
    code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, code


class Once:
    """Runs a target until its CPU time is used up; keeps the input of a failure."""

    def __init__(self, target: str, seconds: float, failures: Path) -> None:
        import fuzzing

        self._run = fuzzing.TARGETS[target]
        self._prefix, self._failures = target, failures
        self._end = time.process_time() + seconds
        self.runs = self.accepted = 0

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.process_time() >= self._end

    def __call__(self, data: bytes) -> None:
        start = time.process_time()
        try:
            self.accepted += self._run(data)
            self.runs += 1
            if time.process_time() - start > HANG_S:
                raise TimeoutError(f"one input took more than {HANG_S} s")
        except Exception:
            name = f"{self._prefix}-{hashlib.sha256(data).hexdigest()[:16]}"
            (self._failures / name).write_bytes(data)
            print(f"fuzz: input kept as {self._failures / name}", file=sys.stderr)
            raise

    def report(self) -> None:
        """One line for people."""
        print(f"fuzz: {self._prefix}: {self.runs} inputs, {self.accepted} accepted", file=sys.stderr)


def _atheris(target: str, seconds: float, failures: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["kernelbake"]):
        import fuzzing
    once = Once(target, seconds, failures)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-seeds-"))

    def one_input(data: bytes) -> None:
        if once.over:
            once.report()
            shutil.rmtree(folder)
            sys.stderr.flush()
            os._exit(0)  # libFuzzer counts wall time only, and takes every other way out for a crash
        once(data)

    for number, seed in enumerate([*fuzzing.seeds(target), *_regressions(target)]):
        (folder / f"seed{number}").write_bytes(seed)
    flags = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=0", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={failures}/{target}-", str(folder)], one_input)
    atheris.Fuzz()


def _hypothesis(target: str, seconds: float, failures: Path) -> None:
    import fuzzing
    import hypothesis
    from hypothesis import strategies as st

    once = Once(target, seconds, failures)
    known = [*fuzzing.seeds(target), *_regressions(target)]
    for seed in known:
        once(seed)
    patches = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), max_size=4)
    inputs = st.binary(max_size=4096) | st.builds(_patched, st.sampled_from(known), patches)

    @hypothesis.settings(
        max_examples=500, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(inputs)
    def batch(data: bytes) -> None:
        once(data)

    while not once.over:
        batch()
    once.report()


def _patched(seed: bytes, patches: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(seed)
    for start, piece in patches:
        at = start % (len(data) + 1)
        data[at : at + len(piece)] = piece
    return bytes(data)


def _regressions(target: str) -> list[bytes]:
    """Inputs that failed once; they are kept in the repository, small."""
    return [path.read_bytes() for path in sorted((Path(__file__).parent / "corpus" / target).glob("*"))]


if __name__ == "__main__":
    sys.exit(main())
