"""One sequence on its way through the engine: its tokens, and its pages and state slot in every cache group."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, field

from allotrope.cache.prefix import KeyChain, LostReason
from allotrope.engine.sampling_batch import RowSampling
from allotrope.request import Request, TokenLogprobs

PLACEHOLDER = -1


@dataclass(eq=False)
class Sequence:
    """Sequence `index` of a request.

    `sampling`: its parameters and output, as sampling sees them. `ids`: prompt and output so far. `computed`: tokens
    whose rows and state are stored. `pages`: per group, the page of each run of tokens, -1 once out of the window.
    `slots`: per group, the state slot (0: none). `num_cached_blocks`: per group, pages that the prefix cache has seen.
    `checkpoint_positions`: lengths at which a state checkpoint is to be kept. `decode_checkpoint`: key of the last one
    within its output. `parent`: the sequence with the same prompt that goes first. `max_output_len`: output tokens
    after which it ends. `drafts`: proposed tokens behind the last one, which the next step verifies. `draft_indices`:
    where a draft model's are among all that it drafted, for drafts that are placeholders. `replay`: accepted drafts
    that a recurrent state lacks until its next step, which has one token then.
    """

    request: Request
    index: int
    sampling: RowSampling
    chain: KeyChain
    max_output_len: int
    parent: Sequence | None = None
    ids: list[int] = field(init=False)
    computed: int = 0
    pages: list[array[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_cached_blocks: list[int] = field(default_factory=list)
    checkpoint_positions: list[int] = field(default_factory=list)
    decode_checkpoint: bytes | None = None
    cached_tokens: int = 0
    cache_lost: dict[LostReason, int] = field(default_factory=dict)
    started: bool = False
    queued_seconds: float = 0.0
    done: bool = False
    drafts: abc.Sequence[int] = ()
    draft_indices: abc.Sequence[int] = ()
    replay: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = [*self.request.prompt_ids]

    def append_placeholder(self) -> int:
        """Append a placeholder for a token that the host has not read yet. Returns its index in the output."""
        self.ids.append(PLACEHOLDER)
        self.sampling.output_ids.append(PLACEHOLDER)
        return self.output_len - 1

    def fill_placeholder(self, index: int, token: int) -> None:
        """Put `token` in the place of output token `index`."""
        self.ids[self.prompt_len + index] = token
        self.sampling.output_ids[index] = token

    def append_tokens(self, tokens: abc.Sequence[int]) -> None:
        """Append output tokens."""
        self.ids += tokens
        self.sampling.output_ids += tokens

    def truncate(self, length: int) -> None:
        """Drop output tokens beyond `length`, which were computed behind the last one."""
        del self.ids[self.prompt_len + length :]
        del self.sampling.output_ids[length:]

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.sampling.output_ids)

    @property
    def uncomputed(self) -> int:
        """Tokens that a step has yet to run; 1 while decoding, 0 once its last token is sampled."""
        return 0 if self.output_len >= self.max_output_len else len(self.ids) - self.computed

    @property
    def reads_output(self) -> bool:
        """Whether sampling its next token reads the tokens before it, rather than only their number."""
        params = self.request.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def unread(self) -> bool:
        """Whether the host has yet to read its last token."""
        return bool(self.sampling.output_ids) and self.sampling.output_ids[-1] == PLACEHOLDER

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position needs logits, which a cached prefix would leave out."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether all tokens of its next step need logits."""
        return self.wants_prompt_logprobs and self.output_len == 0

    @property
    def blocked(self) -> bool:
        """Whether it still waits for its parent to compute the prompt they share."""
        parent = self.parent
        return parent is not None and not parent.done and parent.computed < parent.prompt_len
