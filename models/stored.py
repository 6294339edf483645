"""A checkpoint's weights, read one by one when asked for: a large model's may not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredWeights(Mapping[str, Tensor]):
    """Each time a name is looked up its tensor is read anew: nothing is kept here.

    Where the file has the very `dtype`, a tensor may be the mapped file itself: don't write to it.
    """

    readers: Mapping[str, Callable[[], Tensor]]
    dtype: torch.dtype = torch.float32

    def __getitem__(self, name: str) -> Tensor:
        return self.readers[name]().to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> StoredWeights:
    """`weights` in another `dtype`, each cast when it is asked for."""
    if isinstance(weights, StoredWeights):
        return StoredWeights(weights.readers, dtype)
    # The name is bound at once: a loop's variable would be its last value.
    return StoredWeights({name: lambda name=name: weights[name] for name in weights}, dtype)  # type: ignore[misc]
