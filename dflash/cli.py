"""The command line: parse, one library call, print. The only file of dflash that exits."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import dflash
from dflash import config, errors, placement, ranks, render
from dflash.config import RunConfig
from dflash.stop import Interrupted, Stop
from kernelbake import terminal
from kernelbake.errors import InputError, KernelbakeError

if TYPE_CHECKING:
    from dflash.launch import Plan, Recorded, Started
    from dflash.reports import Made
    from dflash.trainer import Trainer
    from kernelbake.preflight import Preflight
    from kernelbake.workload import Footprint

EPILOG = (
    "Exit codes: 0 done, 1 our fault, 2 input, 3 bundle, 4 misfit, 5 missing, 6 no plan, 7 locked, 8 stopped, "
    "130 and 143 signals."
)

_OPTIONS = (
    ("--frozen-cache", "bundle", str, "FILE", "The bundle; its manifest names workload, target and data source."),
    ("--require-signature", "require_signature", str, "KEY", "Refuse a bundle that no key of this file has signed."),
    ("--target", "target", str, "MODEL", "Hub id, folder, or `random` for random weights of the planned shape."),
    ("--steps", "steps", int, "N", "Optimizer steps."),
    ("--max-anchors", "batch.max_anchors", int, "N", "The most anchors of a row."),
    ("--batch-size", "batch.size", int, "N", "Rows of a batch."),
    ("--layout", "batch.layout", str, "LAYOUT", "`padded` or `packed`."),
    ("--dtype", "batch.dtype", str, "DTYPE", "`bfloat16` or `float32`."),
    ("--accumulate", "batch.accumulate", int, "N", "Batches of one optimizer step."),
    ("--lr", "optimizer.lr", float, "X", "Peak learning rate."),
    ("--loss", "loss.kind", str, "KIND", "`ce`, `kl` or `mix`."),
    ("--loss-weights", "loss.weights", str, "KIND", "Of a block's positions: `decay` or `d-pace`."),
    ("--data", "data.source", str, "SOURCE", "A JSONL, JSON or parquet file, a Hub id, or `python-stdlib`."),
    ("--seed", "seed", int, "N", "Of weights, order and anchors."),
    ("--devices", "devices", str, "T[:D],…", "GPUs of target and drafter of each pair."),
    ("--dp-pairs", "dp_pairs", int, "N", "Pairs that train side by side; without --devices on one GPU each."),
    ("--watchdog-seconds", "watchdog_seconds", float, "X", "Stop a run in which nothing moves for so long."),
    ("--wandb", "tracking.wandb", str, "PROJECT", "Tell a project of Weights & Biases too."),
    ("--output", "output", str, "DIR", "Checkpoints, metrics and the served drafter."),
    ("--checkpoint-every", "checkpoint_every", int, "N", "Steps between two checkpoints."),
    ("--resume", "resume", str, "DIR", "A checkpoint, or `latest` of the output folder."),
)


def _run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run, a YAML file and single settings."""
    function = click.option("--other-bundle", is_flag=True, help="Resume what another bundle trained.")(function)
    text = "Write event files for TensorBoard too."
    function = click.option("--tensorboard", is_flag=True, default=None, help=text)(function)
    text = "Replay the target's forward pass as CUDA graphs.  [default: where it can be done]"
    function = click.option("--graphs/--no-graphs", default=None, help=text)(function)
    function = click.option("--buckets", metavar="N,N", help="Padded lengths, ascending.")(function)
    for flag, _, kind, metavar, text in reversed(_OPTIONS):
        function = click.option(flag, type=kind, metavar=metavar, help=text)(function)
    text = "One setting, as in the file; repeatable."
    function = click.option("--set", "settings", multiple=True, metavar="A.B=C", help=text)(function)
    path = click.Path(path_type=Path)
    return click.option("--config", "file", type=path, metavar="FILE", help="The run's configuration, YAML.")(function)


def _load(file: Path | None, settings: tuple[str, ...], given: dict[str, Any]) -> RunConfig:
    options = {path: given[_parameter(flag)] for flag, path, *_ in _OPTIONS}
    if given["buckets"] is not None:
        parts = given["buckets"].split(",")
        options["batch.buckets"] = [int(part) if part.strip().isdecimal() else part for part in parts]
    options["other_bundle"] = given["other_bundle"] or None
    options["graphs"] = given["graphs"]
    options["tracking.tensorboard"] = given["tensorboard"]
    return config.load(file, settings, options)


