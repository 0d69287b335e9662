"""Token embedding and output head, sharded by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.weights import WeightMatmul, create_weights, mark_quantized_on_load, pop_weights, quantized
from allotrope.ops.matmul import MATMUL, MatmulSpec
from allotrope.ops.matmul.gguf import GgufBlocks
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight, Weight
from allotrope.ops.softcap import SOFTCAP, SoftcapSpec
from allotrope.ops.vocab_argmax import VOCAB_BEST, VOCAB_TOKEN, VocabArgmaxSpec


def _vocabulary(size: int, parallel: Parallel) -> Section:
    return Section("", size, 1) if size % parallel.size == 0 else Section("", size)


def _format(build: Build) -> Format:
    """Of a vocabulary: blocks alone stay quantized, whose rows can be read one by one."""
    format = build.format("weight", "")
    return format if isinstance(format, GgufBlocks) else PLAIN


class Embedding(nn.Module):
    """Row `id` of a [vocabulary, hidden] table, times `scale`; every rank holds a slice of the rows."""

    def __init__(self, vocab_size: int, hidden: int, build: Build, *, scale: float = 1.0) -> None:
        super().__init__()
        self.parallel = build.parallel
        # Rounded as the table is, and a number: a tensor would have to be sent to the device at each step.
        self.scale = float(torch.tensor(scale, dtype=build.dtype))
        section = _vocabulary(vocab_size, build.parallel)
        self.first, self.last = section.bounds(build.parallel)
        self.whole = self.last - self.first == vocab_size
        shape = (section.local(build.parallel), hidden)
        self.dtype, self.hidden = build.dtype, hidden
        self.format = _format(build)
        self.matmul: WeightMatmul | None = None
        if self.format is not PLAIN:
            self.matmul = WeightMatmul(MATMUL, MatmulSpec(self.format, build.dtype, *shape), build)
            create_weights(self, "weight", self.matmul, shape, Placement((section,)), build)
        else:
            self.weight: torch.Tensor | Weight = build.parameter(shape, Placement((section,)))

    def finish_loading(self) -> None:
        """Pack a quantized table as products want it: the head may share it, and rows are read out of that as well."""
        if self.matmul is not None:
            self.weight = self.matmul.pack(pop_weights(self, "weight", self.format))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids`: [T]. Returns [T, hidden]."""
        if self.whole:
            x = self._rows(ids)
        else:
            mine = (ids >= self.first) & (ids < self.last)
            x = self._rows(torch.where(mine, ids - self.first, 0)) * mine[:, None]
            x = self.parallel.all_reduce(x)
        return x if self.scale == 1.0 else x * self.scale

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Weight):
            return self.weight.rows(ids, self.dtype)
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """Scores of every token id. `tied`: the embedding whose table it shares, another head whose loaded weight it copies
    into its own `format`, or None for its own. `format`: that the weight is quantized to on load.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        build: Build,
        *,
        tied: Embedding | Head | None,
        softcap: float | None = None,
        format: Format = PLAIN,
    ) -> None:
        super().__init__()
        self.parallel, self.vocab_size, self.softcap = build.parallel, vocab_size, softcap
        self._softcap = None if softcap is None else build.chooser.choose(SOFTCAP, SoftcapSpec(softcap)).run
        section = _vocabulary(vocab_size, build.parallel)
        shape = (section.local(build.parallel), hidden)
        self.outputs = shape[0]
        self.whole = shape[0] == vocab_size
        self.columns_after = vocab_size - section.bounds(build.parallel)[1]
        self._best = build.chooser.choose(VOCAB_BEST, VocabArgmaxSpec(vocab_size)).run
        self._token = build.chooser.choose(VOCAB_TOKEN, VocabArgmaxSpec(vocab_size)).run
        stored: Format = PLAIN
        if isinstance(tied, Embedding):
            stored = tied.format
        elif tied is None and format is PLAIN:
            stored = _format(build)
        # Of the stored weight, where it stays as it is.
        self.format = stored
        self.matmul = WeightMatmul(
            MATMUL, MatmulSpec(format if stored is PLAIN else stored, build.dtype, *shape), build
        )
        # In a tuple: their weights are not those of this module.
        self._tied = (tied,) if isinstance(tied, Embedding) else ()
        self._copied = (tied,) if isinstance(tied, Head) else ()
        self.weight: torch.Tensor | Weight
        if isinstance(tied, Head):
            create_weights(self, "weight", self.matmul, shape, Placement((section,), derived=True), build)
        elif tied is not None:
            if stored is PLAIN:
                self.weight = tied.weight
        elif format is PLAIN:
            create_weights(self, "weight", self.matmul, shape, Placement((section,)), build)
        else:
            self.weight = build.parameter(shape, Placement((section,)))
            mark_quantized_on_load(self.weight, self.matmul)

    def copied_bytes(self) -> int:
        """Bytes that loading adds: on a CPU a plain table that an embedding shares is kept as it is, too."""
        if not self._tied or self.format is not PLAIN or not isinstance(self.weight, torch.Tensor):
            return 0
        return self.matmul.backend.copy_bytes(self.weight.shape, self.weight.dtype)

    def finish_loading(self) -> None:
        """Pack the weight for its backend. An embedding that shares a plain one keeps the original, and a quantized one
        is packed by it, before."""
        if self.format is not PLAIN:
            shared = [one.weight for one in self._tied]
            self.weight = shared[0] if shared else self.matmul.pack(pop_weights(self, "weight", self.format))
            return
        format = self.matmul.format
        # The parameters of a copy have stood for its memory until now.
        plain: torch.Tensor | Weight = pop_weights(self, "weight", format if self._copied else PLAIN)
        if self._copied:
            plain = self._copied[0].weight
        assert isinstance(plain, Weight)
        if format is not PLAIN:
            plain = quantized(plain, format)
        assert isinstance(plain, PlainWeight | QuantizedWeight)
        self.weight = self.matmul.pack(plain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [n, hidden]. Returns [n, vocabulary] fp32 logits, whole on the ranks that sample."""
        gather = (lambda logits: logits) if self.whole else self.parallel.gather_logits
        return self._scored(gather(self._product(x)))

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [n, hidden]. Returns [n] int64, the token of the largest logit on every rank, -1 where it is not finite:
        no rank needs the logits of the others."""
        best = self._best(self._scored(self._product(x))) + self.columns_after
        token_ids: torch.Tensor = self._token(
            best if self.whole else self.parallel.all_reduce_max(best), self.vocab_size
        )
        return token_ids

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Weight)
        if self._softcap is None:
            return self.matmul.in_fp32(x, self.weight)
        rounded: torch.Tensor = self.matmul.run(x, self.weight)
        return rounded

    def _scored(self, product: torch.Tensor) -> torch.Tensor:
        return product if self._softcap is None else self._softcap(product, self.softcap)
