"""RAJAX's checkpoints: an Orbax tree of parameters beside Hugging Face's own config and tokenizer files.

    CHECKPOINT/
      params/                 one Orbax checkpoint: {"layers.0.self_attn.q_proj.kernel": array, ...}
      checksums.json          the CRC-32 of every file in params/
      config.json             Hugging Face's, unchanged, as are the others
      generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja, ...

Nothing in a checkpoint is code, and nothing is unpickled. A checkpoint is written under another name and
renamed when it is complete; config.json comes last, so that an interrupted one cannot be loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import type_handlers

from rajax.models import ConfigError, Llama, LlamaConfig
from rajax.models.llama import PACKED, PREFILL_PRECISIONS, packed_widths

PARAMS = "params"
CHECKSUMS = "checksums.json"
PARTIAL = ".partial"
"""In the name of a checkpoint that is not complete."""

DTYPES = ("float32", "bfloat16", "float16")

READ_AT_ONCE = 4
"""Parameters read at a time: enough to keep decompression busy, and memory stays at one model and these."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what it says; the message names the file."""


class LazyTensor(Protocol):
    """A parameter that is read when it is written out, so that a model is never whole in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self) -> np.ndarray: ...


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    rope_scaling: Mapping[str, Any] | None = None,
    prefill_precision: str = "float32",
) -> Llama:
    """Loads a model from a directory that `rajax convert` made.

    Args:
      path: the checkpoint's directory.
      dtype: of the parameters and of the computation: "float32", "bfloat16" or "float16". By default that
        of the checkpoint; on a CPU float32, since matrix-vector products in the others are some twenty
        times slower there.
      rope_scaling: replaces the checkpoint's, in Hugging Face's form. For YaRN over four times the model's
        context: {"rope_type": "yarn", "factor": 4.0}.
      prefill_precision: of the products over a prompt. "float32" is that of the parameters. "bfloat16" rounds float32
        operands, and sums in float32: many times faster on a CPU with AMX or a GPU, and slower on a CPU without
        bfloat16 products.

    Returns:
      The parameters: a pytree that carries its static config as `.config`.

    Raises:
      CheckpointError: the directory or a file in it is missing or damaged.
      ConfigError: a setting is not supported, `rope_scaling` included.
      ValueError: a dtype or a precision other than those above.
    """
    path = Path(path)
    if prefill_precision not in PREFILL_PRECISIONS:
        raise ValueError(
            f"prefill_precision must be one of {', '.join(PREFILL_PRECISIONS)}; found {prefill_precision!r}"
        )
    config = read_config(path)
    _check_path(path)
    if not (path / PARAMS).is_dir():
        if list(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path} is a Hugging Face directory; convert it first: rajax convert {path} OUT_DIR"
            )
        raise CheckpointError(f"{path} has no {PARAMS}/ directory; make the checkpoint with rajax convert")
    if rope_scaling is not None:
        config = config.with_rope_scaling(rope_scaling)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"
    if dtype is not None:
        dtype = _dtype(dtype)
    _check_files(path)

    expected = parameter_shapes(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        with _checkpointer(
            {jax.Array: _BatchHandler(), np.ndarray: type_handlers.NumpyHandler()}
        ) as checkpointer:
            stored = _stored_shapes(checkpointer, path / PARAMS)
            _check_names(path, stored, expected)
            restore_args = {name: ocp.ArrayRestoreArgs(dtype=dtype, sharding=device) for name in expected}
            arrays = checkpointer.restore(
                (path / PARAMS).absolute(), args=ocp.args.PyTreeRestore(restore_args=restore_args)
            )
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        cause = f"{error.__cause__ or error}".split("\n")[0]
        raise CheckpointError(
            f"{path / PARAMS} cannot be read; convert the model again. Cause: {cause}"
        ) from error
    model = from_parameters(config, arrays)
    model.prefill_precision = prefill_precision
    return model


def save(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    files: Mapping[str, bytes],
    on_tensor: Callable[[str], None],
) -> None:
    """Writes a checkpoint, a tensor at a time, and only then gives it its name.

    Args:
      path: a directory that is empty or does not exist.
      tensors: by parameter name.
      files: the contents of the JSON and text files by name, config.json among them.
      on_tensor: called with the name of each tensor that has been written.

    Raises:
      FileExistsError: `path` exists and is not an empty directory.
      CheckpointError: `path` cannot hold a checkpoint.
      Whatever reading a tensor or writing a file raises. Nothing is left behind then.
    """
    path = check_free(path)
    # A directory that is there already may be a mount point or where a shell stands: it has to stay.
    stays = path.exists()
    made = [parent for parent in path.parents if not parent.exists()]
    temporary = path / PARTIAL if stays else path.with_name(f"{path.name[:50]}{PARTIAL}-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_params(temporary / PARAMS, tensors, on_tensor)
        checksums = json.dumps(_checksums(temporary / PARAMS), indent=0).encode()
        files = {CHECKSUMS: checksums, **files}
        names = sorted(files, key=lambda name: name == "config.json")
        for name in names:
            (temporary / name).write_bytes(files[name])
        check_free(path)
        if stays:
            for name in (PARAMS, *names):
                os.rename(temporary / name, path / name)
            temporary.rmdir()
        else:
            os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def check_free(path: Path) -> Path:
    """The real path of a checkpoint that can be made.

    Raises:
      FileExistsError: it exists and is not an empty directory, or a file is in its place or above it.
      CheckpointError: a path that TensorStore would take for another one.
    """
    path = Path(os.path.realpath(path))
    _check_path(path)
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise FileExistsError(f"{parent} is not a directory, so {path} cannot be made")
    # What an interrupted conversion has left is no obstacle.
    if path.exists() and (not path.is_dir() or any(p.name != PARTIAL for p in path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory; remove it or choose another")
    return path


def read_config(path: Path) -> LlamaConfig:
    """The config of a checkpoint or of a Hugging Face directory.

    Raises:
      CheckpointError: no such directory, no config.json, or one that is no JSON object.
      ConfigError: a setting that is missing or not supported; the message names the file.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    try:
        return LlamaConfig.from_hf(config, read_json(generation) if generation.exists() else None)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError where it is missing or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def abstract_model(config: LlamaConfig) -> Llama:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Llama(config, rngs=_OneKey()))  # type: ignore[arg-type]


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name in a checkpoint, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, leaf in _named(nnx.state(abstract_model(config))):
        widths = packed_widths(config).get(name.split(".")[-2], leaf.shape[-1:])
        shapes |= {part: (*leaf.shape[:-1], w) for part, w in zip(_parts(name), widths, strict=True)}
    return shapes


