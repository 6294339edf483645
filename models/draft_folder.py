"""A draft model from a checkpoint: any that could be a target, with the target's own vocabulary.

Our own folders hold one more file, which names the tokens that are drafted. To every other reader
they are plain language models, whose further tokens mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, load_checkpoint
from forerun.models.config import TargetConfig
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.draft_model import DraftModel
from forerun.models.drafter_folder import (
    layer_facts,
    read_tensors,
    take_vocabulary,
    vocabulary_tensors,
    write_folder,
    write_tensors,
    write_text,
)

VOCABULARY = "draft_vocabulary.safetensors"


def load_draft_model(path: Path, target: Checkpoint, capacity: int) -> DraftModel:
    """The language model in the folder or .gguf file `path`, as a drafter for `target`.

    Raises ForerunError where it can't be read, or its vocabulary is not the target's.
    """
    draft = load_checkpoint(path)
    check_vocabulary(draft, target, path)
    ids = _draft_vocabulary(path / VOCABULARY, draft.config.vocab_size)
    return DraftModel(draft.config, draft.weights, capacity, ids=ids)


def save_draft_model(
    folder: Path,
    config: TargetConfig,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: Checkpoint,
    facts: Mapping[str, Any],
) -> None:
    """Writes a Llama of `config` with the tokenizer of `target` as a Hugging Face folder, and the
    tokens `ids` `[V']` that it is to draft, where those are not all.

    `tensors` by a checkpoint's names; `facts` joins the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", target.tokenizer.to_str())
    if len(ids) < config.vocab_size:
        write_tensors(folder / VOCABULARY, vocabulary_tensors(ids, config.vocab_size))
    else:
        (folder / VOCABULARY).unlink(missing_ok=True)
    values = {
        "kind": "draft",
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_facts(DraftLayerConfig.of(config)),
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(target.stop_ids),
    }
    write_folder(folder, "model.safetensors", values | dict(facts), tensors)


def check_vocabulary(draft: Checkpoint, target: Checkpoint, path: Path) -> None:
    """The same tokens under the same ids: anything else would draft other words than it reads."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    own, wanted = (
        {token: text for text, token in checkpoint.tokenizer.get_vocab().items()}
        for checkpoint in (draft, target)
    )
    for token in sorted(own.keys() | wanted.keys()):
        if own.get(token) != wanted.get(token):
            raise ForerunError(
                f"{path}: its vocabulary is not the target's: token {token} is "
                f"{own.get(token)!r}, the target's is {wanted.get(token)!r}: a draft model must "
                "share the target's tokenizer"
            )
    if sizes[0] != sizes[1]:
        raise ForerunError(
            f"{path}: it has logits for {sizes[0]} tokens, the target for {sizes[1]}, from id "
            f"{min(sizes)} on they differ: a draft model must share the target's vocabulary"
        )


def _draft_vocabulary(path: Path, vocabulary: int) -> Tensor | None:
    """The tokens that are drafted, in order of their ids; None: all.

    In that order sampled tokens lie where they lie for the target, so that drawn with the same
    uniform the two agree most often.
    """
    if not path.is_file():
        return None
    tensors = read_tensors(path)
    ids = take_vocabulary(tensors, vocabulary, path)
    if ids is None or tensors:
        raise ForerunError(f"{path}: expected the keys 'd2t' and 't2d', and no other: train again")
    return ids.sort().values
