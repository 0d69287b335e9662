"""Why a flag of another engine is refused: the whole table of vLLM's and SGLang's flags, and the search in it.

Owns the flags that `foreign_flags` leaves to it. It must not know how a command line is read.
"""

from __future__ import annotations

import re

from allotrope.commands.foreign_flags import UNSUPPORTED

# A flag that `foreign_flags` refuses -> others that are refused for the same reason.
_AS: dict[str, str] = {
    "--api-server-count": "-asc --enable-scale-out",
    "--enable-auto-tool-choice": "--exclude-tools-when-tool-choice-none --tool-strict-level",
    "--tool-parser-plugin": "--reasoning-parser-plugin",
    "--reasoning-config": "--enable-reasoning",
    "--disable-log-stats": (
        "--enable-per-request-metrics --enable-server-load-tracking --show-hidden-metrics-for-version "
        "--per-request-spec-decode-metrics --kv-cache-metrics --kv-cache-metrics-sample "
        "--custom-histogram-buckets --cudagraph-metrics --enable-logging-iteration-details --enable-metrics "
        "--enable-cache-report --decode-log-interval"
    ),
    "--otlp-traces-endpoint": "--enable-trace-replay --collect-detailed-traces --enable-layerwise-nvtx-tracing",
    "--skip-tokenizer-init": "--tokens-only",
    "--enable-dp-attention": "--dp-size --dp --data-parallel",
    "--ep-size": "--ep --expert-parallel-size",
    "--data-parallel-backend": (
        "--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
        "--dp-supervisor-probe-failure-threshold --data-parallel-rank -dpn --data-parallel-start-rank -dpr "
        "--data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rpc-port -dpp -dpb "
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe "
        "--data-parallel-multi-port-external-lb -dpm -pcp --dcp-comm-backend --dcp-q-replicate "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --enable-hc-sp "
        "--enable-batch-sharded-sampling --enable-ep-weight-filter --enable-dbo --enable-shm-tensor-arena "
        "--ubatch-size --enable-elastic-ep --elastic-ep-max-dp-size --dbo-decode-token-threshold "
        "--dp-sync-interval --dbo-prefill-token-threshold --disable-nccl-for-dp-synchronization --eplb-config "
        "--expert-placement-strategy --aggregate-engine-logging --enable-dp-lm-head --moe-dense-tp-size "
        "--enable-two-batch-overlap --moe-a2a-backend --load-balance-method --attn-cp-size"
    ),
    "--nnodes": "-n -r --dist-init-addr --nccl-init-addr",
    "--distributed-timeout-seconds": (
        "--cpu-distributed-timeout-seconds --ray-workers-use-nsight "
        "--worker-use-ray --engine-use-ray --disable-frontend-multiprocessing --dist-timeout --base-gpu-id "
        "--gpu-id-step"
    ),
    "--ssl-keyfile": "--ssl-ca-certs --enable-ssl-refresh --ssl-cert-reqs --ssl-ciphers",
    "--runner": "--enable-flash-late-interaction --diffusion-config -dc --task --is-embedding --embedding",
    "--limit-mm-per-prompt": (
        "--trust-request-mm-kwargs --allowed-media-domains --enable-mm-embeds --media-io-kwargs "
        "--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-only "
        "--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path "
        "--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --interleave-mm-strings "
        "--skip-mm-profiling --video-pruning-rate --video-pruning-method --mm-tensor-ipc "
        "--mm-processor-device --mm-ipc-gpu-memory-gb --mm-device-do-normalize --disable-chunked-mm-input "
        "--ec-transfer-config --ec-manager-config --disable-mm-preprocessor-cache --enable-multimodal "
        "--mm-attention-backend"
    ),
    "--sleep-mode-offload-cudagraph": (
        "--sleep-preserve-parameter-names --enable-cumem-allocator --enable-nccl-comm-suspend --enable-memory-saver"
    ),
    "--worker-cls": "--io-processor-plugin --worker-extension-cls",
    "--model-loader-extra-config": (
        "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size --ignore-patterns "
        "--use-tqdm-on-load --pt-load-map-location --max-parallel-loading-workers"
    ),
    "--mamba-cache-mode": (
        "--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds --replayssm-buffer-len "
        "--use-replayssm --enable-mamba-shared-prefix-checkpoint --mamba-scheduler-strategy "
        "--mamba-full-memory-ratio --max-mamba-cache-size"
    ),
    "--kv-offloading-size": "--kv-offloading-backend --enable-hierarchical-cache --hicache-ratio --hicache-size",
    "--cpu-offload-gb": (
        "--offload-backend --cpu-offload-params --offload-group-size --offload-num-in-group "
        "--offload-prefetch-step --offload-params"
    ),
    "--enable-lora": (
        "--lora-dtype --enable-tower-connector-lora --max-cpu-loras --fully-sharded-loras "
        "--lora-target-modules --default-mm-loras --specialize-active-lora --enable-mixed-moe-lora-format "
        "--enable-moe-shared-loras --max-lora-cls-labels --lora-extra-vocab-size --long-lora-scaling-factors "
        "--enable-prompt-adapter --lora-paths --max-loras-per-batch --lora-backend"
    ),
    "--enable-chunked-prefill": "--long-prefill-token-threshold-adaptive --chunked-prefill-size --max-prefill-tokens",
    "--compilation-config": (
        "-cc --max-seq-len-to-capture --max-context-len-to-capture --cuda-graph-max-bs --cuda-graph-bs "
        "--disable-cuda-graph-padding"
    ),
    "--spec-tokens": (
        "--num-speculative-tokens --speculative-model --num-lookahead-slots --speculative-algorithm "
        "--speculative-draft-model-path --speculative-num-steps --speculative-eagle-topk "
        "--speculative-num-draft-tokens"
    ),
    "--hf-config-path": "--rope-scaling --rope-theta",
    "--structured-outputs-config": "--guided-decoding-disable-fallback --constrained-json-whitespace-pattern",
    "--model": "--model-path",
    "--num-gpu-blocks-override": "--max-total-tokens",
    "--disable-hybrid-kv-cache-manager": "--disable-hybrid-swa-memory",
}

