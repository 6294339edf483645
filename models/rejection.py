"""Acceptance by p/q rejection: exact in distribution, and the highest acceptance that sampling has.

A drafted token x, drawn from q, is kept with probability min(1, p(x) / q(x)); otherwise another one
is drawn from norm(max(p - q, 0)) (Leviathan et al., arXiv:2211.17192, section 2.3, exact by
appendix A.1; Chen et al., arXiv:2302.01318, algorithm 2). p and q are what temperature, top-k and
top-p leave. At temperature 0 both are certain, and the rule is matching.

Every position has a uniform of its own for each purpose, so none decides two things. A position
that is drafted again, after a rejection in front of it, may use its uniforms again: what they gave
before did not touch a committed token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.branch import branch
from forerun.models.choose import Sampling, argmax, inverse_cdf, temper, warp

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Tables of uniforms. The target's own draws where nothing was drafted: plain decoding keeps the
tokens that its seed has with every other drafter."""
TABLES = 4


def draw(
    logits: Tensor, sampling: Sampling, uniform: Tensor, branching: bool = True
) -> tuple[Tensor, Tensor]:
    """Draft tokens `[B, R]` and the distribution q `[B, R, V]` float32 that they were drawn from.

    `logits` `[B, R, V]`, uniforms `[B, R]`; at temperature 0 the arg-max, q being of no use. An
    engine that can't branch gets a q without top-k and top-p: any q is exact, and the cuts would be
    unrolled once for every drafted token.
    """
    logits = logits.to(torch.float32)
    operands = (logits, sampling.temperature, sampling.top_k, sampling.top_p, uniform)
    if branching:
        tokens, q = branch(sampling.any(), _drawn, _greedy_draft, operands)
    else:
        q = temper(logits, sampling.temperature).softmax(-1)
        tokens = _tokens(logits, q, sampling.temperature, uniform)
    return tokens, q


def choose_rejecting(
    logits: Tensor,
    q: Tensor,
    sampling: Sampling,
    uniforms: Tensor,
    children: Tensor,
    branching: bool = True,
    columns: Tensor | None = None,
) -> Tensor:
    """The token after each node of a chain `[B, R]`: its child's where that one is accepted.

    `logits` `[B, R, V]`; `q` `[B, gamma, V']` as `draw` gave it; `uniforms` `[B, TABLES, R]`;
    `children` `[B, R]` (-1: none). `columns` `[V]` are the tokens' places among those that q is
    over, V' where it has none; None: q is over all.
    """
    logits = logits.to(torch.float32)
    parameters = (sampling.temperature, sampling.top_k, sampling.top_p)
    reduced = () if columns is None else (columns,)
    operands = (logits, q, *parameters, uniforms, children, *reduced)
    if not branching:
        return _chosen(*operands)
    return branch(sampling.any(), _chosen, _greedy_choice, operands)


def reject(p: Tensor, q: Tensor, children: Tensor, uniforms: Tensor) -> Tensor:
    """The rule itself: distributions `[B, R, V]`, children `[B, R]`, uniforms `[B, TABLES, R]`.

    A rejected child is never drawn again, since p is no larger than q there. A residual of sum zero
    (p equals q up to rounding, so that next to nothing is rejected) gives way to p.
    """
    child = children.clamp(min=0)[..., None]
    kept = uniforms[:, ACCEPT] * q.gather(2, child)[..., 0] < p.gather(2, child)[..., 0]
    drafted = children >= 0
    residual = (p - q).clamp(min=0)
    use_residual = drafted[..., None] & (residual.sum(-1, keepdim=True) > 0)
    weights = torch.where(use_residual, residual, p)
    uniform = torch.where(drafted, uniforms[:, RESIDUAL], uniforms[:, TARGET])
    return torch.where(drafted & kept, children, inverse_cdf(weights, uniform))


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[B, R, V]`: probabilities after warping."""
    weights = warp(logits, sampling)
    return weights / weights.sum(-1, keepdim=True)


def _drawn(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, ...]:
    q = distribution(logits, Sampling(temperature, top_k, top_p))
    return _tokens(logits, q, temperature, uniform), q


def _tokens(logits: Tensor, q: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    return torch.where(temperature[:, None] > 0, inverse_cdf(q, uniform), argmax(logits))


def _greedy_draft(logits: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return argmax(logits), torch.zeros_like(logits)


def _chosen(
    logits: Tensor,
    q: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniforms: Tensor,
    children: Tensor,
    columns: Tensor | None = None,
) -> Tensor:
    p = distribution(logits, Sampling(temperature, top_k, top_p))
    rows = torch.arange(logits.shape[1], device=logits.device)
    q = q[:, rows.clamp(max=q.shape[1] - 1)]  # [B, R, V']; the last row may have no child
    if columns is not None:  # no other token can have been drawn
        q = torch.cat([q, torch.zeros_like(q[..., :1])], dim=-1).index_select(-1, columns)
    chosen = reject(p, q, children, uniforms)
    return torch.where(temperature[:, None] > 0, chosen, argmax(logits))


def _greedy_choice(logits: Tensor, *_: Tensor) -> Tensor:
    return argmax(logits)
