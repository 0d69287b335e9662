"""Tables of vLLM's and SGLang's flags: aliases of our options, and flags that are refused.

Owns the spellings only. It must not know how a command line is read.
"""

from __future__ import annotations

import typer

from allotrope.config import RENAMED_VALUES

# Our field -> other spellings of its flag. On a CPU, our memory_utilization does not count the weights.
# The last rows are flags of vLLM's `bench serve`.
ALIASES: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("--tp", "--tp-size"),
    "pipeline_parallel_size": ("--pp-size",),
    "max_model_len": ("--context-length",),
    "max_num_seqs": ("--max-running-requests",),
    "seed": ("--random-seed",),
    "tokenizer": ("--tokenizer-path",),
    "hf_overrides": ("--json-model-override-args",),
    "memory_utilization": ("--gpu-memory-utilization", "--device-memory-utilization"),
    "page_size": ("--block-size",),
    "state_dtype": ("--mamba-ssm-cache-dtype", "--mamba-ssm-dtype"),
    "max_num_waiting": ("--max-num-queued-reqs", "--max-queued-requests"),
    "drain_timeout": ("--shutdown-timeout",),
    "structured_outputs_backend": ("--guided-decoding-backend", "--grammar-backend"),
    "url": ("--base-url",),
    "model_name": ("--model",),
    "input_len": ("--random-input-len",),
    "output_len": ("--random-output-len",),
}

# Our boolean field -> flags that turn it off.
OPPOSITES: dict[str, tuple[str, ...]] = {
    "cuda_graphs": ("--enforce-eager", "--disable-cuda-graph"),
    "enable_prefix_caching": ("--disable-radix-cache",),
}

# Our field -> other spellings of its values.
VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "bf16": "bfloat16"},
    "generation_config": {"vllm": "none"},
}

_PARALLEL = (
    "a model is shared between ranks by --tensor-parallel-size, --data-parallel-size, --pipeline-parallel-size and "
    "--enable-expert-parallel"
)
_DP_ATTENTION = (
    "it counts data-parallel ranks among the tensor-parallel ones: of N ranks in D groups write "
    "--data-parallel-size D --tensor-parallel-size N/D, which shares the feed-forward layers among all N"
)
_EP_SIZE = "experts are on all ranks of a stage: write --enable-expert-parallel"
_HOSTS = "Ray places ranks on several hosts: --distributed-executor-backend ray"
_EAGER = "decode steps are captured at sizes of their own; --no-cuda-graphs turns that off"
_NO_REMOTE_CODE = "code from a checkpoint is never run; leave it out"
_NO_LORA = "adapters are not supported; merge them into the checkpoint"
_NO_MEDIA = "only text is supported"
_NO_PLUGIN = "code from outside is not loaded; see --tool-call-parser and --reasoning-parser"
_QUANT = (
    "a checkpoint's own quantization is found and kept or dequantized (--quantized-weights), and plain weights are "
    "quantized by --quantization fp8, int8 or int4"
)
_SPECULATION = 'give it in --speculative-config, such as \'{"method": "mtp", "num_speculative_tokens": 3}\''
_ALWAYS_CHUNKED = "prompts are always cut to --max-num-batched-tokens; set that instead"
_NO_TRANSFER = "caches are not shared with other servers, nor told about; leave it out"
_STATES = "states are kept as the model needs them; see --state-dtype for their type"
_NO_OFFLOAD = "caches stay in the device's own memory; see --kv-cache-memory-bytes"
_HUB = "set the environment variable HF_HOME to choose where hub files lie"

