"""The certificate: files, numerics, and that speculation changes no token, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.bench import bundle_facts, machine, versions
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.engine import BUILT, GREEDY, Engine, load_engine
from forerun.runtime.model import Model
from forerun.runtime.numerics import Check, golden, margin, reference, row_independence, tolerances
from forerun.runtime.prompts import read_prompts
from forerun.runtime.sampling import SamplingParams

PROMPTS = "prompts.jsonl"
TEMPERATURE = 0.8
IN_DISTRIBUTION = (
    "not compared: drafts are accepted by p/q rejection, which samples the target's distribution "
    "but other tokens of it than plain decoding does"
)
EXAMPLES = 10
"""Differences that a certificate lists one by one."""


@dataclass(frozen=True)
class VerifyConfig:
    """How much is compared: prompts, and tokens of each."""

    limit: int = 40
    tokens: int = 128
    threads: int | None = None


@dataclass(frozen=True)
class Certificate:
    """All that was checked, and where."""

    bundle: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed; what could not be run did not fail."""
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """As `verify --json` writes it."""
        checks = {check.name: _without_name(check) for check in self.checks}
        return {**asdict(self), "passed": self.passed, "checks": checks}


def verify(
    path: str | Path,
    config: VerifyConfig | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Certificate:
    """Certifies the bundle in the folder `path`; `advance` is called after each answer.

    Raises ForerunError where the bundle can't be opened: a changed file is no bundle.
    """
    config = config or VerifyConfig()
    bundle = load_bundle(path)
    size = sum(file.bytes for file in bundle.manifest.files.values())
    count = len(bundle.manifest.files)
    facts = {"files": count, "bytes": size}
    checks = [Check("files", True, f"{count} files are as the manifest says", facts)]
    checks += _engine_checks(bundle, config, advance)
    return Certificate(bundle_facts(bundle), machine(), versions(), tuple(checks))


def _engine_checks(
    bundle: Bundle, config: VerifyConfig, advance: Callable[[], object]
) -> Iterator[Check]:
    kind = bundle.manifest.engine.kind
    try:
        engine = load_engine(bundle, config.threads)
    except ForerunError as error:
        yield Check("engine", None, f"engine not run: {error}", {"kind": kind, "run": False})
        yield from _onnx_checks(bundle, config)
        return
    yield Check("engine", True, f"{kind} runs here", {"kind": kind, "run": True})
    yield golden(bundle, engine)
    yield reference(bundle, engine)
    yield row_independence(bundle, engine)
    yield from losslessness(Model(bundle, engine), config, advance)


def _onnx_checks(bundle: Bundle, config: VerifyConfig) -> Iterator[Check]:
    """The numerics of the graph that the engine was built from, by ONNX Runtime."""
    built = bundle.manifest.engine
    if built.kind not in BUILT or built.graph not in bundle.manifest.files:
        yield Check("golden", None, "not run: the bundle holds no graph that runs elsewhere", {})
        return
    facts = replace(built, kind="ort", file=built.graph)
    portable = replace(bundle, manifest=replace(bundle.manifest, engine=facts))
    try:
        engine = load_engine(portable, config.threads)
        checks = [golden(portable, engine), reference(portable, engine)]
    except Exception as error:  # whatever ONNX Runtime raises for ops or types that it lacks
        reason = " ".join(str(error).split())[:200]
        checks = [Check("golden", None, f"not run: ONNX Runtime can't run the graph: {reason}", {})]
    for check in checks:
        yield replace(check, detail=f"{check.detail} (ONNX graph, by ONNX Runtime)")


def losslessness(
    model: Model, config: VerifyConfig, advance: Callable[[], object] = lambda: None
) -> Iterator[Check]:
    """Speculative tokens against plain ones, greedy and sampled, and a repeated answer."""
    manifest = model.bundle.manifest
    reason = _why_not(model.bundle)
    if reason is not None:
        yield Check("losslessness", None, f"not run: {reason}", {})
        return
    read = read_prompts(model.bundle.file(PROMPTS), config.limit)
    prompts = [encode_prompt(model.bundle, prompt.content) for prompt in read]
    nodes = int(manifest.default_tree)
    first: list[tuple[int, ...]] = []
    # Rejection is exact in distribution, not token for token: nothing that a certificate compares.
    in_distribution = manifest.drafter.options.get("acceptance") == "rejection"
    for name in ("greedy", "sampled"):
        same, differences = 0, []
        comparable = name == "greedy" or not in_distribution
        for number, ids in enumerate(prompts if comparable else prompts[:1]):
            params = GREEDY if name == "greedy" else SamplingParams(TEMPERATURE, seed=number)
            plain, speculative = (
                model.stream_ids(ids, config.tokens, params, size).completion.token_ids
                for size in (1, nodes)
            )
            if not number:
                first += [plain, speculative]
            if plain == speculative:
                same += 1
            elif comparable:
                differences.append(_difference(model, number, ids, plain, speculative, params))
            advance()
        if comparable:
            yield _compared(name, len(prompts), same, differences, manifest.precision)
        else:
            yield Check(f"losslessness, {name}", None, IN_DISTRIBUTION, {"acceptance": "rejection"})
    again = [
        model.stream_ids(prompts[0], config.tokens, params, size).completion.token_ids
        for params in (GREEDY, SamplingParams(TEMPERATURE, seed=0))
        for size in (1, nodes)
    ]
    equal = sum(old == new for old, new in zip(first, again, strict=True))
    facts = {"runs": len(again), "equal": equal}
    detail = f"{equal} of {len(again)} answers are the same when asked for again"
    yield Check("repeated runs", equal == len(again), detail, facts)


def _why_not(bundle: Bundle) -> str | None:
    if bundle.manifest.default_tree == "1":
        return "this bundle only decodes plainly: there is nothing to compare"
    if PROMPTS not in bundle.manifest.files:
        return f"the bundle holds no {PROMPTS}: compile it again"
    return None


def _difference(
    model: Model,
    number: int,
    ids: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    params: SamplingParams,
) -> dict[str, Any]:
    """Where two answers part, and how close the plain run's choice was there."""
    pairs = zip(plain, speculative, strict=False)
    shortest = min(len(plain), len(speculative))
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), shortest)
    prefix = [*ids, *plain[:at]]
    closeness = margin(model.engine.score(prefix)[-1], params, len(prefix))
    return {"prompt": number, "position": at, "margin": closeness}


