"""One sequence on its way through the engine: its tokens, and what it holds in every cache group."""

from __future__ import annotations

from dataclasses import dataclass, field

from allotrope.cache.prefix import KeyChain, LostReason
from allotrope.engine.sampling_batch import RowSampling
from allotrope.request import Request, TokenLogprobs


@dataclass(eq=False)
class Sequence:
    """Sequence `index` of a request.

    `sampling`: its parameters and output, as sampling sees them. `ids`: prompt and output so far. `computed`: tokens
    whose rows and state are stored. `pages`: per group, the page of each run of tokens, -1 once it is given up.
    `slots`: per group, the state slot (0: none). `published`: per group, pages that were offered for reuse. `cuts`:
    lengths at which a state checkpoint is to be kept. `parent`: the sequence with the same prompt that goes first, so
    that this one finds the prompt's pages ready.
    """

    request: Request
    index: int
    sampling: RowSampling
    chain: KeyChain
    parent: Sequence | None = None
    ids: list[int] = field(init=False)
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    cache_lost: dict[LostReason, int] = field(default_factory=dict)
    started: bool = False
    queued_seconds: float = 0.0
    done: bool = False
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = [*self.request.prompt_ids]

    def append(self, token: int) -> None:
        """Add a chosen token."""
        self.ids.append(token)
        self.sampling.output_ids.append(token)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.sampling.output_ids)

    @property
    def uncomputed(self) -> int:
        """Tokens that a step has yet to run; 1 while decoding."""
        return len(self.ids) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position must be scored, which a cached prefix would leave out."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def blocked(self) -> bool:
        """Whether it still waits for its parent to compute the prompt they share."""
        parent = self.parent
        return parent is not None and not parent.done and parent.computed < parent.prompt_len
