"""Target and drafter -> bundle: the compile command's stages, one after the other."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from forerun import __version__
from forerun.compiler.certificate import write_golden, write_reference
from forerun.compiler.check import check_onnx
from forerun.compiler.export import export_step
from forerun.compiler.functions import Recorder
from forerun.compiler.options import CompileOptions, recipe, setting, versions
from forerun.compiler.plugins import Limits, Plan, plans_for
from forerun.compiler.precision import PRECISIONS
from forerun.compiler.staging import check_destination, put_in_place, staging
from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, load_checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import DrafterSource, find_drafter, load_drafter
from forerun.models.form import form
from forerun.models.linear import transpose_linears
from forerun.models.signature import Signature
from forerun.models.step import Step, pending_rows
from forerun.models.torch_bundle import STEP_FILE, write_step
from forerun.runtime.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, load_bundle, write_manifest
from forerun.runtime.chat import encode_prompt
from forerun.runtime.manifest import (
    CONTRACT,
    DrafterFacts,
    EngineFacts,
    Manifest,
    StateFacts,
    TargetFacts,
)
from forerun.runtime.prompts import read_prompts
from forerun.runtime.tree import Tree

ONNX_FILE = "model.onnx"
ENGINE_FILE = "model.engine"
PROMPTS_FILE = "prompts.jsonl"
FORM_FILE = "drafter.json"
"""The drafter's form, which one that is put in its place must have."""
DEFAULT_NODES = 6
"""Tree size where none is asked for: the best of 4, 6 and 8 on two CPU cores (README)."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What `compile_bundle` did."""

    path: Path
    manifest: Manifest
    reused: bool


def compile_bundle(options: CompileOptions, say: Say = lambda line: None) -> Compiled:
    """Compile `options` into a bundle folder, or keep the one there if its recipe is the same.

    Everything is written beside `options.output` and renamed at the end: an interruption leaves
    the old bundle, or none. Raises ForerunError for bad input and failed checks.
    """
    check_destination(options.output)
    say(f"reading {options.target}")
    checkpoint = load_checkpoint(options.target)
    source = find_drafter(options.drafter)
    known = _up_to_date(options.output, recipe(setting(options, checkpoint, source.kind), source))
    if known is not None:
        return Compiled(options.output, known, reused=True)
    with staging(options.output) as folder:
        manifest = _build(options, checkpoint, source, folder, say)
        put_in_place(folder, options.output)
    return Compiled(options.output, manifest, reused=False)


def _build(
    options: CompileOptions,
    checkpoint: Checkpoint,
    source: DrafterSource,
    folder: Path,
    say: Say,
) -> Manifest:
    """All stages, into `folder`."""
    kind, precision = options.kind, options.real_precision
    drafter = load_drafter(source, checkpoint, options.capacity, options.acceptance)
    sizes = sorted({1, *(options.trees or (DEFAULT_NODES,))})
    drafter.trim(sizes)
    trees = draft_trees(sizes, drafter)
    manifest = _manifest(options, checkpoint, source, drafter, trees)
    bundle = Bundle(folder, manifest, checkpoint.tokenizer, checkpoint.chat_template)
    _write_texts(bundle)
    (folder / FORM_FILE).write_text(json.dumps(form(drafter), indent=1) + "\n", encoding="utf-8")
    prompts = read_prompts(folder / PROMPTS_FILE)
    ids = encode_prompt(bundle, prompts[0].content)
    say(f"building the {precision} step with drafter {source.name}")
    step = PRECISIONS[precision].step(
        checkpoint, drafter, options.capacity, options.attention, calibration_texts(bundle)
    )
    step.branching = kind.branches
    if kind.transposed:
        transpose_linears(step)
    facts, recorder = None, Recorder()
    if kind.exports:
        facts = _export(options, step, manifest, ids, folder, recorder, say)
    else:
        say("writing the weights")
        write_step(folder, checkpoint, source, precision, kind.attention, options.acceptance)
    write_golden(step, ids, folder)
    del step, drafter  # a build needs the memory, and has the files
    gc.collect()  # what was traced refers to itself
    if facts is not None and kind.static_slots:
        say(f"building the {options.engine} engine for {', '.join(options.devices) or 'this GPU'}")
        _build_tensorrt(options, facts, recorder, manifest, folder)
    written = write_manifest(folder, manifest)
    if precision == "int8":
        say("answering the verification prompts, and scoring the answers in float32")
        write_reference(checkpoint, load_bundle(folder), prompts[::2], folder)
        written = write_manifest(folder, manifest)
    return written


def _export(
    options: CompileOptions,
    step: Step,
    manifest: Manifest,
    prompt: Sequence[int],
    folder: Path,
    recorder: Recorder,
    say: Say,
) -> Signature:
    """The step as an ONNX file, checked."""
    kind, default = options.kind, int(manifest.default_tree)
    say("exporting to ONNX")
    fixed = {"slots": options.capacity} if kind.static_slots else None
    facts = export_step(step, folder / ONNX_FILE, fixed, kind.branches, recorder)
    say("checking the ONNX file against torch")
    worst = check_onnx(step, facts, folder / ONNX_FILE, prompt, default, manifest.precision)
    say(f"tokens equal; largest logit difference {worst:.2g}")
    return facts


