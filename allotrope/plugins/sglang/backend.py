"""Our attention backends as SGLang sees them: they hand its pools to the model, which makes plans of each step itself.

A plan is made of the step's own tensors. In a captured step they are SGLang's static buffers and copies of its tables,
and the operations that make the plan are captured with it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from allotrope.errors import ConfigError


class HostedBackend(AttentionBackend):
    """Entries of tokens of any family."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.max_context_len = runner.model_config.context_len
        bind = getattr(runner.model, "bind", None)
        if bind is None:
            raise ConfigError("attention_backend=allotrope runs Allotrope's models alone; name another one.")
        if getattr(self.token_to_kv_pool, "post_capture_active", False):
            # A part of each pool is there at the end, but planes of caches lie one behind the other in it.
            raise ConfigError(
                "Allotrope's models take cache memory once, before graphs are captured."
                " Leave SGLANG_ENABLE_POST_CAPTURE_KV_SIZING out."
            )
        bind(self.token_to_kv_pool, self.req_to_token_pool, self.max_context_len)
        self._model = runner.model

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step that is not captured; the model plans it as a whole."""
        self._model.captures = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a captured step. SGLang writes its tables for the next one as soon as this is over, so that the graph
        reads copies. `in_capture`: it is captured next, after steps that warm kernels up: they have to choose the
        kernels that the captured one chooses."""
        self._model.captures = in_capture
        self._model.copy_tables(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A padding request of ours sees nothing and stores nothing."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Raises ConfigError where the model makes a plan on the host."""
        self._model.prepare_graphs(max_bs)


class StateBackend(AttentionBackend):
    """States of any family, which the model finds by itself."""

    # Lengths are read by the other backend of the same model.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """As the other backend of the same model."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The step's tensors are SGLang's."""

    def supports_prefill_graph_extend(self) -> bool:
        """Steps with prompts are not captured."""
        return False
