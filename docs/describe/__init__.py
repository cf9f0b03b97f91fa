# SPDX-License-Identifier: Apache-2.0
"""Pages of reference, made of what the code says of itself."""
