"""Twinfire: an LLM serving system with separate prefill and decode pools.

The rooms, lowest first; a room may import only those above it in this list:
protocol, artifacts, cache, scheduler, kernels, models, engine, worker, gateway, bench, cli.
"""

__version__ = "0.1.0"
