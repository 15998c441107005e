"""Floor 1: the Llama in Flax NNX. Pure JAX: it knows no files, no ScaNN and no host memory."""

from rajax.models.attention import HostPath, Rope, StaticZone, Zone
from rajax.models.config import ConfigError, LlamaConfig
from rajax.models.llama import Llama
from rajax.models.rope import RopeConfig

__all__ = ["ConfigError", "HostPath", "Llama", "LlamaConfig", "Rope", "RopeConfig", "StaticZone", "Zone"]