# Flag of vLLM -> reason of the refusal and the remedy. `refusals` adds rarely used flags.
UNSUPPORTED: dict[str, str] = {
    "--model": "give the model as the first argument",
    "--enable-dp-attention": _DP_ATTENTION,
    "--ep-size": _EP_SIZE,
    "--data-parallel-backend": _PARALLEL,
    "--prefill-context-parallel-size": _PARALLEL,
    "--decode-context-parallel-size": _PARALLEL,
    "-dcp": _PARALLEL,
    "--enable-eplb": _PARALLEL,
    "--all2all-backend": _PARALLEL,
    "--nnodes": _HOSTS,
    "--node-rank": _HOSTS,
    "--master-addr": f"{_HOSTS}; --distributed-address says where the ranks meet",
    "--master-port": _HOSTS,
    "--distributed-timeout-seconds": "see --watchdog-seconds for a step that does not end",
    "--disable-custom-all-reduce": "--op-backend all_reduce=reference turns our own all-reduce off",
    "--compilation-config": _EAGER,
    "-O": _EAGER,
    "--optimization-level": _EAGER,
    "--cudagraph-capture-sizes": _EAGER,
    "--max-cudagraph-capture-size": _EAGER,
    "--trust-remote-code": _NO_REMOTE_CODE,
    "--model-impl": "models run on this engine's own layers alone; leave it out",
    "--code-revision": _NO_REMOTE_CODE,
    "--tokenizer-mode": "the tokenizer is chosen by its files; see --tokenizer",
    "--tokenizer-revision": "name a directory with --tokenizer instead",
    "--skip-tokenizer-init": "the server always needs a tokenizer",
    "--config-format": "the format is found from the files",
    "--hf-config-path": "change single values with --hf-overrides",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--download-dir": _HUB,
    "--model-loader-extra-config": "loading has no further options; see --load-format",
    "--safetensors-load-strategy": "loading has no further options; see --load-format",
    "-q": _QUANT,
    "--quantization-config": _QUANT,
    "--spec-method": _SPECULATION,
    "--spec-model": _SPECULATION,
    "--spec-tokens": _SPECULATION,
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--limit-mm-per-prompt": _NO_MEDIA,
    "--mm-processor-kwargs": _NO_MEDIA,
    "--mm-processor-cache-gb": _NO_MEDIA,
    "--allowed-local-media-path": _NO_MEDIA,
    "--language-model-only": _NO_MEDIA,
    "--tool-parser-plugin": _NO_PLUGIN,
    "--enable-auto-tool-choice": "tools are on wherever their format is known (--tool-call-parser); leave it out",
    "--tool-server": "the server runs no tools itself; requests bring theirs",
    "--reasoning-config": "the format is found by the chat template, or named with --reasoning-parser",
    "--structured-outputs-config": "write --structured-outputs-backend",
    "--override-generation-config": "write the values in each request; --generation-config none drops the file's",
    "--chat-template-content-format": "the chat template receives text; leave it out",
    "--response-role": "the role is always 'assistant'; leave it out",
    "--enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--no-enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--long-prefill-token-threshold": _ALWAYS_CHUNKED,
    "--scheduling-policy": "requests run in the order of their arrival; leave it out",
    "--no-async-scheduling": "write --async-scheduling off",
    "--overlap": "write --async-scheduling",
    "--regimes": "write --modes",
    "--stream-interval": "each token is sent when it is ready; leave it out",
    "--max-logprobs": "requests may ask for up to 20; leave it out",
    "--num-gpu-blocks-override": "set the caches' size with --kv-cache-memory-bytes",
    "--kv-transfer-config": _NO_TRANSFER,
    "--kv-events-config": _NO_TRANSFER,
    "--kv-offloading-size": _NO_OFFLOAD,
    "--cpu-offload-gb": "weights stay in the device's own memory; share them with --tensor-parallel-size",
    "--swap-space": _NO_OFFLOAD,
    "--prefix-caching-hash-algo": "keys of cached pages are always BLAKE2b hashes; leave it out",
    "--disable-hybrid-kv-cache-manager": "each kind of layer always keeps what it needs itself; leave it out",
    "--disable-sliding-window": "a model's window is part of its result and is never turned off",
    "--mamba-cache-mode": _STATES,
    "--mamba-cache-dtype": _STATES,
    "--mamba-block-size": _STATES,
    "--sleep-mode-offload-cudagraph": "graphs are captured anew after a sleep; see --enable-sleep-mode",
    "--otlp-traces-endpoint": "tracing is not supported; see /metrics",
    "--profiler-config": "profiling over HTTP is not supported",
    "--worker-cls": "the engine has no exchangeable parts at run time",
    "--scheduler-cls": "the engine has no exchangeable parts at run time",
    "--logits-processors": "the engine has no exchangeable parts at run time",
    "--runner": "only text generation is supported",
    "--convert": "only text generation is supported",
    "--pooler-config": "only text generation is supported",
    "--disable-log-requests": "requests are logged with --enable-log-requests only; leave it out",
    "--enable-log-outputs": "answers are never logged; see --enable-log-requests",
    "--max-log-len": "see --enable-log-prompts, which logs a prompt's first 1000 characters",
    "--enable-request-id-headers": "every answer has the header x-request-id; leave it out",
    "--enable-server-load-tracking": "/load is always there; leave it out",
    "--enable-offline-docs": "/docs never asks another host; leave it out",
    "--disable-log-stats": "figures are under /metrics; leave it out",
    "--disable-uvicorn-access-log": "requests are logged with --enable-log-requests only; leave it out",
    "--uvicorn-log-level": "set the environment variable ALLOTROPE_LOGGING_LEVEL",
    "--uds": "listen with --host and --port",
    "--ssl-keyfile": "end TLS in a proxy in front of the server",
    "--ssl-certfile": "end TLS in a proxy in front of the server",
    "--middleware": "put a proxy in front of the server",
    "--api-server-count": "one HTTP process is supported",
    "--headless": "the server always listens; use the LLM class for offline work",
}


def plain_value(field: str, text: str) -> str:
    """Our spelling of the value `text` of `field`. Raises `typer.BadParameter` for the old name of a value."""
    if new := RENAMED_VALUES.get((field, text)):
        raise typer.BadParameter(f"{text!r} is now {new!r}: write {new}.")
    return VALUES.get(field, {}).get(text, text)
