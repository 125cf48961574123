"""The weights of a model in safetensors files: written whole, read whole or only the region that a rank holds."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from schemas.errors import ConfigError, ContractError
from train.export.families import StoredPlace, copies_in, family_of, name_there, places_of, shape_of_config
from train.export.model_folder import CONFIG, INDEX, WEIGHTS, check_file, json_bytes, read_json, weight_files
from train.model.shape import ModelShape, check_sizes, parameter_sizes

Region = tuple[slice, ...]
FLOATING = ("F64", "F32", "F16", "BF16")
"""Names that safetensors gives to the formats of floating-point numbers."""


ROWS_COMPARED = 4096
"""Rows of two matrices that are compared at a time."""


class StoredWeights:
    """The weights of a model in a folder, whose names and sizes have been compared with its configuration."""

    def __init__(self, folder: Path, stack: ExitStack):
        """`stack` closes the files. Raises ConfigError if our model does not support the configuration, ContractError
        if files are damaged or weights do not match it."""
        self.family, self.shape = shape_of_config(read_json(folder / CONFIG), str(folder / CONFIG))
        self.places = places_of(self.family, iter(parameter_sizes(self.shape)))
        self._folder, self._files = folder, dict[str, tuple[Any, str, Path]]()
        """By name in the table of the family: open file, name in the file, path."""
        for path in weight_files(folder):
            check_file(path)
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                names = {name: name_there(self.family, name) for name in list(file.keys())}
            except Exception as error:  # safetensors raises an exception of its own, which is not an OSError
                raise ContractError(
                    f"{path}: expected a safetensors file, got one that cannot be read ({error}). Download the file "
                    "again."
                ) from error
            for name, own in names.items():
                if own is not None:
                    self._add(own, (file, name, path))
        for copy, own in copies_in(self.family, self.shape).items():
            self._drop_copy(copy, own)
        self._check()

    def _add(self, own: str, place: tuple[Any, str, Path]) -> None:
        """Add a tensor of a file. Raises ContractError if the parameter has one already."""
        if own in self._files:
            _, other, path = self._files[own]
            raise ContractError(
                f"{self._folder}: expected one tensor for {own}, got {other} in {path.name} and {place[1]} in "
                f"{place[2].name}. Remove one of them, or download the folder again."
            )
        self._files[own] = place

    def _drop_copy(self, copy: str, own: str) -> None:
        """Leave out a tensor that some versions of `transformers` wrote beside the parameter that it is a copy of.

        Raises ConfigError if it has other numbers: the model was trained further with a matrix of its own.
        """
        if copy not in self._files or own not in self._files:
            return
        slices = [file.get_slice(stored) for file, stored, _ in (self._files[copy], self._files[own])]
        sizes = [tuple(held.get_shape()) for held in slices]
        begins = range(0, sizes[1][0] if sizes[1] else 0, ROWS_COMPARED)
        parts = ([held[begin : begin + ROWS_COMPARED].float() for held in slices] for begin in begins)
        if sizes[0] != sizes[1] or not all(torch.equal(*part) for part in parts):
            raise ConfigError(
                f"{self._folder}: expected {copy} with the numbers of {own}, because the configuration ties them, got "
                "others. Use a model whose output matrix is its embedding, or set tie_word_embeddings = false."
            )
        del self._files[copy]

    def _check(self) -> None:
        ours = dict[str, list[str]]()
        for name, place in self.places.items():
            ours.setdefault(place.name, []).append(name)
        actual: dict[str, Sequence[int]] = {}
        for theirs, (file, stored, path) in self._files.items():
            held = file.get_slice(stored)
            if (kind := held.get_dtype()) not in FLOATING:
                raise ContractError(
                    f"{path}: expected {theirs} as floating-point numbers, got {kind}. Use a model that is not "
                    "quantized."
                )
            size = list(held.get_shape())
            for name in ours.get(theirs, [theirs]):
                place = self.places.get(name, StoredPlace(name))
                part = [*size[:-1], size[-1] // place.num_parts] if place.num_parts > 1 else size
                actual[name] = part[::-1] if place.is_transposed else part
        check_sizes(actual, self.shape, str(self._folder))

    def read(self, name: str, region: Region) -> Tensor:
        """Return a region of a parameter of ours, float32; nothing else is read from the file."""
        place = self.places[name]
        file, stored, path = self._files[place.name]
        region = region[::-1] if place.is_transposed else region
        try:
            held = file.get_slice(stored)
            if place.num_parts > 1:  # along the outputs, which come last
                begin = place.part * held.get_shape()[-1] // place.num_parts
                region = (*region[:-1], slice(region[-1].start + begin, region[-1].stop + begin))
            value: Tensor = held[region].float()
        except Exception as error:
            raise ContractError(
                f"{path}: expected the numbers of {place.name}, got an error: {error}. Download the file again."
            ) from error
        return value.T if place.is_transposed else value

    def read_whole(self) -> dict[str, Tensor]:
        """Return every parameter of ours, float32, by name."""
        return {
            name: self.read(name, tuple(slice(0, size) for size in sizes)).contiguous()
            for name, sizes in parameter_sizes(self.shape).items()
        }


def write_weights(folder: Path, state: Mapping[str, Tensor], shape: ModelShape, max_bytes: int) -> None:
    """Write the parameters to one file, or to several with an index that names the file of each parameter."""
    parts: dict[str, list[tuple[StoredPlace, str]]] = {}
    for name, place in places_of(family_of(shape), iter(parameter_sizes(shape))).items():
        parts.setdefault(place.name, []).append((place, name))
    sizes = {theirs: sum(state[name].nbytes for _, name in held) for theirs, held in parts.items()}
    shards: list[list[str]] = [[]]
    for theirs, size in sizes.items():
        if shards[-1] and sum(sizes[name] for name in shards[-1]) + size > max_bytes:
            shards.append([])
        shards[-1].append(theirs)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, chosen in zip(files, shards):
        # safetensors makes a file that only its owner may read; the mode of a new file is that of the process.
        (folder / file).touch()
        mode = os.stat(folder / file).st_mode
        save_file({theirs: _joined(state, parts[theirs]) for theirs in chosen}, folder / file, {"format": "pt"})
        (folder / file).chmod(mode)
    if len(shards) > 1:
        index = {theirs: file for file, chosen in zip(files, shards) for theirs in chosen}
        text = json_bytes({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index})
        (folder / INDEX).write_bytes(text)


def _joined(state: Mapping[str, Tensor], parts: Sequence[tuple[StoredPlace, str]]) -> Tensor:
    """Return a tensor of theirs, made of parameters of ours."""
    turned = [
        state[name].detach().cpu().T if place.is_transposed else state[name].detach().cpu() for place, name in parts
    ]
    # Copies, since safetensors rejects views that share storage.
    return torch.cat(turned, dim=-1) if len(turned) > 1 else turned[0].contiguous().clone()
