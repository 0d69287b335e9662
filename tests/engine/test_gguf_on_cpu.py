"""A GGUF model whose blocks stay as they are stored, against the same model with plain weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.watching import Watch, assert_same, assert_same_logits, engine, request, run
from tiny_checkpoints import prompts

from allotrope.config import EngineConfig
from allotrope.engine.load import load_model
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.kernels.chip import CHIPS, chip_of
from allotrope.layers.linear import Linear
from allotrope.loading.decoder import load_decoder
from allotrope.ops.matmul import MatmulSpec, cpu_blocks
from allotrope.ops.matmul.cpu_blocks import BlockWeight
from allotrope.ops.matmul.gguf import GGUF_BLOCKS

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 512, 4, 2, 64, 96, 2
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
# As released files mix them: values and the second product of the MLP have more bits.
MIXED = {
    "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_1", "ffn_gate": "Q5_K", "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
}  # fmt: skip
WriteGguf = Callable[..., str]


def write(path: Path, write_gguf: WriteGguf, *, tied: bool) -> str:
    rng = np.random.default_rng(0)
    layer = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    shapes = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    kinds = {name: MIXED[name.split(".")[2]] for name in shapes}
    shapes["token_embd.weight"], kinds["token_embd.weight"] = (VOCAB, HIDDEN), "Q8_0" if tied else "Q5_0"
    if not tied:
        shapes["output.weight"], kinds["output.weight"] = (VOCAB, HIDDEN), "Q6_K"
    tensors = {name: rng.standard_normal(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("output_norm", *(f"blk.{n}.{name}_norm" for n in range(LAYERS) for name in ("attn", "ffn")))
    tensors |= {f"{name}.weight": 1 + 0.1 * rng.standard_normal(HIDDEN) for name in norms}
    metadata: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCAB,
    }
    return write_gguf(path / "m.gguf", "llama", metadata, tensors, kinds)


@pytest.fixture(autouse=True)
def compiled() -> None:
    torch.set_num_threads(1)
    spec = MatmulSpec(GGUF_BLOCKS["q4_k"], torch.float32, 1, 1)
    reasons = cpu_blocks.rejects(spec, chip_of(torch.device("cpu")))
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_those_of_plain_weights(
    tied: bool, tmp_path: Path, write_gguf: WriteGguf, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32, where activations are not rounded."""
    path = write(tmp_path, write_gguf, tied=tied)
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts((5, 40), VOCAB))]
    with caplog.at_level(logging.INFO, "allotrope"):
        kept, plain = Watch(), Watch()
        tokens = run(engine(path, kept, **OPTIONS), asked)
        assert not any(line.startswith("dequantized on load") for line in caplog.messages)
        assert_same(run(engine(path, plain, quantized_weights="dequantize", **OPTIONS), asked), tokens)
        assert any(line.startswith("dequantized on load") for line in caplog.messages)
    assert_same_logits(kept, plain, atol=2e-4)


@pytest.mark.parametrize(
    ("chip", "dtype", "reasons"),
    [
        ("sm_90", "bfloat16", "triton: format={} (allowed: plain, fp8, mxfp4 and int4); cpu_blocks: chip=sm_90"),
        ("", "float16", "cpu_blocks: dtype=torch.float16 (needs torch.float32 or torch.bfloat16)"),
    ],
    ids=["on a GPU", "on a CPU in float16"],
)
def test_each_type_that_is_dequantized_has_a_line_with_the_reasons(
    chip: str, dtype: str, reasons: str, tmp_path: Path, write_gguf: WriteGguf
) -> None:
    """Loaded as for another chip, here."""
    path = write(tmp_path, write_gguf, tied=False)
    asked = EngineConfig(model=path, dtype=dtype, device="auto" if chip else "cpu")
    load_plan = resolve_load_plan(asked, available=1 << 32, chip=CHIPS[chip] if chip else None)
    build = replace(load_plan.build, device=torch.device("cpu"))
    decoder = load_plan.architecture.decoder(load_plan.spec, build)
    lines: list[str] = []
    load_decoder(
        *(decoder, load_plan.architecture, build, load_plan.checkpoint),
        seed=0,
        quantized_weights="auto",
        log=lines.append,
    )
    found = dict(line.split(": ", 3)[1:3] for line in lines if line.startswith("dequantized on load, kept as"))
    kinds = ("q4_1", "q4_k", "q5_0", "q5_k", "q6_k")
    assert tuple(found) == kinds
    assert found["q4_1"] == "layers.*.mixer.out.weight" and found["q5_0"] == "embedding.weight"
    for kind in kinds:
        (line,) = (line for line in lines if line.startswith(f"dequantized on load, kept as torch.{dtype}: {kind}: "))
        assert reasons.format(kind) in line


def test_rounded_activations_are_near(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = write(tmp_path, write_gguf, tied=True)
    asked = [request("r", prompts((9,), VOCAB)[0])]
    kept, plain = Watch(), Watch()
    run(engine(path, kept, quantized_activations="int8", **OPTIONS), asked)
    run(engine(path, plain, quantized_weights="dequantize", **OPTIONS), asked)
    first, wanted = (seen.seen["r"][8] for seen in (kept, plain))
    off = float((first - wanted).norm() / wanted.norm())
    assert 1e-4 < off < 0.05


def test_weights_take_little_more_than_the_file(tmp_path: Path, write_gguf: WriteGguf) -> None:
    """As many bytes as planned; the head shares the embeddings, and each format of q, k and v is one product."""
    path = write(tmp_path, write_gguf, tied=True)
    load_plan = resolve_load_plan(EngineConfig(model=path, dtype="float32", **OPTIONS))
    model = load_model(load_plan, 0)
    embedding, head = model.embedding.weight, model.head.weight
    assert isinstance(embedding, BlockWeight) and head is embedding
    linears = [one for one in model.modules() if isinstance(one, Linear)]
    assert [weight.format.name for weight in linears[0].weights] == ["q4_k", "q6_k"]
    weights = {id(w): w.nbytes for one in model.modules() for w in vars(one).values() if isinstance(w, BlockWeight)}
    weights |= {id(w): w.nbytes for one in linears for w in one.weights}
    plain = sum(one.nbytes for one in model.parameters())
    assert sum(weights.values()) + plain == load_plan.weight_bytes <= 1.25 * Path(path).stat().st_size
