# SPDX-License-Identifier: Apache-2.0
"""How people see it: files, journal, terminal."""
