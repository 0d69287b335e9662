"""One sequence on its way through the engine: its tokens, and its pages and state slot in every cache group."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, field

from allotrope.cache.prefix import KeyChain, LostReason
from allotrope.engine.sampling_batch import RowSampling, has_penalty
from allotrope.request import Request, TokenLogprobs

PLACEHOLDER = -1


@dataclass(frozen=True)
class TentativeCheckpoint:
    """Copies of a sequence's states. Replaying `replay` drafts on them gives the state at length `position`.

    `copies`: for each cache group with states, its index and the slot of the copy.
    """

    position: int
    replay: int
    copies: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Sequence:
    """Sequence `index` of a request, on data-parallel rank `dp_rank`.

    Tokens: `ids`: prompt and output so far, placeholders among them. `prompt_len`: tokens of the prompt.
    `max_output_len`: output tokens after which it ends. `computed`: tokens whose cache entries and states are stored.
    `parent`: the sequence of the same request that computes their prompt first.

    Sampling: `sampling`: its parameters and output, as the sampler sees them. `reads_output`: whether sampling its next
    token reads the values of the tokens before it. `wants_prompt_logprobs`: whether every prompt position needs logits;
    such a prompt takes nothing from the prefix cache.

    Caches, where each list has an item for each cache group: `pages`: its page table, -1 for out-of-window pages.
    `slots`: its state slot, 0 for none. `num_cached_blocks`: leading pages that were offered to the prefix cache.
    `reserved`: tokens that have pages. `due`: the length from which `KVCacheManager.commit` has something to cache, to
    keep or to free. `checkpoint_positions`: prompt lengths at which a state checkpoint will be kept.
    `decode_checkpoint`: key of the last state checkpoint within the output. `cached_tokens`, `cache_lost`: prompt
    tokens that the prefix cache had, and those that it could not give, by the reason.

    Drafts: `drafts`: proposed tokens behind the last one, which the next step verifies. `draft_indices`: for drafts
    that are placeholders, their indices in `DraftedTokens.next_tokens`. `unread_drafts`: drafts that an in-flight step
    verifies; the device may already have accepted as many tokens. `replay`: accepted drafts that a recurrent state
    lacks, which its next step replays. `tentative`: a state checkpoint that is kept if enough drafts are accepted.
    """

    request: Request
    index: int
    sampling: RowSampling
    chain: KeyChain
    max_output_len: int
    parent: Sequence | None = None
    dp_rank: int = 0
    ids: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)
    reads_output: bool = field(init=False)
    computed: int = 0
    reserved: int = 0
    due: int = 0
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
    unread_drafts: int = 0
    tentative: TentativeCheckpoint | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        params = self.request.params
        self.ids, self.prompt_len = [*self.request.prompt_ids], len(self.request.prompt_ids)
        self.wants_prompt_logprobs = self.index == 0 and params.prompt_logprobs is not None
        self.reads_output = has_penalty(params)

    def append_placeholder(self) -> None:
        """Append a placeholder for a token that the host has not read yet."""
        self.ids.append(PLACEHOLDER)
        self.sampling.output_ids.append(PLACEHOLDER)

    def fill_placeholder(self, tokens: abc.Sequence[int]) -> int:
        """Replace the first placeholder by `tokens`; without any it stays. Returns its index in the output."""
        output_ids = self.sampling.output_ids
        # At most two steps are in flight.
        index = output_ids.index(PLACEHOLDER, max(0, len(output_ids) - 2))
        if tokens:
            self.ids[self.prompt_len + index : self.prompt_len + index + 1] = tokens
            output_ids[index : index + 1] = tokens
        return index

    def truncate(self, length: int) -> None:
        """Drop output tokens beyond `length`: those of a step that was launched before the last token was known."""
        del self.ids[self.prompt_len + length :]
        del self.sampling.output_ids[length:]

    @property
    def output_len(self) -> int:
        return len(self.sampling.output_ids)

    @property
    def uncomputed(self) -> int:
        """Tokens that a step has yet to run; 1 while decoding, 0 once its last token is sampled, or may be."""
        length = len(self.ids)
        ends = length - self.prompt_len + self.unread_drafts >= self.max_output_len
        return 0 if ends else length - self.computed

    @property
    def reads_output_len(self) -> bool:
        """Whether sampling its next token depends on the number of tokens before it, other than by random numbers."""
        return self.sampling.constraint is not None or self.output_len < self.request.params.min_tokens

    @property
    def unread(self) -> bool:
        """Whether the host has yet to read its last token."""
        return bool(self.sampling.output_ids) and self.sampling.output_ids[-1] == PLACEHOLDER

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether all tokens of its next step need logits."""
        return self.wants_prompt_logprobs and self.output_len == 0

    @property
    def blocked(self) -> bool:
        """Whether it still waits for its parent to compute the prompt they share."""
        parent = self.parent
        return parent is not None and not parent.done and parent.computed < parent.prompt_len
