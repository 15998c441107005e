"""Floor 1: the Llama in Flax NNX. Pure JAX: it knows no files, no ScaNN and no host memory."""

from rajax.models.attention import DeviceCache, HostPath, Rope, Zone
from rajax.models.config import ConfigError, LlamaConfig
from rajax.models.llama import Llama
from rajax.models.rope import RopeConfig

__all__ = ["ConfigError", "DeviceCache", "HostPath", "Llama", "LlamaConfig", "Rope", "RopeConfig", "Zone"]
