"""Where SGLang's tables say that the caches of requests lie, and copies of that for captured steps. Imports nothing of
SGLang.

SGLang writes its tables for the next step as soon as a captured one is launched, so that the graph reads copies. They
are made in as few operations as can be: with few requests SGLang's Python takes as long as the step.
"""

from __future__ import annotations

from typing import Any

import torch


class RequestTables:
    """Of requests, `[R]` rows of SGLang's tables.

    `kv_pool`: of entries of tokens. `request_pool`: of requests, with the entries and the state of each. `context`:
    most tokens of a request. `keeps_states`: whether requests have states.
    """

    def __init__(self, kv_pool: Any, request_pool: Any, context: int, *, keeps_states: bool) -> None:
        self._requests, self._keeps_states = request_pool, keeps_states
        self.page_size, self.context = kv_pool.page_size, context
        # What captured steps read, once `prepare_graphs` has made it.
        self._first_slots: torch.Tensor
        self._states: torch.Tensor

    def prepare_graphs(self, max_requests: int) -> None:
        """Before steps of up to `max_requests` are captured."""
        table = self._requests.req_to_token
        columns = -(-self.context // self.page_size)
        self._first_slots = torch.zeros(max_requests, columns, dtype=table.dtype, device=table.device)
        self._states = torch.zeros(max_requests, dtype=torch.int32, device=table.device)

    def copy(self, requests: torch.Tensor, longest: int) -> None:
        """Before a captured step of `requests`, padding included. `longest`: of their lengths."""
        table = self._slots(longest)
        torch.index_select(table, 0, requests, out=self._first_slots[: len(requests), : table.shape[1]])
        if self._keeps_states:
            self._states[: len(requests)] = self._requests.get_mamba_indices(requests)

    def pages(self, requests: torch.Tensor, longest: int, *, captured: bool) -> torch.Tensor:
        """[B, W] pages of at least the first `longest` tokens."""
        slots = self._first_slots[: len(requests)] if captured else self._slots(longest)[requests]
        return slots // self.page_size

    def states(self, requests: torch.Tensor, *, captured: bool) -> torch.Tensor:
        """[B] state of each."""
        found: torch.Tensor = self._states[: len(requests)] if captured else self._requests.get_mamba_indices(requests)
        return found

    def _slots(self, longest: int) -> torch.Tensor:
        """[R, W]: of every request, the first slot of each page of its first `longest` tokens."""
        found: torch.Tensor = self._requests.req_to_token[:, : longest : self.page_size]
        return found