def from_parameters(config: LlamaConfig, arrays: dict[str, jax.Array]) -> Llama:
    """The model of arrays by their names in a checkpoint. It takes them out of `arrays`."""
    graph, state = nnx.split(abstract_model(config))
    leaves = []
    for name, _ in _named(state):
        parts = [arrays.pop(part) for part in _parts(name)]
        leaves.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def parameters(model: Llama) -> dict[str, jax.Array]:
    """Every parameter's name in a checkpoint, and its array."""
    arrays: dict[str, jax.Array] = {}
    for name, leaf in _named(nnx.state(model)):
        widths = packed_widths(model.config).get(name.split(".")[-2], leaf.shape[-1:])
        parts = jnp.split(leaf, np.cumsum(widths)[:-1].tolist(), axis=-1)
        arrays |= dict(zip(_parts(name), parts, strict=True))
    return arrays


def _parts(name: str) -> list[str]:
    """The names in a checkpoint of the parameters that one of the model's is made of, mostly of itself."""
    *path, module, kind = name.split(".")
    return [".".join([*path, part, kind]) for part in PACKED.get(module, (module,))]


def _named(state: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of an nnx state in its order, named by their path."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path)
        yield ".".join(str(k) for k in keys if k not in (None, "value", ".value")), leaf


class _OneKey:
    """Stands in for `nnx.Rngs`, whose counter would make tracing quadratic in the layers."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; found {dtype!r}")
    return found


def _check_path(path: Path) -> None:
    """TensorStore reads a backslash as a slash, and Orbax a part that ends in a colon as a URL's scheme."""
    for part in path.absolute().parts:
        if "\\" in part or part.endswith(":"):
            raise CheckpointError(
                f"{path}: a checkpoint is a local directory, and no part of its path may hold a backslash or "
                f"end in a colon; found {part!r}"
            )


def _checksums(directory: Path) -> dict[str, int]:
    """The CRC-32 of every file below a directory, by its path there."""

    def crc32(file: Path) -> int:
        value = 0
        with file.open("rb") as source:
            while piece := source.read(1 << 20):
                value = zlib.crc32(piece, value)
        return value

    files = sorted(file for file in directory.rglob("*") if file.is_file())
    with ThreadPoolExecutor() as pool:
        return {
            file.relative_to(directory).as_posix(): value
            for file, value in zip(files, pool.map(crc32, files), strict=True)
        }


def _check_files(path: Path) -> None:
    """Finds damage that the format would not: a changed byte in stored weights only makes them others."""
    if not (path / CHECKSUMS).exists():
        return
    try:
        found = _checksums(path / PARAMS)
    except OSError as error:
        raise CheckpointError(f"{path / PARAMS} cannot be read: {error}") from error
    for name, value in read_json(path / CHECKSUMS).items():
        if name not in found:
            raise CheckpointError(f"{path / PARAMS / name} is missing; convert the model again")
        if found[name] != value:
            raise CheckpointError(f"{path / PARAMS / name} is damaged; convert the model again")


def _write_params(path: Path, tensors: Mapping[str, LazyTensor], on_tensor: Callable[[str], None]) -> None:
    writer = _LazyHandler({id(t): name for name, t in tensors.items()}, on_tensor)
    kinds = {type(tensor) for tensor in tensors.values()}
    with _checkpointer(
        {**dict.fromkeys(kinds, writer), jax.Array: type_handlers.ArrayHandler()}
    ) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(tensors)))


