"""The platform's allocator of pages for SGLang 0.5.16, whose own has Triton's kernels alone."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive


class PagedAllocator(PagedTokenToKVPoolAllocator):
    """In plain PyTorch."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots of new tokens of prompts; None where there are too few pages."""
        pages = self._pages(seq_lens_cpu) - self._pages(prefix_lens_cpu)
        count = int(pages.sum())
        if count > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
        self.free_pages = self.free_pages[count:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """A slot for each request; None where there are too few pages."""
        opens = self._pages(seq_lens) > self._pages(seq_lens - 1)
        count = int(opens.sum())
        if count > len(self.free_pages):
            return None
        slots = last_loc.long() + 1
        slots[opens] = self.free_pages[:count] * self.page_size
        self.free_pages = self.free_pages[count:]
        return slots

    def _pages(self, lengths: torch.Tensor) -> torch.Tensor:
        return (lengths + self.page_size - 1) // self.page_size
