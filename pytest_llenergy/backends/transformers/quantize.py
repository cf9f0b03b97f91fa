# SPDX-License-Identifier: Apache-2.0
"""Quantised weights, by packages that need not be installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pytest_llenergy.errors import BackendError


@dataclass(frozen=True)
class Package:
    """What quantises: ``module`` is what is imported, ``name`` what is installed."""

    name: str
    module: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.name}"


TORCHAO = Package("torchao", "torchao")
QUANTO = Package("optimum-quanto", "optimum.quanto")
BITSANDBYTES = Package("bitsandbytes", "bitsandbytes")

#: By the name of the load option. ``int8dyn`` quantises activations too, as they come.
QUANTISERS = {
    "int8wo": TORCHAO,
    "int8dyn": TORCHAO,
    "int8": QUANTO,
    "8bit": BITSANDBYTES,
    "nf4": BITSANDBYTES,
}


def keywords(name: str, config: Any, dtype: str, device: str) -> dict[str, Any]:
    """What ``from_pretrained`` is given, the device too: some packages' weights cannot be moved later.

    ``dtype`` is that of what is not quantised, and of the arithmetic; ``auto`` is that of the model's config.
    """
    import torch

    own = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    return {"quantization_config": _config(name, own or torch.float32), "device_map": {"": device}}


def described(name: str, model: Any) -> dict[str, str | int]:
    """For the record: by whom and how many layers. Raises ``BackendError`` when there are none."""
    package = QUANTISERS[name]
    layers = sum(_is_quantised(module, package) for module in model.modules())
    if layers == 0:
        raise BackendError(f"transformers: {package.name} has quantised no layer of this model")
    return {"quantizer": f"{package.name} {version(package.name)}", "quantized_layers": layers}


def _config(name: str, dtype: Any) -> Any:
    import transformers

    if name in ("int8wo", "int8dyn"):
        from torchao import quantization

        kind = (
            quantization.Int8WeightOnlyConfig
            if name == "int8wo"
            else quantization.Int8DynamicActivationInt8WeightConfig
        )
        return transformers.TorchAoConfig(kind())
    if name == "int8":
        return transformers.QuantoConfig(weights="int8")
    if name == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _is_quantised(module: Any, package: Package) -> bool:
    """Whether a layer, or the tensor that is its weight, is the package's own kind."""
    kinds = (type(module), type(getattr(module, "weight", None)))
    top = package.module
    # A parameter of a subclass is an instance of the subclass, except for the plain ones.
    return hasattr(module, "weight") and any(f"{kind.__module__}.".startswith(f"{top}.") for kind in kinds)
