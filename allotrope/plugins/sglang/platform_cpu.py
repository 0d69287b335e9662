"""The platform's class, which SGLang imports when it has chosen the platform."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without kernels of SGLang: operators in plain PyTorch, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int | None = None) -> Any:
        """Where SGLang gives no number it asks for the default of its option, which is a name."""
        return self.device_type if device_id is None else super().get_device(device_id)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """SGLang's own choice for a CPU needs its kernels."""
        if server_args.attention_backend is None:
            server_args.attention_backend = self.get_default_attention_backend()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own. 0.5.16 has every platform name it, later releases take it without."""
        # It imports the platform.
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """SGLang's own, whose kernels 0.5.16 runs by Triton: on a CPU, with TRITON_INTERPRET=1."""
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
