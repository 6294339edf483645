"""`forerun compile` and `swap`."""

from __future__ import annotations

from pathlib import Path

import click

from forerun.errors import MissingDependencyError

ENGINES = ["ort", "tensorrt-rtx", "tensorrt", "torch"]
ACCEPTANCES = ["matching", "rejection"]
PRECISIONS = ["int8", "fp32", "fp16", "bf16", "int4", "fp8"]

PLUGINS = ["auto", "on", "off"]

PATH = click.Path(path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")


@click.command("compile")
@click.argument("target")
@click.option("--drafter", default="ngram", show_default=True, help="Name or folder; plain: none.")
@click.option("--engine", type=click.Choice(ENGINES), default="ort", show_default=True)
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="GPU that TensorRT-RTX builds for; may be repeated.  [default: sm_89]",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Default: int8 for ort, fp16 for TensorRT, fp32 for torch.",
)
@click.option("--capacity", type=click.IntRange(64), default=2048, show_default=True)
@click.option("--chunk", type=click.IntRange(8), default=256, show_default=True)
@click.option(
    "--tree", "trees", type=click.IntRange(1), multiple=True, help="Nodes; may be repeated."
)
@click.option(
    "--acceptance",
    type=click.Choice(ACCEPTANCES),
    default="matching",
    show_default=True,
    help="rejection: a draft model's sampled tokens, accepted more often, exact in distribution.",
)
@click.option(
    "--refit",
    is_flag=True,
    help="TensorRT: let `forerun swap` replace the drafter; may cost speed.",
)
@click.option("--workspace", type=int, help="TensorRT: MiB of scratch memory a layer may use.")
@click.option(
    "--hardware-compatible", is_flag=True, help="TensorRT: an engine that newer GPUs run as well."
)
@click.option(
    "--version-compatible", is_flag=True, help="TensorRT: an engine that later versions run."
)
@click.option(
    "--plugins",
    type=click.Choice(PLUGINS),
    default="auto",
    show_default=True,
    help="TensorRT: our own kernels in the engine; auto: where it takes them and Triton is there.",
)
@click.option("-o", "--output", type=PATH, required=True)
@AS_JSON
def compile_command(
    target: str,
    drafter: str,
    engine: str,
    devices: tuple[str, ...],
    precision: str | None,
    capacity: int,
    chunk: int,
    trees: tuple[int, ...],
    acceptance: str,
    refit: bool,
    workspace: int | None,
    hardware_compatible: bool,
    version_compatible: bool,
    plugins: str,
    output: Path,
    as_json: bool,
) -> None:
    """Compile TARGET (smollm2, a Hugging Face folder, a .gguf file) and a drafter into a bundle."""
    try:
        from forerun.compiler.builder import BuilderSettings
        from forerun.compiler.options import CompileOptions
        from forerun.compiler.pipeline import compile_bundle
    except ImportError as error:
        raise MissingDependencyError(error.name or "torch", "compile", "compiling") from error

    options = CompileOptions(
        target=target,
        output=output,
        drafter=drafter,
        engine=engine,
        precision=precision,
        capacity=capacity,
        chunk=chunk,
        trees=trees,
        acceptance=acceptance,
        builder=BuilderSettings(
            devices, workspace, hardware_compatible, version_compatible, refit, plugins
        ),
    )
    compiled = compile_bundle(options, _say)
    if as_json:
        click.echo(compiled.manifest.to_json(), nl=False)
    else:
        what = "is up to date" if compiled.reused else "written"
        size = sum(facts.bytes for facts in compiled.manifest.files.values()) / 1e6
        click.echo(f"{output} {what}: {size:.0f} MB")


@click.command("swap")
@click.argument("bundle", type=PATH)
@click.option("--drafter", required=True, help="Name or folder, of the compiled drafter's form.")
@click.option("--target", help="What the bundle was compiled from, if it isn't shipped by name.")
@click.option("-o", "--output", type=PATH, help="Write another bundle instead of changing this.")
@AS_JSON
def swap_command(
    bundle: Path, drafter: str, target: str | None, output: Path | None, as_json: bool
) -> None:
    """Replaces the drafter in BUNDLE by another of the same kind and shape, in seconds.

    Interrupted or refused, it leaves the bundle as it was.
    """
    try:
        from forerun.compiler.swap import SwapOptions, swap_drafter
    except ImportError as error:
        raise MissingDependencyError(error.name or "torch", "compile", "swapping") from error

    swapped = swap_drafter(SwapOptions(bundle, drafter, target, output), _say)
    if as_json:
        click.echo(swapped.manifest.to_json(), nl=False)
    else:
        what = "now drafts with" if swapped.changed else "drafts already with"
        click.echo(f"{swapped.path} {what} {swapped.manifest.drafter.name}")


def _say(line: str) -> None:
    click.echo(f"forerun: {line}", err=True)