def _parameter(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


@click.group(
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Train DFlash drafters against frozen hybrid targets, every Triton launch out of a kernelbake bundle.",
)
@click.version_option(dflash.__version__, prog_name="dflash")
def cli() -> None:
    """The group itself does nothing."""


@cli.command()
@_run_options
@click.option("--stock", is_flag=True, help="Do not freeze: Triton tunes and compiles as usual, for comparison.")
@click.option("--compile", "compile_", is_flag=True, help="Refused: torch.compile makes kernels at run time.")
@click.option("--record", is_flag=True, help="Hold every launch that is made against the plan; with --stock too.")
@click.option("--profile", is_flag=True, help="Show where the time of a step goes.")
@click.option(
    "--profile-trace", type=click.Path(path_type=Path), metavar="FILE", help="Trace three steps, for Perfetto."
)
def train(
    file: Path | None,
    settings: tuple[str, ...],
    stock: bool,
    compile_: bool,
    record: bool,
    profile: bool,
    profile_trace: Path | None,
    **given: Any,
) -> None:
    """Train a drafter from a bundle, and export it.

    In order: preflight, freeze, load, steps, checkpoint. Prints the folder of the drafter as engines serve it. What is
    left open is what the file of --config says, else the bundle's manifest, else the defaults of docs/training.md.
    """
    if compile_:
        raise InputError(
            "train: --compile was given; wanted a run whose kernels all come from the bundle",
            hint="torch.compile makes kernels at run time, under names that change with torch: no bundle can hold them",
        )
    from dflash import launch

    stop = _stop()
    here = ranks.from_environment()
    if not here.leads:
        terminal.only_errors()
    run = launch.placed(_load(file, settings, given), here)
    plan = launch.settle(run, stock=stock, output=here.world == 1)  # of several ranks one looks, for all: below
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks.joined(here))
        here.together(lambda: _hold(stack, plan.run) if here.leads else None)
        wanted = record or (not stock and here.local_rank == 0)  # one for all ranks of a host
        with launch.importing(plan):
            found = here.together(lambda: _preflight(plan) if wanted else None)
        with render.doing("start without a frozen cache" if stock else "freeze"):
            started = stack.enter_context(launch.started(plan, stock=stock))
        for text in started.notes():
            terminal.note(text)
        recorded = stack.enter_context(launch.recording(found)) if record and found is not None else None
        footprints = here.gather(() if stock or found is None else found.footprints)[0]
        _train(plan, started, stop, footprints, _Asked(here, profile, profile_trace, recorded))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a person wants to know of a run beside its steps, and which rank of it this is."""

    ranks: ranks.Ranks
    profile: bool
    trace: Path | None
    recorded: Callable[[], Recorded] | None


def _stop() -> Stop:
    stop = Stop()
    stop.install()
    return stop


def _hold(stack: contextlib.ExitStack, run: RunConfig) -> None:
    from dflash import folder, launch

    stack.enter_context(launch.holding(Path(run.output)))
    folder.check(run)


def _preflight(plan: Plan) -> Preflight:
    from dflash import launch

    with render.planning() as on_progress:
        found = launch.check(plan, on_progress)
    cases = len(found.plan.cases)
    terminal.note(
        f"preflight: bundle covers this run: {cases} case{'s' if cases != 1 else ''}, "
        f"{found.coverage.num_needed} launches, {found.seconds:.1f} s"
    )
    for case in found.new_cases:
        terminal.note(f"preflight: case {case} is not named by the bundle's manifest and covered all the same")
    return found


def _train(plan: Plan, started: Started, stop: Stop, footprints: tuple[Footprint, ...], asked: _Asked) -> None:
    from dflash import folder, profiling, reports, trainer

    bundle = plan.held.digest if started.frozen else None
    job = trainer.Job(plan.run, plan.spec, bundle, plan.interpreted, footprints, asked.ranks)
    with render.doing(f"load target `{plan.spec.target.model}`"):
        made = trainer.build(job)
    for text in (made.description(), *made.notes, *(peak.line() for peak in made.peaks() if peak.predicted_bytes)):
        terminal.note(text)
    made.sinks = started.sinks
    made.profiler = profiling.Profiler(made.pairs) if asked.profile else None
    made_steps = reports.Made()
    try:
        with (
            render.training(plan.run.steps, str(job.output / "metrics.jsonl")) as show,
            profiling.traced(asked.trace, plan.run.steps) as traced,
        ):
            for report in trainer.train(made, stop, _end_at_once):
                made_steps.add(report)
                show(report)
                traced()
    except BaseException:
        _sum_up(made, started, made_steps, asked, stopped=True)
        raise
    _sum_up(made, started, made_steps, asked, stopped=False)
    if made.validation is not None:
        terminal.note(made.validation.line())
    if asked.ranks.leads:
        terminal.line(str(job.output / folder.DRAFTER))


def _end_at_once(error: KernelbakeError) -> None:
    """Ends a process whose main thread hangs, with the stacks of all threads."""
    terminal.error(error)
    terminal.stacks()
    os._exit(error.exit_code)


def _sum_up(made: Trainer, started: Started, made_steps: Made, asked: _Asked, *, stopped: bool) -> None:
    """Writes the summary and the counts; what stopped the run is worth more than a summary that cannot be written.

    Raises:
        TrainingStoppedError: it cannot be written.
        UnplannedError: a run that was recorded has left its plan.
    """
    from dflash import launch

    peaks = made.peaks()
    for text in (*started.proof.lines(), *(peak.line() for peak in peaks if peak.measured_bytes is not None)):
        terminal.note(text)
    profile = (
        made.profiler.profile(made_steps.seconds)
        if made.profiler is not None and not stopped and asked.ranks.leads
        else None
    )
    if profile is not None:
        render.profile(profile)
    recorded = asked.recorded() if asked.recorded is not None else None
    if recorded is not None:
        terminal.note(recorded.line())
    more = {
        "profile": profile.to_json() if profile is not None else None,
        "recorded": dataclasses.asdict(recorded) if recorded is not None else None,
    }
    try:
        if asked.ranks.leads:
            launch.write_summary(made.job.output, started, made_steps.losses, peaks, **more)
        if recorded is not None and not stopped:
            recorded.check()
    except errors.TrainingStoppedError as error:
        if not stopped:
            raise
        terminal.note(str(error))


@cli.command()
@_run_options
def preflight(file: Path | None, settings: tuple[str, ...], **given: Any) -> None:
    """Ask whether a bundle covers a run, without loading a weight.

    Refuses whatever `train` refuses before it loads, except an output folder in which another run is at work.
    """
    from dflash import launch

    plan = launch.settle(_load(file, settings, given), output=True)
    _preflight(plan)


@cli.command("eval")
@click.argument("drafter", type=click.Path(path_type=Path))
@click.option("--target", metavar="MODEL", help="Hub id or folder of the target.  [default: the run's]")
@click.option("--data", metavar="SOURCE", help="Held-out samples.  [default: those that the run held out]")
@click.option("--prompts", type=click.IntRange(1), default=50, show_default=True, help="How many at most.")
@click.option("--longest-prompt", type=click.IntRange(1), default=4096, show_default=True, help="In tokens.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=512, show_default=True, help="Of a response.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of draws.")
@click.option("--devices", default="0", show_default=True, metavar="T[:D]", help="GPUs of target and drafter.")
@click.option("--cpu", is_flag=True, help="Use the CPU, and transformers' own arithmetic.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of weights.  [default: the run's]")
def evaluate(drafter: Path, devices: str, cpu: bool, **given: Any) -> None:
    """Measure a drafter by real speculative decoding.

    Held-out prompts are answered by the target alone, the drafter, an untrained one, and copying. DRAFTER is a run's
    output folder or an exported drafter. Triton is not frozen here: lengths of prompts are no cases of a bundle.
    """
    try:
        parsed = placement.Devices.parse(devices)
    except ValueError as error:
        raise InputError(f"--devices: found `{devices}`; wanted `T` or `T:D`, the numbers of two GPUs") from error
    from dflash import request

    asked = request.Request(drafter, devices=None if cpu else parsed, **given)
    settled = request.settle(asked)
    with render.doing("load target and drafter"):
        from dflash import evaluation

        opened = evaluation.open_(asked, settled)
    with render.evaluating() as show:
        report = evaluation.run(opened, show)
    for text in report.lines():
        terminal.note(text)
    terminal.data(report.to_json())


# ---------------------------------------------------------------------------------------------- the process


def check_not_foreign() -> None:
    """Refuses an environment in which z-lab's distribution ``dflash`` is installed over or beside ours.

    Raises:
        ForeignPackageError: it is.
    """
    try:
        other = importlib.metadata.distribution("dflash")
    except importlib.metadata.PackageNotFoundError:
        return
    try:
        version = other.version or "of unknown version"
    except (KeyError, OSError, ValueError):  # damaged metadata
        version = "of unknown version"
    raise errors.ForeignPackageError(
        f"environment: the distribution `dflash` {version} is installed, z-lab's package of the same import "
        "name; wanted an environment without it",
        hint="its files and ours overwrite each other: use an environment for each, or `pip uninstall dflash` "
        "and install kernelbake again",
    )


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    run(lambda: terminal.invoke(cli, "dflash", arguments))


def run(function: Callable[[], object]) -> NoReturn:
    """Calls a function and exits with the code of what it raised."""
    code = terminal.run(lambda: _interruptible(function), "dflash", refused=_refused)
    launch = sys.modules.get("dflash.launch")
    if launch is not None and launch.still_importing():
        os._exit(code)  # all is said and flushed; an interpreter that ends under an import of torch may crash
    sys.exit(code)


def _interruptible(function: Callable[[], object]) -> None:
    check_not_foreign()
    try:
        function()
    except Interrupted as signalled:
        raise signalled.error from None


def _refused(error: KernelbakeError) -> int:
    code = terminal.refuse(error)
    if isinstance(error, errors.HangError) or ranks.is_one_of_several():
        terminal.flush()
        os._exit(code)  # threads and devices that wait for others would keep this process from ending
    return code
