# SPDX-License-Identifier: Apache-2.0
"""Is it true on a real GPU? One module a part; ``run.sh`` runs them all. See docs/validation/README.md."""
