# SPDX-License-Identifier: Apache-2.0
"""Generate the pictures of the documentation: python -m docs.pictures."""
