# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: one process per device, static batches."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import refuse_other_formats

SPEC = BackendSpec(
    name="transformers",
    factory="pytest_llenergy.backends.transformers.backend:TransformersBackend",
    requires=("torch", "transformers"),
    install="pip install 'pytest-llenergy[transformers]'",
    capabilities=Capabilities(
        framework="torch",
        preload=("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
        data=True,
        tensor=True,
        placement=True,
        gpu=True,
        options=("dtype",),
        passes=True,
        caches=("dynamic", "static"),
        timestamps="token",
    ),
    refuses=lambda model: refuse_other_formats("transformers", model),
)
