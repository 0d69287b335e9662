"""What our attention backends say of themselves to vLLM."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("in_vllm")


@pytest.mark.parametrize("name", ["RowsBackend", "LongPagesBackend", "StateBackend"])
def test_no_backend_claims_context_parallelism(name: str) -> None:
    """vLLM asks the class that a backend names as its implementation, also of layers that never make one."""
    from vllm.v1.attention.backend import AttentionImplBase

    from allotrope.plugins.vllm import cache

    backend = getattr(cache, name)
    named = backend.get_impl_cls()
    assert issubclass(named, AttentionImplBase)
    claims = {claim: getattr(named, claim) for claim in ("supports_dcp", "supports_pcp", "is_sparse")}
    assert not any(claims.values()), claims
    assert backend.is_ssm() == (name == "StateBackend")
