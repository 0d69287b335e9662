"""Norms, MLPs and experts. Parameters have the released names, but for experts, which are stacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Pass:
    """What one forward pass needs and leaves behind.

    `sparse`: whether indexers decide what is attended to. `losses`: auxiliary losses by name, summed over the layers.
    `rows`: query positions at which indexers learn.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    sparse: bool = True
    rows: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, loss: torch.Tensor) -> None:
        self.losses[name] = self.losses[name] + loss if name in self.losses else loss


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight), in fp32. `weighted=False`: without a weight."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0, weighted: bool = True) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset)) if weighted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.offset + self.weight
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)


def embed(embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    """[..., hidden] fp32 rows of `ids`, as a product with one-hot rows: its gradient is the same in every run."""
    one_hot = ids[..., None] == torch.arange(embedding.num_embeddings, device=ids.device)
    return (one_hot.to(embedding.weight.dtype) @ embedding.weight).float()


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def clamped_silu(limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda gate, up: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_swiglu(limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """gpt-oss's: clamp, sigmoid of 1.702 x, and 1 added to the up half."""

    def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)

    return activate


class Mlp(nn.Module):
    """down(act(gate(x), up(x))). `names`: of the three projections."""

    def __init__(
        self,
        hidden: int,
        width: int,
        activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.activate, self.names = activate, names
        for name in names[:2]:
            self.add_module(name, linear(hidden, width))
        self.add_module(names[2], linear(width, hidden))

    def forward(self, x: torch.Tensor, step: Pass | None = None) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.activate(gate(x), up(x)))


class Experts(nn.Module):
    """Routed experts, all computed for every token: two products, whatever the routing, and no wait for the device.

    `gate_up`: [E, 2, width, hidden]; `down`: [E, hidden, width]. `interleaved`: released as gpt-oss does, transposed
    and with gate and up in turn; else one tensor per expert and projection, of these `names`.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        width: int,
        activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.activate, self.names, self.interleaved = activate, names, interleaved
        self.gate_up = nn.Parameter(torch.randn(count, 2, width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * width**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(count, 2, width)) if interleaved else None
        self.down_bias = nn.Parameter(torch.zeros(count, hidden)) if interleaved else None

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x`: [..., hidden]. `weights`: [..., E], 0 for experts that are not chosen. Returns [..., hidden]."""
        count, _, width, hidden = self.gate_up.shape
        bias = None if self.gate_up_bias is None else self.gate_up_bias.flatten()
        gate_up = F.linear(x, self.gate_up.view(-1, hidden), bias).unflatten(-1, (count, 2, width))
        inner = self.activate(gate_up[..., 0, :], gate_up[..., 1, :]) * weights[..., None].to(gate_up.dtype)
        y = F.linear(inner.flatten(-2), self.down.transpose(0, 1).reshape(hidden, -1))
        return y if self.down_bias is None else y + (weights @ self.down_bias).to(y.dtype)

    def released(self) -> dict[str, torch.Tensor]:
        """Tensors by their released names, without the prefix."""
        if self.interleaved:
            assert self.gate_up_bias is not None and self.down_bias is not None
            return {
                "gate_up_proj": self.gate_up.permute(0, 3, 2, 1).flatten(2),
                "gate_up_proj_bias": self.gate_up_bias.transpose(1, 2).flatten(1),
                "down_proj": self.down.transpose(1, 2),
                "down_proj_bias": self.down_bias,
            }
        gate, up, down = self.names
        tensors = {}
        for e in range(len(self.down)):
            tensors[f"{e}.{gate}.weight"], tensors[f"{e}.{up}.weight"] = self.gate_up[e]
            tensors[f"{e}.{down}.weight"] = self.down[e]
        return tensors

    def load_released(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `released`."""
        gate, up, down = self.names
        if self.interleaved:
            assert self.gate_up_bias is not None and self.down_bias is not None
            width = self.gate_up.shape[2]
            self.gate_up.copy_(tensors["gate_up_proj"].unflatten(2, (width, 2)).permute(0, 3, 2, 1))
            self.gate_up_bias.copy_(tensors["gate_up_proj_bias"].unflatten(1, (width, 2)).transpose(1, 2))
            self.down.copy_(tensors["down_proj"].transpose(1, 2))
            self.down_bias.copy_(tensors["down_proj_bias"])
            return
        for e in range(len(self.down)):
            self.gate_up[e, 0] = tensors[f"{e}.{gate}.weight"]
            self.gate_up[e, 1] = tensors[f"{e}.{up}.weight"]
            self.down[e] = tensors[f"{e}.{down}.weight"]


@dataclass(frozen=True)
class Routing:
    """`score`: softmax, sigmoid or sqrtsoftplus. `groups`, `top_groups`: of experts; two experts' sum ranks a group.

    `corrected`: a bias per expert joins the scores for the choice, and balances the load while training; without it, a
    loss does. `normalize`: weights sum to 1, before `scale`.
    """

    experts: int
    topk: int
    score: str = "softmax"
    corrected: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.score == "softmax":
            return torch.softmax(logits, dim=-1)
        return torch.sigmoid(logits) if self.score == "sigmoid" else F.softplus(logits).sqrt()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., topk] experts."""
        if self.top_groups < self.groups:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.topk, dim=-1).indices

    def weights(self, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[..., E]: 0 but for the chosen experts."""
        chosen = scores.gather(-1, experts)
        if self.normalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, experts, chosen * self.scale)


# Step of the bias that balances the experts' load, per optimizer step (DeepSeek-V3, section 2.1.2).
BALANCE_STEP = 1e-3


class Router(nn.Module):
    """Weights of all experts for each token. `bias_name`: released name of the correction bias."""

    def __init__(self, routing: Routing, hidden: int, bias_name: str = "e_score_correction_bias") -> None:
        super().__init__()
        self.routing, self.bias_name = routing, bias_name
        self.weight = nn.Parameter(torch.randn(routing.experts, hidden) * hidden**-0.5)
        if routing.corrected:
            self.register_buffer(bias_name, torch.zeros(routing.experts))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x`: [B, T, hidden]. Returns [B, T, E] fp32."""
        routing = self.routing
        scores = routing.scores(self.logits(x))
        if not routing.corrected:
            experts = routing.choose(scores)
            self._balance(scores, experts, step)
            return routing.weights(scores, experts)
        bias = self.get_buffer(self.bias_name)
        experts = routing.choose(scores + bias)
        if self.training:
            load = self._load(experts)
            with torch.no_grad():
                bias += BALANCE_STEP * torch.sign(load.mean() - load)
        return routing.weights(scores, experts)

    def _load(self, experts: torch.Tensor) -> torch.Tensor:
        """[E] share of the choices that each expert has."""
        counts = torch.zeros(self.routing.experts, device=experts.device)
        chosen = experts.flatten()
        return counts.index_add(0, chosen, counts.new_ones(len(chosen))) / len(chosen)

    def _balance(self, scores: torch.Tensor, experts: torch.Tensor, step: Pass) -> None:
        if self.training:
            share = scores.flatten(0, -2).mean(0) / scores.sum(-1).mean()
            step.add("balance", self.routing.experts * (self._load(experts) * share).sum())


class BiasedRouter(Router):
    """gpt-oss's: logits have a bias."""

    def __init__(self, routing: Routing, hidden: int) -> None:
        super().__init__(routing, hidden)
        self.bias = nn.Parameter(torch.zeros(routing.experts))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x) + self.bias.float()


class HashRouter(Router):
    """DeepSeek V4's first layers: a table gives the experts of each token id; scores only weigh them."""

    def __init__(self, routing: Routing, hidden: int, vocab: int) -> None:
        super().__init__(routing, hidden)
        generator = torch.Generator().manual_seed(vocab)
        table = torch.stack([torch.randperm(routing.experts, generator=generator) for _ in range(vocab)])
        self.register_buffer("tid2eid", table[:, : routing.topk].contiguous())

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        scores = self.routing.scores(self.logits(x))
        return self.routing.weights(scores, self.get_buffer("tid2eid")[step.ids])


class Moe(nn.Module):
    """Routed experts, and a shared one. The names of router, experts and shared expert are those of most releases."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Mlp | None = None,
        shared_name: str = "shared_experts",
        router_name: str = "gate",
        gate_of_shared: int = 0,
    ) -> None:
        super().__init__()
        self.router_name, self.shared_name = router_name, shared_name
        self.add_module(router_name, router)
        self.experts = experts
        self.add_module(shared_name, shared)
        self.shared_expert_gate = linear(gate_of_shared, 1) if gate_of_shared else None

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        y = self.experts(x, getattr(self, self.router_name)(x, step))
        shared = getattr(self, self.shared_name)
        if shared is None:
            return y
        more = shared(x)
        if self.shared_expert_gate is not None:
            more = more * torch.sigmoid(self.shared_expert_gate(x))
        return y + more
