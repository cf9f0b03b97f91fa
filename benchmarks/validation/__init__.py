# SPDX-License-Identifier: Apache-2.0
"""Validation on a real GPU, one module per part; ``run.sh`` runs all. See docs/validation/README.md."""
