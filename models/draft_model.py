"""A small language model as the drafter: it reads what was committed, then writes on by itself.

(Leviathan et al., arXiv:2211.17192, section 2; Chen et al., arXiv:2302.01318, section 3.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.choose import Sampling, choose
from forerun.models.config import TargetConfig
from forerun.models.draft_layer import (
    Beside,
    DecoderLayer,
    DraftLayerConfig,
    Rotary,
    Seen,
    cache_states,
    linear,
    under,
)
from forerun.models.drafter import Committed, Drafter, StateSpec, Vocabulary
from forerun.models.linear import Linear
from forerun.models.rejection import DRAFT, TABLES, TARGET, choose_rejecting, draw
from forerun.models.target import TiedHead, rms_norm

ACCEPTANCES = ("matching", "rejection")
GAMMA = 7
MAX_GAMMA = 16
"""Each drafted token is another copy of the small model in the graph."""


class DraftModel(Drafter):
    """Gamma tokens, one after the other, from a model that shares the target's vocabulary.

    Its caches are its own. A step first reads the committed path with the root behind it, so that
    what was drafted in vain never stays in them; the keys of what is drafted lie beside them.
    """

    kind: ClassVar[str] = "draft"
    ids: Tensor | None
    columns: Tensor | None

    def __init__(
        self,
        config: TargetConfig,
        weights: Mapping[str, Tensor],
        capacity: int,
        gamma: int = GAMMA,
        acceptance: str = "matching",
        ids: Tensor | None = None,
    ) -> None:
        """`weights` are a checkpoint's, by its names (`Checkpoint.weights`). It drafts none but the
        tokens `ids` `[V']`, where they are given: of its vocabulary layer no more is kept."""
        super().__init__()
        if any(config.sliding_layers) and config.window is not None and config.window < capacity:
            raise ForerunError(
                f"the draft model has sliding windows of {config.window} tokens, which this "
                "version does not draft with: use a draft model without, or a --capacity of at "
                f"most {config.window}"
            )
        self.sizes = DraftLayerConfig.of(config)
        self.config, self.gamma, self.candidates = config, gamma, gamma
        self.accept_by(acceptance)
        self.rotary = Rotary(self.sizes, capacity)
        self.embed: nn.Module = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            weights["model.embed_tokens.weight"]
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                self.sizes,
                under(weights, f"model.layers.{layer}."),
                self.rotary,
                config.rotates(layer),
            )
            for layer in range(config.num_layers)
        )
        self.norm = rms_norm(weights["model.norm.weight"], config.rms_norm_eps)
        self.head: nn.Module
        if ids is not None:
            matrix = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
            self.head = Linear(matrix[ids].T)
        elif "lm_head.weight" in weights:
            self.head = linear(weights, "lm_head")
        else:
            self.head = TiedHead(self.embed)
        self.register_buffer("ids", ids)
        self.register_buffer("columns", None if ids is None else _columns(ids, config.vocab_size))

    def accept_by(self, acceptance: str) -> None:
        if acceptance not in ACCEPTANCES:
            raise ForerunError(f"acceptance {acceptance!r}: choose {' or '.join(ACCEPTANCES)}")
        self.acceptance = acceptance
        self.tables = TABLES if acceptance == "rejection" else 1

    def trim(self, sizes: Collection[int]) -> None:
        """Draft as many tokens as the largest tree takes, for each costs a forward."""
        self.gamma = self.candidates = min(max(*sizes, 2) - 1, MAX_GAMMA)

    def states(self) -> list[StateSpec]:
        config, real = self.config, self.rotary.cos.dtype
        caches = cache_states(self.sizes, config.num_layers, real, extra_rows=1)
        hidden = StateSpec("draft_hidden", ("batch", config.hidden_size), real)
        if self.acceptance == "matching":
            return [*caches, hidden]
        choices = config.vocab_size if self.ids is None else len(self.ids)
        q = ("batch", self.gamma, choices)
        return [*caches, hidden, StateSpec("draft_q", q, torch.float32, drafted=True)]

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        """The context rows' keys and values and the root's, and the root's hidden state."""
        tokens, start = committed.tokens, committed.start[:, None]  # [B, C + 1], [B, 1]
        place = torch.arange(tokens.shape[1], device=start.device)
        causal = (place[:, None] >= place)[None].expand(tokens.shape[0], -1, -1)
        hidden, rows = self.read(tokens, start + place, states, start, None, causal)
        root = committed.count[:, None, None].expand(-1, 1, hidden.shape[2])
        last = self.norm(hidden.gather(1, root)[:, 0])
        return [*(tensor for layer in rows for tensor in layer), last]

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        return self._write(committed, states)[0]

    def draft_and_keep(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> tuple[Tensor, ...]:
        tokens, q = self._write(committed, states)
        return (tokens, q) if self.acceptance == "rejection" else (tokens,)

    def choose(
        self,
        logits: Tensor,
        sampling: Sampling,
        uniforms: Tensor,
        children: Tensor,
        states: list[Tensor],
        branching: bool,
    ) -> Tensor:
        if self.acceptance == "matching":
            return super().choose(logits, sampling, uniforms, children, states, branching)
        return choose_rejecting(
            logits, states[-1], sampling, uniforms, children, branching, self.columns
        )

    def max_depth(self) -> int:
        return self.gamma

    def options(self) -> dict[str, int | float | str]:
        return {
            "gamma": self.gamma,
            "acceptance": self.acceptance,
            "layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
            "vocabulary": "whole" if self.ids is None else len(self.ids),
        }

    def _write(self, committed: Committed, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Gamma tokens after the root `[B, gamma]`, and their distributions `[B, gamma, V']`."""
        root = (committed.start + committed.count)[:, None]  # [B, 1]
        logits = self.head(states[2 * len(self.layers)])[:, None]  # [B, 1, V']
        tokens: list[Tensor] = []
        kept: list[Tensor] = []
        rows: list[Beside] | None = None
        for depth in range(1, self.gamma + 1):
            token, q = self._draw(logits, committed, root + depth)  # [B, 1], [B, 1, V']
            tokens.append(token)
            kept.append(q)
            if depth < self.gamma:
                sees = torch.ones_like(token, dtype=torch.bool)[..., None].expand(-1, 1, depth)
                hidden, rows = self.read(token, root + depth, states, root + 1, rows, sees)
                logits = self.head(self.norm(hidden))
        return torch.cat(tokens, dim=1), torch.cat(kept, dim=1)

    def _draw(
        self, logits: Tensor, committed: Committed, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The token for `position` `[B, 1]`.

        Under matching it is drawn with the target's own uniform of that position: two models then
        agree often, and always where their distributions are the same.
        """
        table = TARGET if self.acceptance == "matching" else DRAFT
        uniforms = committed.uniforms[:, table]  # [B, U]
        uniform = uniforms.gather(1, position.clamp(max=uniforms.shape[1] - 1))
        sampling = Sampling(
            committed.temperature, committed.top_k, committed.top_p, committed.sampling
        )
        if self.acceptance == "matching" and committed.branching:
            token, q = choose(logits, sampling, uniform), logits
        else:
            token, q = draw(logits, sampling, uniform, committed.branching)
        return token if self.ids is None else self.ids[token], q

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        states: list[Tensor],
        cached: Tensor,
        beside: Sequence[Beside] | None,
        mask: Tensor,
    ) -> tuple[Tensor, list[Beside]]:
        """Tokens `[B, n]` through all layers -> hidden `[B, n, H]` before the final norm, and what
        lies beside the caches after them. Of the caches the slots below `cached` `[B, 1]` count."""
        x = self.embed(tokens.clamp(min=0))
        slot = torch.arange(states[0].shape[2], device=tokens.device)
        before = (slot < cached)[:, None].expand(-1, tokens.shape[1], -1)  # [B, n, S]
        rows: list[Beside] = []
        for place, layer in enumerate(self.layers):
            cache = Seen(states[2 * place], states[2 * place + 1], before)
            old = None if beside is None else beside[place]
            x, new = layer(x, positions, cache, old, mask)
            rows.append(new)
        return x, rows


def _columns(ids: Tensor, vocabulary: int) -> Tensor:
    """Each token's place among `ids` `[V']`, and V' where it has none."""
    columns = torch.full((vocabulary,), len(ids))
    columns[ids] = torch.arange(len(ids))
    return columns
