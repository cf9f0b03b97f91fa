# SPDX-License-Identifier: Apache-2.0
"""Pictures of the documentation, made by a script: python -m docs.pictures."""
