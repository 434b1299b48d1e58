"""What ``torchrun`` starts in tests of ranks: one builder. Arguments: output, then what shall go wrong, if anything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kernelbake import build, profiles
from kernelbake.errors import KernelbakeError
from kernelbake.manifest import CompileOptions, Manifest, MeasurePolicy


def main(output: Path, fault: str) -> int:
    rank = int(os.environ.get("RANK", "0"))
    if fault == "environment" and rank == 1:
        os.environ["FLA_EXAMPLE"] = "1"
    kernels = ["scale", "shift", "accumulate", "wrong_at_128"]
    manifest = Manifest(
        format=1,
        name="ranks",
        profile=profiles.load("interpreter"),
        plugin="toyworkload:WORKLOAD",
        section={"sizes": [100], "kernels": kernels},
        measure=MeasurePolicy(warmup_ms=0, samples_ms=1, min_samples=2, max_samples=2, rounds=1, max_extra_rounds=0),
        compile=CompileOptions(),
        text=b"name: ranks\n",
        source="ranks.yaml",
    )
    told = 0

    def on_event(event: object) -> None:
        nonlocal told
        told += 1

    try:
        result = build.build(manifest, output, on_event=on_event)
    except KernelbakeError as error:
        said = {"message": error.message, "reasons": list(error.reasons), "code": int(error.exit_code)}
        output.with_name(f"said.{rank}").write_text(json.dumps(said))
        return int(error.exit_code)
    output.with_name(f"said.{rank}").write_text(json.dumps({"digest": result.digest, "told": told}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
