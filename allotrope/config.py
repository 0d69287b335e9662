"""Every option of Allotrope, once: frozen dataclasses whose fields carry their own help.

The command line, the `LLM` class and the docs are made from these fields. Nothing mutates a config; what is derived
from the model (its context length, its dtype) is computed where it is needed and lives elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from allotrope.errors import ConfigError, refuse_options
from allotrope.field_types import field_types
from allotrope.rank_layout import RankLayout
from allotrope.request import MAX_SEED
from allotrope.speculative_config import SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
# Options and values under their old names, each with the name that it has now.
RENAMED_OPTIONS = {"overlap": "async_scheduling"}
RENAMED_VALUES = {("kv_cache_dtype", "fp8_scaled"): "fp8_ds_mla", ("quantized_weights", "unpack"): "dequantize"}
# The text of these options is JSON; a mapping is taken, too, and becomes text.
JSON_OPTIONS = ("hf_overrides", "speculative_config")

Quantization = Literal["fp8", "int8", "int4"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_ds_mla"]
StateDType = Literal["auto", "float32", "bfloat16", "float16"]

MAX_COUNT = 2**31 - 1
"""Of tokens and requests: kernels and requests hold them in 32 bits."""

MAX_BYTES = 2**63 - 1

MAX_SEQUENCES = 65536
"""Of a step: many times what the memory of one device serves. Buffers of a step are made for all of them."""

MAX_RANKS = 4096
"""Of a layout, each a process: many times what any model is served by."""

MAX_THREADS = 1024
"""More than the cores of one host; OpenMP ends the process where it cannot start as many as it is asked for."""


def option(help: str, default: Any = dataclasses.MISSING, *, short: str | None = None) -> Any:
    """A config field with its one line of help (the CLI's text) and perhaps a short flag."""
    return field(default=default, metadata={"help": help, "short": short})


_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?")
# As browsers send it: in lower case, without a path. Pages without an address, such as files, send "null".
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._~-]+)(:[0-9]+)?")
# Of options that are whole numbers: the least and the most.
_RANGES = {
    "seed": (-MAX_SEED, MAX_SEED),
    "tensor_parallel_size": (1, MAX_RANKS),
    "data_parallel_size": (1, MAX_RANKS),
    "pipeline_parallel_size": (1, MAX_RANKS),
    "num_redundant_experts": (0, MAX_COUNT),
    # A prompt has a token, and so has its output.
    "max_model_len": (2, MAX_COUNT),
    "max_num_seqs": (1, MAX_SEQUENCES),
    "max_num_batched_tokens": (1, MAX_COUNT),
    "max_num_waiting": (1, MAX_COUNT),
    "page_size": (1, MAX_COUNT),
    "kv_cache_memory_bytes": (1, MAX_BYTES),
    "threads": (1, MAX_THREADS),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What model runs, where, and with how much memory."""

    def __new__(cls, **options: Any) -> Self:
        """Refuse an option under its old name. Raises ConfigError with the name that it has now."""
        old = [f"{name} is now {new}: give {new}" for name, new in RENAMED_OPTIONS.items() if name in options]
        refuse_options(old)
        return super().__new__(cls)

    model: str = option("Model: a Hugging Face directory, a .gguf file, or a hub id, fetched once.")
    tokenizer: str | None = option("Tokenizer directory or file, where it is not the model's own.", None)
    revision: str | None = option("Revision of a hub id.", None)
    hf_overrides: str | None = option("JSON object merged over the checkpoint's config.json.", None)
    generation_config: Literal["auto", "none"] = option(
        "Sampling values of requests that set none: 'auto' takes those of the checkpoint's generation_config.json, "
        "'none' the API's own.",
        "auto",
    )
    load_format: LoadFormat = option("Where weights come from; 'dummy' makes reproducible random ones.", "auto")
    dtype: DType = option(
        "Type of weights and activations; 'auto' is the checkpoint's own, on a CPU bfloat16 where it has instructions "
        "for that, else float32.",
        "auto",
    )
    quantized_weights: Literal["auto", "keep", "dequantize"] = option(
        "Weights that are stored quantized: 'keep' multiplies them so, 'dequantize' makes them plain on load; 'auto' "
        "keeps those that products of the device read as they are.",
        "auto",
    )
    quantization: Quantization | None = option(
        "Quantize the weights of a plain checkpoint as they are loaded: those of attention, feed-forward layers and "
        "experts. A GPU takes 'fp8' and 'int4', a CPU those and 'int8'.",
        None,
    )
    quantized_activations: Literal["auto", "int8", "keep"] = option(
        "Activations that meet blocks of GGUF on a CPU: 'int8' lets products of few rows round them by groups of 32, "
        "'keep' leaves them as they are; 'auto' is 'keep' in float32, else 'int8'.",
        "auto",
    )
    kv_cache_dtype: KVCacheDType = option(
        "Type of the cached rows; 'auto' is that of the model, 'fp8_ds_mla' block-scaled FP8, with the scales in each "
        "row (latent and compressed rows).",
        "auto",
    )
    state_dtype: StateDType = option(
        "Type of recurrent states (gated delta rule); 'auto' is float32, as Transformers keeps them, the others take "
        "half the memory.",
        "auto",
    )
    device: str = option("Device to run on: 'auto', 'cpu', 'cuda' or 'cuda:N'.", "auto")
    seed: int = option("Seed of dummy weights and of requests that bring no seed.", 0)
    tensor_parallel_size: int = option("Number of ranks that share the heads of each attention layer.", 1, short="-tp")
    data_parallel_size: int = option(
        "Groups of such ranks, each with requests and caches of its own; together they share feed-forward layers, "
        "experts and the vocabulary.",
        1,
        short="-dp",
    )
    pipeline_parallel_size: int = option("Pipeline stages, each with a run of the layers.", 1, short="-pp")
    enable_expert_parallel: bool = option(
        "Let ranks hold whole experts of a layer, in place of a share of the width of each.", False, short="-ep"
    )
    expert_placement: str | None = option(
        "JSON file of how many tokens each expert of each layer got, as --expert-load-file writes it: experts are "
        "spread over the ranks so that each gets as many. Needs --enable-expert-parallel.",
        None,
    )
    num_redundant_experts: int = option(
        "Copies of the experts of a layer that --expert-placement says get the most tokens, over all ranks.", 0
    )
    expert_load_file: str | None = option(
        "Count the tokens that each expert of each layer gets, and write the counts to this JSON file at the end.", None
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "Where the ranks run: 'mp' in processes of this host, 'ray' on the hosts of a Ray cluster, which RAY_ADDRESS "
        "names or this host is a part of.",
        "mp",
    )
    distributed_address: str | None = option(
        "Address of this host at which the ranks meet; default: 127.0.0.1, with Ray that of this host in the cluster.",
        None,
    )
    max_model_len: int | None = option(
        "Longest prompt plus output in tokens, at least 2; default: the model's own.", None
    )
    max_num_seqs: int | None = option(
        "Most sequences in one step of a data-parallel rank, up to 65536; default: what a GPU's memory serves, up to "
        "512, and 64 on a CPU.",
        None,
    )
    max_num_batched_tokens: int | None = option(
        "Most tokens in one step of a data-parallel rank; longer prompts are cut; default: 8192 on a GPU (16384 "
        "offline) with the memory for it, 2048 on a CPU.",
        None,
    )
    max_num_waiting: int = option("Most requests that may wait; further ones are refused.", 1024)
    page_size: int = option("Tokens per page of the paged caches.", 16)
    kv_cache_memory_bytes: int | None = option(
        "Bytes for all caches; default: enough for a full batch of the longest context, within a share of memory.", None
    )
    memory_utilization: float | None = option(
        "Share of free memory: of a GPU's for weights, steps and caches (default 0.9), of a CPU's for caches (at most "
        "0.5, and enough for one sequence of full length and 32768 tokens of others).",
        None,
    )
    enable_prefix_caching: bool = option("Reuse cached pages of equal prompt beginnings.", True)
    scheduler_reserve_full_isl: bool = option(
        "Start a prompt once there are pages for all of it, beside the prompts that run; else once its first chunk has "
        "some: more requests run, and some are preempted and computed again.",
        True,
    )
    attention_backend: str | None = option(
        "Backend per family, such as 'mha=reference'; default: the first that can run each layer.", None
    )
    op_backend: str | None = option(
        "Backend per operation, such as 'rms_norm=reference'; default: the first that can run each.", None
    )
    structured_outputs_backend: Literal["llguidance", "xgrammar"] = option(
        "Library that holds answers to schemas and grammars.", "llguidance"
    )
    cuda_graphs: bool = option(
        "Capture steps as CUDA graphs, while requests are served; on a CPU, record decode steps' calls of C.",
        True,
    )
    async_scheduling: Literal["auto", "on", "off"] = option(
        "Launch a step before the tokens of the one before it are read; 'auto': on a GPU.", "auto"
    )
    speculative_config: str | None = option(
        'Speculative decoding: JSON object with vLLM\'s keys, such as \'{"method": "ngram", '
        '"num_speculative_tokens": 3}\'.',
        None,
        short="-sc",
    )
    threads: int | None = option("CPU threads of the engine, 1024 at most; default: all cores.", None)
    step_log_seconds: float | None = option(
        "Seconds between log lines with a step's time beside the least it must move and compute; default: none.", None
    )

    watchdog_seconds: float = option(
        "Seconds after which a rank of several that is silent, or whose step does not end, ends the engine; 0: never.",
        120.0,
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _as_text(f.name, getattr(self, f.name)))
        _check_types(self)
        reasons = []
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and value < least:
                reasons.append(f"{name}={value}; at least {least} is needed")
            if value is not None and value > most:
                reasons.append(f"{name}={value}; at most {most} is allowed")
        if not _DEVICE.fullmatch(self.device):
            reasons.append(f"device={self.device!r}; allowed: auto, cpu, cuda, cuda:N with N from 0 to 99")
        if self.page_size & (self.page_size - 1):
            reasons.append(f"page_size={self.page_size}; a power of two is needed")
        if self.step_log_seconds is not None and not self.step_log_seconds >= 0:
            reasons.append(f"step_log_seconds={self.step_log_seconds}; at least 0 is needed")
        if not self.watchdog_seconds >= 0:
            reasons.append(f"watchdog_seconds={self.watchdog_seconds}; at least 0 is needed")
        if self.quantization is not None and self.quantized_weights == "dequantize":
            reasons.append(f"quantization={self.quantization} quantizes what quantized_weights=dequantize makes plain")
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            reasons.append(f"memory_utilization={self.memory_utilization}; allowed: above 0, up to 1")
        if not reasons and self.layout.size > MAX_RANKS:
            reasons.append(f"{self.layout} are {self.layout.size} ranks; at most {MAX_RANKS} are allowed")
        if not reasons and self.distributed_address is not None and self.layout.size == 1:
            reasons.append("distributed_address needs several ranks, as of tensor_parallel_size=2: one meets nobody")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None and tokens < sequences:
            reasons.append(
                f"max_num_batched_tokens={tokens} is below max_num_seqs={sequences}: each sequence needs one token a "
                f"step"
            )
        refuse_options(reasons)
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)

    @property
    def layout(self) -> RankLayout:
        """How the ranks share the model."""
        sizes = self.tensor_parallel_size, self.data_parallel_size, self.pipeline_parallel_size
        return RankLayout(*sizes, self.enable_expert_parallel)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The options of speculative decoding; None without it."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server presents itself."""

    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", 8000)
    served_model_name: tuple[str, ...] = option(
        "Name of the model in the API; answers carry the first of several. Default: MODEL as it was given.", ()
    )
    api_key: tuple[str, ...] = option(
        "Key that routes ask for, all but /health, /ping and the pages / and /docs; one of several is enough. "
        "Also from ALLOTROPE_API_KEY.",
        (),
    )
    metrics_api_key: tuple[str, ...] = option(
        "Key that opens /metrics and nothing else. Also from ALLOTROPE_METRICS_API_KEY.", ()
    )
    root_path: str = option("Path under which a proxy shows this server, such as /llm.", "")
    allowed_origins: tuple[str, ...] = option(
        "Origin whose web pages may use this server (CORS), such as https://example.org, or *. Default: none.", ()
    )
    allowed_methods: tuple[str, ...] = option("Method that such pages may use.", ("*",))
    allowed_headers: tuple[str, ...] = option("Request header that such pages may send.", ("*",))
    allow_credentials: bool = option("Let such pages send cookies and the like.", False)
    enable_log_requests: bool = option("Log each request's end: status, seconds, tokens; no texts.", False)
    enable_log_prompts: bool = option("Log the first 1000 characters of each prompt.", False)
    chat_template: str | None = option("Jinja file or text to use in place of the checkpoint's chat template.", None)
    tool_call_parser: str | None = option(
        "Format of the model's tool calls, such as hermes; default: by its chat template and architecture.", None
    )
    reasoning_parser: str | None = option(
        "Format of the model's reasoning, such as qwen3; default: by its chat template and architecture.", None
    )
    strict: bool = option("Answer unknown request fields with 400 instead of naming them in a header.", False)
    metrics_compat: Literal["none", "vllm"] = option("Also export metrics under this engine's names.", "none")
    drain_timeout: float = option("Seconds that running requests get to finish after SIGTERM.", 30.0)
    health_timeout: float = option(
        "Seconds without a step's end, while requests are under way, after which /health is 503.", 10.0
    )
    enable_sleep_mode: bool = option("Let /sleep free a GPU's memory until /wake_up.", False)
    response_store_entries: int = option(
        "Most answers of /v1/responses that are kept for previous_response_id; 0: none.", 1024
    )
    response_store_bytes: int = option("Most bytes of such answers and their conversations.", 64 * 1024 * 1024)
    sse_keep_alive_interval: float = option(
        "Seconds after which a stream that has nothing to say sends a comment; 0: never.", 10.0
    )
    default_max_tokens: int | None = option(
        "Longest chat answer where a request sets no limit; default: the rest of the context, on a CPU 1024 at most.",
        None,
    )
    max_body_bytes: int = option("Largest accepted request body.", 32 * 1024 * 1024)
    max_connections: int | None = option(
        "Most clients connected at once; default: what the limit of file descriptors leaves, 8192 at most.", None
    )
    header_timeout: float = option("Seconds that the line and headers of a request may take to arrive.", 10.0)
    body_timeout: float = option("Seconds that a body may take to arrive, plus one for each 64 KiB of it.", 30.0)

    def __post_init__(self) -> None:
        _check_types(self)
        refuse_options(self._wrong_numbers() + self._wrong_texts())

    def _wrong_numbers(self) -> list[str]:
        reasons = []
        if not 0 <= self.port <= 65535:
            reasons.append(f"port={self.port}; allowed: 0 to 65535")
        for name in ("max_body_bytes", "max_connections", "default_max_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                reasons.append(f"{name}={getattr(self, name)}; at least 1 is needed")
        for name in ("response_store_entries", "response_store_bytes"):
            if getattr(self, name) < 0:
                reasons.append(f"{name}={getattr(self, name)}; at least 0 is needed")
        for name in ("drain_timeout", "sse_keep_alive_interval"):
            # A value that is no number fails every comparison.
            if not getattr(self, name) >= 0:
                reasons.append(f"{name}={getattr(self, name)}; at least 0 is needed")
        for name in ("header_timeout", "body_timeout", "health_timeout"):
            if not getattr(self, name) > 0:
                reasons.append(f"{name}={getattr(self, name)}; more than 0 is needed")
        return reasons

    def _wrong_texts(self) -> list[str]:
        reasons = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple) and not all(value):
                reasons.append(f"{f.name}={_shown(f.name, value)}; an empty text is not allowed")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            reasons.append(f"root_path={self.root_path!r}; it must begin with a slash and not end with one")
        wrong = [one for one in self.allowed_origins if one and not _ORIGIN.fullmatch(one)]
        if wrong:
            reasons.append(
                f"allowed_origins={', '.join(map(repr, wrong))}; a scheme and a host are needed, in lower case and "
                f"with nothing behind but a port, such as https://example.org or http://localhost:3000, or *"
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            reasons.append("allow_credentials with allowed_origins=*; name the origins, browsers take no other")
        for f in dataclasses.fields(self):
            of_pages = f.name in ("allowed_methods", "allowed_headers", "allow_credentials")
            if of_pages and getattr(self, f.name) != f.default and not self.allowed_origins:
                reasons.append(f"{f.name} needs allowed_origins: no page of another origin may use the server")
        if small := [method for method in self.allowed_methods if method != method.upper()]:
            reasons.append(f"allowed_methods={', '.join(map(repr, small))}; browsers name methods in capitals")
        return reasons


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch runs. The options that a server has too mean the same."""

    output: str | None = option(
        "File of the answers; default: FILE with .answers.jsonl in place of its ending. Lines that it answers already "
        "are passed over.",
        None,
    )
    max_in_flight: int | None = option("Most lines answered at once; default: the sequences of one step.", None)
    served_model_name: tuple[str, ...] = option(
        "Name of the model in the lines, of which there may be several. Default: MODEL as it was given.", ()
    )
    chat_template: str | None = option("Jinja file or text to use in place of the checkpoint's chat template.", None)
    tool_call_parser: str | None = option(
        "Format of the model's tool calls, such as hermes; default: by its chat template and architecture.", None
    )
    reasoning_parser: str | None = option(
        "Format of the model's reasoning, such as qwen3; default: by its chat template and architecture.", None
    )
    strict: bool = option("Answer unknown request fields with 400 instead of ignoring them.", False)
    default_max_tokens: int | None = option(
        "Longest chat answer where a request sets no limit; default: the rest of the context, on a CPU 1024 at most.",
        None,
    )

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError(f"bad options: max_in_flight={self.max_in_flight}; at least 1 is needed.")


def _check_types(config: object) -> None:
    """Refuse a value that is not of its field's type, or not among the choices of a `Literal`."""
    wrong = []
    for name, of_field in field_types(type(config)).items():
        value = getattr(config, name)
        if of_field.takes(value):
            continue
        new = RENAMED_VALUES.get((name, value)) if isinstance(value, str) else None
        wrong.append(f"{name}={_shown(name, value)}; {f'it is now {new!r}' if new else of_field.needs}")
    refuse_options(wrong)


def _as_text(name: str, value: Any) -> Any:
    """A path, or the mapping of a JSON option, as text; any other value as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name not in JSON_OPTIONS or not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"bad options: {name}={value!r} is not JSON ({error}).") from error


def _shown(name: str, value: Any) -> str:
    return "***" if name.endswith("api_key") else repr(value)
