"""The limits of a step where the options give none: the sequences and tokens that memory serves.

Owns the defaults of `--max-num-seqs` and `--max-num-batched-tokens`. Must not ask a device
anything: callers give the free bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import SHORT_CONTEXT, Demand, plan_memory
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError

CPU_SEQUENCES = 64
CPU_TOKENS = 2048
GPU_TOKENS = 8192
"""So many tokens fill a GPU's matrix products; more of them make running requests wait longer."""

MIN_TOKENS = 1024
"""So many tokens a step has on a GPU, however little memory there is."""

# What is tried on a GPU, largest first.
_SEQUENCES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
# A step's activations may take an eighth of what weights leave, sampling a sixteenth.
_STEP_SHARE, _SAMPLING_SHARE = 8, 16
# Activations that live at once, as hidden vectors of a token (read off measured steps, experts being the largest);
# and bytes of a logit while a whole vocabulary is sorted.
_HIDDEN_VECTORS, _SORTED_LOGIT = 32, 24


@dataclass(frozen=True)
class StepLimits:
    """`max_num_seqs`: most sequences of a step. `step_tokens`: most tokens. `chosen`: options that were left open."""

    max_num_seqs: int
    step_tokens: int
    chosen: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"at most {self.max_num_seqs} sequences and {self.step_tokens} tokens a step"
        return f"{text} ({' and '.join(self.chosen)} chosen by memory)" if self.chosen else text


@dataclass(frozen=True, kw_only=True)
class StepRoom:
    """The memory of a GPU for steps and caches. `bytes`: free beside the weights. `hidden`: bytes of a hidden vector,
    for each data-parallel rank whose rows it has.

    `vocabulary`: logits of a token, of one from each data-parallel rank. `context`: longest sequence.
    """

    bytes: int
    hidden: int
    vocabulary: int
    context: int
    groups: Sequence[CacheGroup]

    def workspace(self, sequences: int, tokens: int) -> int:
        """Bytes that a step and its sampling are expected to take. The engine measures them before it plans caches."""
        return tokens * self.token_bytes + sequences * self.logits_bytes

    @property
    def token_bytes(self) -> int:
        return _HIDDEN_VECTORS * self.hidden

    @property
    def logits_bytes(self) -> int:
        return _SORTED_LOGIT * self.vocabulary


def cpu_limits(config: EngineConfig) -> StepLimits:
    """On a CPU the cores bound a step, not its memory."""
    tokens = config.max_num_batched_tokens
    sequences = config.max_num_seqs or min(CPU_SEQUENCES, tokens or CPU_SEQUENCES)
    return StepLimits(sequences, tokens or max(sequences, CPU_TOKENS))


def gpu_limits(config: EngineConfig, room: StepRoom, preferred_tokens: int = GPU_TOKENS) -> StepLimits:
    """Most tokens first, up to `preferred_tokens`; then most sequences that caches and sampling have room for.

    An option that is set stays as it is. Where not even one sequence fits the limits are the smallest: the memory
    plan says then what is missing.
    """
    chosen = []
    tokens = config.max_num_batched_tokens
    if tokens is None:
        chosen.append("tokens")
        tokens = _tokens(room, preferred_tokens)
    sequences = config.max_num_seqs
    if sequences is None:
        chosen.insert(0, "sequences")
        limit = config.max_num_batched_tokens
        allowed = [count for count in _SEQUENCES if limit is None or count <= limit]
        sequences = next((count for count in allowed if _serves(config, room, count, tokens)), 1)
    return StepLimits(sequences, max(tokens, sequences), tuple(chosen))


def _tokens(room: StepRoom, preferred: int) -> int:
    tokens = preferred
    while tokens > MIN_TOKENS and tokens * room.token_bytes > room.bytes // _STEP_SHARE:
        tokens //= 2
    return tokens


def _serves(config: EngineConfig, room: StepRoom, sequences: int, tokens: int) -> bool:
    """Whether caches hold a full batch of some context, beside the windows and states of all, and it can be sampled.

    Each sequence has `SHORT_CONTEXT` tokens, or the model's longest.
    """
    if sequences * room.logits_bytes > room.bytes // _SAMPLING_SHARE:
        return False
    budget = config.kv_cache_memory_bytes or room.bytes - room.workspace(sequences, tokens)
    demand = Demand(context=room.context, sequences=sequences, step_tokens=tokens, reuse=config.enable_prefix_caching)
    try:
        plan = plan_memory(room.groups, demand, budget)
    except ConfigError:
        return False
    return plan.sequences >= sequences and plan.tokens >= sequences * min(room.context, SHORT_CONTEXT)
