"""discod: the per-node activation-offload daemon. Never imports torch."""

__version__ = "0.1.0"