# Reason -> the flags that are refused for it.
_FOR: dict[str, str] = {
    "graphs are captured by default; leave it out": "--no-enforce-eager",
    "the server speaks HTTP only": "--grpc --grpc-port",
    "templates are run as code, so only the operator sets one (--chat-template)": "--trust-request-chat-template",
    "each request gives its own chat_template_kwargs": "--default-chat-template-kwargs",
    "each request asks for it; leave it out": "--return-tokens-as-token-ids --enable-force-include-usage",
    "texts of requests and answers are not logged; leave it out": (
        "--max-log-len --enable-log-outputs --enable-log-deltas"
    ),
    "the usage of an answer always tells its cached tokens; leave it out": "--enable-prompt-tokens-details",
    "--step-log-seconds sets a step's time beside the least it could take": "--enable-mfu-metrics",
    "see the routes /tokenize and /detokenize": "--enable-tokenizer-info-endpoint",
    "the server has OpenAI's API only; leave it out": (
        "--cohere-is-reasoning-model --cohere-format --anthropic-disabled-thinking-effort"
    ),
    "faults of the server are logged with their traceback anyway; leave it out": "--log-error-stack",
    "answers carry no fingerprint; leave it out": "--fingerprint-mode --fingerprint-value",
    "bind the process with taskset or numactl": "--numa-bind --numa-bind-nodes --numa-bind-cpus",
    "choose GPUs with the environment variable CUDA_VISIBLE_DEVICES, or one with --device": "--device-ids",
    "the size of headers is fixed, that of bodies is --max-body-bytes": "--h11-max-incomplete-event-size",
    "there is nothing like it here; leave it out": "--disable-access-log-for-endpoints --h11-max-header-count",
    "the body of an answer holds its id; leave it out": "--enable-request-id-headers",
    "leave it out; the API is in /openapi.json": "--disable-fastapi-docs --enable-offline-docs",
    "weights are read as the checkpoint stores them; see --quantized-weights": "--allow-deprecated-quantization",
    "answers hold tokens and log-probabilities only": (
        "--enable-return-routed-experts --return-sampling-mask --aux-output-config"
    ),
    "log-probabilities are those of the model's own scores; leave it out": "--logprobs-mode",
    "tokens are drawn by integer weights; leave it out": "--use-fp64-gumbel",
    "there is no cascade attention to turn off; leave it out": "--disable-cascade-attn",
    "prompts are text or token ids": "--enable-prompt-embeds",
    "each architecture has one class; `allotrope families` lists them": "--model-class-overrides",
    "the number of threads that tokenize is fixed; leave it out": "--renderer-num-workers",
    "--attention-backend chooses by family, such as mha=reference": (
        "--mamba-backend --mamba-ssu-algorithm --gdn-prefill-backend --kda-prefill-backend "
        "--kda-decode-backend --sparse-indexer-topk-backend --attention-config -ac "
        "--prefill-attention-backend --decode-attention-backend --nsa-prefill-backend --nsa-decode-backend "
        "--linear-attn-backend"
    ),
    "kernels of products are chosen by their shapes and the chip; leave it out": (
        "--moe-backend --linear-backend --kernel-config --ir-op-priority --enable-flashinfer-autotune "
        "--enable-torch-compile --torch-compile-max-bs --moe-runner-backend --fp8-gemm-backend "
        "--fp4-gemm-backend"
    ),
    "if its engine dies the server ends with status 1; let a supervisor start it again": (
        "--enable-fault-tolerance --fault-tolerance-config"
    ),
    "what the prefix cache keeps follows from the caches; see --page-size": (
        "--prefix-cache-retention-interval --prefix-match-unit"
    ),
    "--kv-cache-dtype holds for all layers": "--kv-cache-dtype-skip-layers",
    "prompts go through every layer; leave it out": "--kv-sharing-fast-prefill",
    "windows come from the prefix cache with the rest; leave it out": "--swa-bounded-replay",
    "set the environment variable ALLOTROPE_LOGGING_LEVEL": "--logging-config --log-level --log-config-file",
    "compilations are not watched; leave it out": "--jit-monitor-mode --jit-monitor-verbose",
    "the limit of a step is --max-num-batched-tokens": "--max-num-scheduled-tokens",
    "the limit of a step is --max-num-seqs": "--max-num-active-seqs",
    "the queue is limited in requests: --max-num-waiting": "--max-num-queued-tokens",
    "the scheduler has no such setting; see --max-num-seqs and --max-num-batched-tokens": (
        "--watermark --prefill-schedule-interval --performance-mode "
        "--use-v2-block-manager --scheduler-delay-factor --num-scheduler-steps --multi-step-stream-outputs "
        "--preemption-mode --disable-async-output-proc --schedule-policy --schedule-conservativeness "
        "--enable-mixed-chunk"
    ),
    "output is not watermarked": "--watermark-config",
    "no architecture here has one; `allotrope families` lists them": "--engram-config",
    "caches and weights are not moved between servers": (
        "--weight-transfer-config --disaggregation-mode --disaggregation-transfer-backend"
    ),
    "every option is a flag; leave it out": "--additional-config",
    "the environment is not checked; leave it out": "--fail-on-environ-validation",
    "factors of cached rows come from the checkpoint or stand in the rows (fp8_ds_mla)": "--calculate-kv-scales",
    "--memory-utilization is the share of weights, caches and steps together": "--mem-fraction-static",
    "write --async-scheduling off": "--disable-overlap-schedule",
    "write --generation-config auto (for 'model') or none (for 'openai')": "--sampling-defaults",
    "write the values in each request; see --generation-config": "--preferred-sampling-params",
    "there is one sampler; leave it out": "--sampling-backend",
    "equal requests in equal order give equal tokens anyway; leave it out": "--enable-deterministic-inference",
    "see /health for a step that does not end, and --watchdog-seconds for that of several ranks": "--watchdog-timeout",
    "the server says when it is ready; leave it out": "--skip-server-warmup",
}

REFUSED: dict[str, str] = {
    **{name: UNSUPPORTED[like] for like, names in _AS.items() for name in names.split()},
    **{name: reason for reason, names in _FOR.items() for name in names.split()},
    **UNSUPPORTED,
}

_OPTIMIZATION = re.compile(r"-O\d*")


def refusal(flag: str) -> str | None:
    """Why `flag` of another engine is refused and what to do; None for one that no engine is known to have.

    vLLM also reads single values of a JSON flag, as in `--compilation-config.level`, and levels as in `-O3`.
    """
    name = flag.partition(".")[0].removesuffix("+")
    if _OPTIMIZATION.fullmatch(name):
        name = "-O"
    positive = f"--{name.removeprefix('--no-')}"
    return REFUSED.get(name) or (REFUSED.get(positive) if name.startswith("--no-") else None)
