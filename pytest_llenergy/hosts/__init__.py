# SPDX-License-Identifier: Apache-2.0
"""More than one host: launchers, an agent on every host, and pytest's connection to each."""
