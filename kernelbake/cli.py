"""The command line: parse, one library call, print. The only file of kernelbake that exits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import kernelbake
from kernelbake import render, terminal
from kernelbake.bounds import Limits

if TYPE_CHECKING:
    from kernelbake.manifest import Manifest

EPILOG = (
    "Exit codes: 0 done, 1 our fault, 2 input, 3 bundle, 4 misfit, 5 missing, 6 build, 7 locked, 130 and 143 signals."
)
BUNDLE = "bundle.tar"


# ---------------------------------------------------------------------------------------------- parameters


def _bundle_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    path = click.Path(path_type=Path)
    return click.argument("bundle", type=path, default=BUNDLE)(function)


def _manifest_option(*, required: bool) -> Callable[..., Any]:
    text = "A path, a name in ./manifests, or a packaged manifest (sm120.yaml, sm90.yaml, cpu.yaml, …)."
    return click.option("--manifest", "-m", metavar="FILE", required=required, help=text)


_variants_option = click.option(
    "--max-variants",
    type=click.IntRange(min=1),
    metavar="N",
    default=Limits.max_variants,
    show_default=True,
    help="Refuse a kernel that needs more classes of arguments, with the argument that drives them.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _load(name: str) -> Manifest:
    from kernelbake import manifest

    return manifest.load(manifest.find(name))


# ---------------------------------------------------------------------------------------------- commands


@click.group(
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Bake every Triton kernel of a training run into one checksummed bundle, and check what a bundle holds.",
)
@click.version_option(kernelbake.__version__, prog_name="kernelbake")
def cli() -> None:
    """The group itself does nothing."""


@cli.command()
@_manifest_option(required=True)
@click.option("--by", type=click.Choice(["kernel", "case"]), default="kernel", help="What the rows of the table are.")
@click.option("--case", "only", metavar="TEXT", multiple=True, help="Only cases whose id holds TEXT; repeatable.")
@_variants_option
@_json_option
def plan(manifest: str, by: str, only: tuple[str, ...], max_variants: int, as_json: bool) -> None:
    """List every launch that a training run will make.

    A shadow run of the workload on fake tensors: no GPU is needed and no weight is loaded.
    """
    from kernelbake import inspect, planner

    wanted = _load(manifest)
    with render.progress() as on_progress:
        found = planner.plan(
            wanted.plugin,
            wanted.section,
            wanted.profile,
            interpreted=wanted.interpreted,
            on_progress=on_progress,
            limits=Limits(max_variants=max_variants),
        )
    shown = inspect.only_cases(found, only)
    render.plan(shown, by=by, as_json=as_json)


@cli.command()
@_manifest_option(required=True)
@click.option("--output", "-o", type=click.Path(path_type=Path), default=BUNDLE, show_default=True, help="The bundle.")
@click.option("--compile-only", is_flag=True, help="Compile all candidates, measure nothing; needs no GPU.")
@click.option(
    "--from", "compiled_from", type=click.Path(path_type=Path), help="Take code from a --compile-only bundle."
)
@click.option("--jobs", "-j", type=click.IntRange(1, 1024), help="Compiling processes; default: one per core.")
@_variants_option
@click.option("--allow-busy-gpu", is_flag=True, help="Measure although other processes use the GPU.")
@click.option("--line-info", is_flag=True, help="Keep source lines for profilers; the bundle is marked.")
@click.option("--json-events", is_flag=True, help="Print one JSON object per event instead of progress bars.")
def build(manifest: str, output: Path, json_events: bool, **options: Any) -> None:
    """Plan, compile, measure and pack a bundle.

    Prints the bundle's digest. A build that was killed goes on where it was.
    """
    wanted = _load(manifest)
    from kernelbake import build as library

    with render.events(as_json=json_events) as on_event:
        result = library.build(wanted, output, on_event=on_event, **options)
    if result.tells:
        render.built(result, as_json=json_events)


@cli.command()
@_bundle_argument
@_manifest_option(required=False)
@click.option("--config", type=click.Path(path_type=Path), help="A run's configuration; is it covered?")
@click.option("--for", "gpu_target", metavar="GPU", help="Check the fit for sm_120, say, or a device profile.")
@click.option("--device", metavar="NAME", help="With --for: the device name as its driver reports it.")
@click.option(
    "--replan", is_flag=True, help="Plan anew by a shadow run; without it the plan in the bundle is compared."
)
@click.option(
    "--on-device", is_flag=True, help="Load every binary, run every launch, compare what it writes with the record."
)
@click.option("--rebench", type=click.IntRange(min=1), metavar="N", help="Decide N sampled keys anew by measuring.")
@click.option("--seed", type=int, default=0, show_default=True, help="With --rebench: which keys are sampled.")
@click.option("--allow-busy-gpu", is_flag=True, help="With --rebench: measure although other processes use the GPU.")
@click.option(
    "--trusted",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Require a signature by a key in this file.",
)
@_json_option
def verify(bundle: Path, as_json: bool, **options: Any) -> None:
    """Prove what a bundle is worth, level by level.

    Integrity, fit and coverage; each level says what it proved, refused or did not check, and why. With --on-device a
    launch that writes something else than was recorded refuses with exit code 3; with --rebench a winner that is now
    beaten beyond the tie threshold refuses with 6.
    """
    from kernelbake import levels

    with render.progress("verify") as on_progress:
        report = levels.verify(bundle, levels.Request(**options), on_progress=on_progress)
    render.verified(report, as_json=as_json)
    for refusal in report.refusals:
        raise refusal


@cli.command()
@_bundle_argument
@click.option("--kernel", metavar="TEXT", help="Only kernels whose name holds TEXT.")
@_json_option
def show(bundle: Path, kernel: str | None, as_json: bool) -> None:
    """Show what a bundle holds.

    Its origin, its fingerprint, every choice, and how many candidates were rejected for which reason.
    """
    from kernelbake import inspect

    render.shown(inspect.show(bundle, kernel=kernel), as_json=as_json)


@cli.command()
@_bundle_argument
@_manifest_option(required=False)
@click.option("--config", type=click.Path(path_type=Path), help="A run's configuration instead of a manifest.")
@_json_option
def coverage(bundle: Path, manifest: str | None, config: Path | None, as_json: bool) -> None:
    """List what a bundle lacks for a manifest or a run.

    The manifest's or the run's workload is planned anew; without either, the bundle's own.
    """
    from kernelbake import inspect

    with render.progress() as on_progress:
        found = inspect.coverage_of(bundle, manifest=manifest, config=config, on_progress=on_progress)
    render.coverage(found, as_json=as_json)
    found.refuse("coverage")


@cli.command()
@click.argument("kernel")
@_bundle_argument
@click.option("--key", metavar="TEXT", default="", help="Only keys whose text holds TEXT.")
@_json_option
def explain(bundle: Path, kernel: str, key: str, as_json: bool) -> None:
    """Say why a kernel's keys are in a bundle.

    For every key of the kernels whose name holds KERNEL: the cases that launch it, the choice, every candidate that
    was tried, and the nearest other key.
    """
    from kernelbake import inspect

    render.explained(inspect.explain(bundle, kernel, key), as_json=as_json)


@cli.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@_json_option
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Compare two bundles.

    Their fingerprints, keys, choices and code.
    """
    from kernelbake import bundle, diff

    render.diff(diff.diff(bundle.read(old), bundle.read(new)), as_json=as_json)


@cli.command()
@_bundle_argument
@click.option("--key", required=True, type=click.Path(path_type=Path), help="A private Ed25519 key in OpenSSH's form.")
def sign(bundle: Path, key: Path) -> None:
    """Write a detached signature beside a bundle.

    Prints the signature's path.
    """
    from kernelbake import signing

    terminal.line(str(signing.sign(bundle, key)))


@cli.command()
@click.argument("bundles", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="The merged bundle.")
@_json_option
def merge(bundles: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Join bundles of one fingerprint.

    Keeps the launches and the evidence of all. Prints the new bundle's digest.
    """
    from kernelbake import merge as library

    render.built(library.merge(bundles, output), as_json=as_json)


# ---------------------------------------------------------------------------------------------- running and ending


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    sys.exit(terminal.run(lambda: terminal.invoke(cli, "kernelbake", arguments), "kernelbake"))
