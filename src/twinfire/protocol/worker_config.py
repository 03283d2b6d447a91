"""How to start a worker: everything it is told, as one value that fits on a command line."""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.protocol.messages import Role

Dtype = Literal["auto", "f32", "bf16", "f16"]
Backend = Literal["auto", "native", "torch"]
Quantization = Literal["auto", "none", "int8", "int4"]
KvCacheDtype = Literal["auto", "bf16", "int8"]
ConnectorKind = Literal["socket", "nixl"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths in PEM: this end's certificate and key, and the authority that signs every end's."""

    certificate: str
    key: str
    authority: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker process. Sizes None are chosen by the worker itself."""

    model_path: str
    served_name: str
    socket_path: str
    """Unix socket that the worker listens on; empty where it only joins gateways."""
    name: str = ""
    """What logs and listings call the worker; empty takes the beginning of its instance id."""
    role: Role = "mixed"
    dtype: Dtype = "auto"
    """auto is bf16; on torch f32 where the weights are."""
    device: str = "cpu"
    """cpu, or cuda or cuda:N, which takes torch (`parse_device`)."""
    backend: Backend = "auto"
    """auto is native wherever the native kernels can do what is asked."""
    quantization: Quantization = "auto"
    """auto keeps the precision of the weights' own format."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """auto is what the model computes in."""
    speculate: str = "off"
    """How tokens are guessed ahead (`speculation.parse_speculation`)."""
    threads: int | None = None
    """That always compute; None is one for each usable core."""
    use_idle_cores: bool = False
    """Whether more threads compute while cores would be idle otherwise (native kernels)."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None takes what suits device and threads (`step_tokens`)."""
    max_prompt_tokens_beside_streams: int | None = None
    """Prompt tokens in a step that has a stream's next token; None takes what suits the role."""
    kv_cache_bytes: int | None = None
    weight_cache_dir: str | None = None
    """Where packed weights are kept for the next start; None keeps none."""
    weight_cache_bytes: int = 16 << 30
    """Limit of that folder."""
    scheduling_policy: SchedulingPolicy = "fair"
    enable_prefix_caching: bool = True
    join: tuple[str, ...] = ()
    """Addresses of the gateways that this worker dials (`addresses`)."""
    peer_address: str = ""
    """Where it listens for other workers; empty where it exchanges no KV."""
    data_host: str = ""
    """Host that its connector listens on; empty takes that of `peer_address`."""
    connector: ConnectorKind = "socket"
    secret_file: str | None = None
    """The cluster's secret; also seeds the block hashes, so that workers name blocks alike."""
    tls: TlsFiles | None = None
    """Certificates of both ends of every TCP link; None sends in the clear after the secret."""
    lease_s: float = 3.0
    """How long blocks are held for a peer that says nothing."""
    kv_checksums: bool = False
    """Whether moved blocks are checked against their crc32."""
    niceness: int = 0
    """Added to the process's own."""
    supervised: bool = True
    """Whether the worker ends when its standard input closes, as it does when its parent ends."""
    faults: str = ""
    """Fault points to arm, for tests (`transfer.fault_points`)."""


def parse_device(text: str) -> str:
    """Return `text` if it names a device; ValueError says what does."""
    kind, colon, index = text.partition(":")
    is_cpu = kind == "cpu" and not colon
    is_cuda = kind == "cuda" and (not colon or index.isdecimal())
    if is_cpu or is_cuda:
        return text
    raise ValueError(f"device is {text!r}; it must be cpu, cuda or cuda:N")


def encode_worker_config(config: WorkerConfig) -> str:
    """Return the command-line form."""
    return msgspec.json.encode(config).decode()


def decode_worker_config(text: str) -> WorkerConfig:
    """Parse the command-line form; msgspec.ValidationError names a wrong field."""
    return msgspec.json.decode(text, type=WorkerConfig)
