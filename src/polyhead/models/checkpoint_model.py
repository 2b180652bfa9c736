"""CheckpointModel: `from_pretrained` and `to_pretrained`, which all models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from polyhead.models import checkpoint_files, checkpoint_reading, checkpoint_writing

Model = TypeVar("Model", bound="CheckpointModel")
NamedTensors = list[tuple[str, checkpoint_reading.StoredTensor]]


class CheckpointModel(nn.Module, ABC):
    """The base class of models that read and write checkpoints in transformers' format.

    Attributes:
        config: the sizes of the model, from which `type(model)(config)` builds another.
    """

    config: Any
    _model_types: ClassVar[tuple[str, ...]]
    """The `model_type` of the config.json files that the model can read."""
    _module_names: ClassVar[Mapping[str, str]]
    """The model's modules -> the modules of a checkpoint; {} is the index of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        checkpoint_files.check_config(config)
        self.config = config

    @classmethod
    def from_pretrained(
        cls: type[Model], path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32
    ) -> Model:
        """Load a trained model, in evaluation mode, from a folder with config.json and model.safetensors, or from a package.

        Checkpoints of the bare model and of models with heads can both be read. With `dtype=None` parameters keep the
        stored dtype.

        Raises:
            FileNotFoundError: if the folder does not exist, or lacks a file.
            ValueError: if a file is invalid; tensors that are missing, unexpected or misshapen are named.
        """
        folder = checkpoint_files.find_checkpoint_folder(path_or_package)
        fields = checkpoint_files.read_config(folder, cls._model_types)
        config = cls._read_config(fields)
        with checkpoint_reading.open_checkpoint(folder) as stored:
            config, tensors = cls._select_tensors(config, stored)
            model = fields.build_on_meta(cls, config, len(stored.names))
            checkpoint_reading.load_into_model(model, stored, cls._module_names, tensors, dtype=dtype)
        return model.eval()

    def to_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, which transformers and `from_pretrained` can read.

        Raises:
            ValueError: if the model differs from its configuration, for example because heads were pruned or gated.
        """
        fields = self._config_json_fields()
        with torch.device("meta"):
            fresh = type(self)(self.config)
        tensors = checkpoint_writing.name_tensors_for_checkpoint(self, fresh, self._module_names)
        checkpoint_writing.save_checkpoint(folder, fields, self._convert_to_stored(tensors))

    @classmethod
    @abstractmethod
    def _read_config(cls, fields: checkpoint_files.ConfigFile) -> Any:
        """The configuration that a config.json describes."""

    @classmethod
    @abstractmethod
    def _select_tensors(cls, config: Any, stored: checkpoint_reading.OpenCheckpoint) -> tuple[Any, NamedTensors]:
        """The tensors of a checkpoint to read, under their names in `_module_names`, and the configuration completed by them."""

    @abstractmethod
    def _config_json_fields(self) -> dict[str, Any]:
        """The fields of config.json."""

    @abstractmethod
    def _convert_to_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors named by `_module_names` as the checkpoint stores them."""