def draft_trees(sizes: Sequence[int], drafter: Drafter) -> dict[str, Tree | None]:
    """The trees asked for, as the drafter likes them, and the plain one."""
    if drafter.candidates == 0:
        return {"1": Tree.chain(1)}
    trees: dict[str, Tree | None] = {str(nodes): drafter.tree(nodes) for nodes in sizes}
    for nodes, tree in trees.items():
        if tree is None and int(nodes) > drafter.candidates + 1:
            raise ForerunError(
                f"--tree {nodes}: the {drafter.kind} drafter proposes {drafter.candidates} nodes: "
                f"ask for at most {drafter.candidates + 1}"
            )
        if tree is not None and tree.depth > drafter.max_depth():
            raise ForerunError(
                f"--tree {nodes}: the {drafter.kind} drafter drafts {drafter.max_depth()} tokens "
                f"deep, this tree is {tree.depth} deep: ask for at most {drafter.max_depth() + 1}"
            )
    return trees


def _manifest(
    options: CompileOptions,
    checkpoint: Checkpoint,
    source: DrafterSource,
    drafter: Drafter,
    trees: dict[str, Tree | None],
) -> Manifest:
    config = checkpoint.config
    basis = setting(options, checkpoint, source.kind)
    last = str((options.trees or (DEFAULT_NODES,))[-1])
    return Manifest(
        contract=CONTRACT,
        forerun=__version__,
        target=TargetFacts(
            name=checkpoint.name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_positions=config.max_positions,
            stop_ids=checkpoint.stop_ids,
            bos_token=checkpoint.bos_token,
            eos_token=checkpoint.eos_token,
            add_bos=checkpoint.add_bos,
            digest=checkpoint.digest,
        ),
        drafter=drafter_facts(source, drafter),
        engine=EngineFacts(
            kind=options.engine,
            file=_engine_file(options),
            devices=options.devices,
            versions=versions(options),
            graph=ONNX_FILE if options.kind.exports else STEP_FILE,
            refit=options.builder.refit,
        ),
        precision=options.real_precision,
        capacity=options.capacity,
        pending=pending_rows(drafter),
        chunk=options.chunk,
        trees=trees,
        default_tree=last if last in trees else "1",
        setting=basis,
        recipe=recipe(basis, source),
    )


def _engine_file(options: CompileOptions) -> str:
    if not options.kind.exports:
        return STEP_FILE
    return ENGINE_FILE if options.kind.static_slots else ONNX_FILE


def drafter_facts(source: DrafterSource, drafter: Drafter) -> DrafterFacts:
    """What the manifest says of a drafter."""
    return DrafterFacts(
        source.kind,
        source.name,
        drafter.options(),
        tuple(StateFacts(state.name, state.cache) for state in drafter.states()),
        drafter.tables,
        source.digest,
        drafter.candidates,
        drafter.per_depth,
    )


def _write_texts(bundle: Bundle) -> None:
    """Tokenizer, chat template and the verification prompts that ship with forerun."""
    bundle.tokenizer.save(str(bundle.path / TOKENIZER))
    if bundle.chat_template is not None:
        (bundle.path / CHAT_TEMPLATE).write_text(bundle.chat_template, encoding="utf-8")
    prompts = resources.files("forerun.compiler").joinpath("verification_prompts.jsonl")
    (bundle.path / PROMPTS_FILE).write_bytes(prompts.read_bytes())


def calibration_texts(bundle: Bundle) -> list[list[int]]:
    """The calibration conversations that ship with forerun, as this target's tokens.

    A target without a chat template reads the turns as plain text.
    """
    conversations = resources.files("forerun.compiler").joinpath("calibration.jsonl")
    with resources.as_file(conversations) as path:
        prompts = read_prompts(path)
    if bundle.chat_template is None:
        turns = ("\n".join(turn["content"] for turn in prompt.messages or ()) for prompt in prompts)
        return [encode_prompt(bundle, text) for text in turns]
    return [encode_prompt(bundle, prompt.content) for prompt in prompts]


def _build_tensorrt(
    options: CompileOptions,
    facts: Signature,
    recorder: Recorder,
    manifest: Manifest,
    folder: Path,
) -> None:
    from forerun.compiler.engine_tensorrt import build_engine

    def sizes(nodes: int, verified: int, pending: int) -> dict[str, int]:
        return {
            "batch": 1,
            "nodes": nodes,
            "verified": verified,
            "next_nodes": verified,
            "pending_in": pending,
            "slots": options.capacity,
            "uniform_positions": options.capacity,
        }

    steps = [sizes(int(nodes), int(nodes), manifest.pending) for nodes in manifest.trees]
    prefill = sizes(options.chunk, 1, 0) | {"next_nodes": int(manifest.default_tree)}
    build_engine(
        folder / ONNX_FILE,
        folder / ENGINE_FILE,
        facts,
        [prefill, *steps],
        options.engine,
        options.builder,
        _plans(options, recorder, manifest),
    )


def _plans(options: CompileOptions, recorder: Recorder, manifest: Manifest) -> dict[str, Plan]:
    """Our own kernels, where the engine takes them."""
    if not options.builder.with_plugins(options.engine):
        return {}
    from forerun.compiler.plans import PLANS  # needs Triton

    limits = Limits(nodes=max(map(int, manifest.trees)), slots=options.capacity)
    return plans_for(recorder.uses, limits, PLANS)


def _up_to_date(output: Path, digest: str) -> Manifest | None:
    """The manifest of a whole bundle at `output` that has this recipe."""
    try:
        manifest = load_bundle(output).manifest
    except ForerunError:
        return None
    return manifest if manifest.recipe == digest else None