def _compared(
    name: str, prompts: int, same: int, differences: list[dict[str, Any]], precision: str
) -> Check:
    """Differences are allowed only where the choice was as close as the precision's noise."""
    bound = tolerances(precision).margin if name == "greedy" else tolerances(precision).edge
    close = sum(found["margin"] < bound for found in differences)
    detail = f"{same} of {prompts} prompts: speculative tokens equal plain ones"
    if differences:
        widest = max(found["margin"] for found in differences)
        detail += (
            f"; {len(differences)} differ, {close} of them where the choice is closer than "
            f"{bound:g} (widest {widest:.2g})"
        )
    facts = {
        "prompts": prompts,
        "identical": same,
        "different": len(differences),
        "different_within_bound": close,
        "bound": bound,
        "examples": differences[:EXAMPLES],
    }
    return Check(f"losslessness, {name}", close == len(differences), detail, facts)


def _without_name(check: Check) -> dict[str, Any]:
    return {"passed": check.passed, "detail": check.detail, **check.facts}


def table(certificate: Certificate) -> Any:
    """The certificate for people, as a rich table."""
    from rich.table import Table

    about = certificate.bundle
    title = f"{Path(about['path']).name}: {about['target']}, {about['drafter']}, "
    grid = Table("check", "", "", title=title + f"{about['engine']} {about['precision']}")
    for check in certificate.checks:
        grid.add_row(check.name, _MARKS[check.passed], check.detail)
    place = certificate.machine
    grid.caption = f"{place['cpu']}, {place['cores']} cores; recipe {about['hash'][:16]}"
    return grid


_MARKS = {True: "ok", False: "FAILED", None: "-"}

__all__ = ["Certificate", "Engine", "VerifyConfig", "losslessness", "table", "verify"]
