# SPDX-License-Identifier: Apache-2.0
"""Other plugins. Only the plugin and its controller import these modules."""