def _checkpointer(handlers: Mapping[type, Any]) -> ocp.Checkpointer:
    """Orbax's, with a directory per parameter and these handlers of kinds of parameters.

    Orbax's other format, OCDBT, is merged from parts that Orbax searches for with a pattern. It takes brackets
    in the path for a part of the pattern, finds nothing then, and writes a checkpoint without parameters.
    """
    registry = type_handlers.create_type_handler_registry(*handlers.items())
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
    handler.finalize = lambda directory: None  # there is nothing to merge, of which Orbax would warn
    return ocp.Checkpointer(handler)


def _stored_shapes(checkpointer: ocp.Checkpointer, path: Path) -> dict[str, tuple[int, ...]]:
    metadata = checkpointer.metadata(path.absolute()).item_metadata
    return {name: tuple(leaf.shape) for name, leaf in dict(metadata).items()}


def _check_names(
    path: Path, stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for what, names in (
        ("lacks", set(expected) - set(stored)),
        ("has an extra", set(stored) - set(expected)),
    ):
        if names:
            raise CheckpointError(f"{path} {what} parameter {min(names)} ({len(names)} in all)")
    for name, shape in expected.items():
        if stored[name] != tuple(shape):
            raise CheckpointError(
                f"{path}: {name} has shape {stored[name]}, config.json asks for {tuple(shape)}"
            )


class _BatchHandler(type_handlers.ArrayHandler):
    """Orbax's handler of JAX arrays, which by itself would have all of a model in flight at once."""

    async def deserialize(self, infos, args=None):
        read, pairs = super().deserialize, list(zip(infos, args, strict=True))
        arrays: list[jax.Array] = []
        for start in range(0, len(pairs), READ_AT_ONCE):
            reads = [read([info], [arg]) for info, arg in pairs[start : start + READ_AT_ONCE]]
            # All are awaited before one's failure is raised: the others would outlive Orbax's event loop.
            for result in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                arrays += result
        return arrays


class _LazyHandler(type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, fed one tensor at a time."""

    def __init__(self, names: Mapping[int, str], on_tensor: Callable[[str], None]):
        super().__init__()
        self.names = names
        self.on_tensor = on_tensor

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            for written in await super().serialize([value.read()], [info], None if arg is None else [arg]):
                written.result()
            self.on_tensor(self.names[id(value)])
        return []
